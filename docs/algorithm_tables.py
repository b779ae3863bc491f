"""Writes the tables of ``docs/algorithms.md`` from the docstrings of the functions that they are about.

    python docs/algorithm_tables.py            write what changed (`make docs` does this first)
    python docs/algorithm_tables.py --check    change nothing; name the tables that are out of date, exit 1

A function of a table says, in lines of its docstring that stand for themselves:

    Formula: ``A = R - mean``
    Paper: https://arxiv.org/abs/2503.20783
    Differs: where ours is not the paper's, or not that of others

``Formula`` must be there; a line may go on in lines that are indented further. Tables stand between
``<!-- NAME -->`` and ``<!-- end of NAME -->``. A test runs ``--check``.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine_core import builtin

PAGE = Path(__file__).parent / "algorithms.md"
FIELDS = ("Formula", "Paper", "Differs")

Functions = Mapping[str, Callable[..., Any]]


def offered(table: Mapping[str, Any]) -> Functions:
    """The functions behind the names of a table hook."""
    return {name: spec.resolve() for name, spec in table.items()}


TABLES: Mapping[str, tuple[str, Callable[[], Functions]]] = {
    "advantages": ("`advantage`", lambda: offered(builtin.engine_advantages())),
    "losses": ("`loss`", lambda: offered(builtin.engine_losses())),
    "stages": ("`[[stage]] name`", lambda: offered(builtin.engine_stages())),
}
"""Name of the table: its first heading, and what is in it."""


def fields(function: Callable[..., Any]) -> dict[str, str]:
    """``Formula``, ``Paper`` and ``Differs`` of a docstring, as Markdown in one line each."""
    text = inspect.getdoc(function) or ""
    found = {}
    for name in FIELDS:
        line = re.search(rf"^{name}: (.*(?:\n[ ]+.*)*)", text, re.MULTILINE)
        found[name] = re.sub(r"\s+", " ", line[1]).replace("``", "`").strip() if line else ""
    if not found["Formula"]:
        raise SystemExit(
            f"{function.__module__}.{function.__qualname__}: no line 'Formula: ...' in its docstring."
        )
    found["Paper"] = re.sub(r"https?://(?:arxiv\.org/abs/|doi\.org/)?([^\s,]+)", _link, found["Paper"])
    return found


def _link(match: re.Match[str]) -> str:
    return f"[{match[1].removeprefix('github.com/')}]({match[0]})"


def table(name: str) -> str:
    """One table in Markdown."""
    heading, functions = TABLES[name]
    rows = [[heading, "what it is", "formula", "paper", "where ours differs"], ["---"] * 5]
    for key, function in functions().items():
        said = fields(function)
        first = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ").rstrip(".")
        rows.append([f"`{key}`", first.replace("``", "`"), *(said[field] for field in FIELDS)])
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def written(text: str) -> str:
    """The page with its tables as they should be; a name without markers is left out."""
    for name in TABLES:
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        if start in text:
            before, rest = text.split(start)
            text = before + start + table(name) + "\n" + end + rest.split(end)[1]
    return text


def stale() -> list[str]:
    """Tables whose text is not what the code says."""
    text = PAGE.read_text("utf-8")
    return [name for name in TABLES if f"<!-- {name} -->\n{table(name)}\n<!-- end of {name} -->" not in text]


def main() -> int:
    if "--check" in sys.argv:
        for name in stale():
            print(
                f"docs/algorithms.md: the table '{name}' is out of date. Run: python docs/algorithm_tables.py"
            )
        return 1 if stale() else 0
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
