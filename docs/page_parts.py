"""What the pages of ``docs/reference`` are made of."""

import re
from collections.abc import Iterable


def page(title: str, intro: str, *parts: str) -> str:
    note = "<!-- Written by docs/references.py from the code. Change the code, then run `make docs`. -->"
    return "\n\n".join([note, f"# {title}", intro, *parts]) + "\n"


def table(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines)


def plain(text: str) -> str:
    """Markdown of a docstring: one line, names in single back ticks."""
    return re.sub(r"\s+", " ", text.replace("``", "`")).strip()
