"""What the pages of ``docs/reference`` are made of."""

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def page(title: str, intro: str, *parts: str) -> str:
    note = "<!-- Written by docs/references.py from the code. Change the code, then run `make docs`. -->"
    return "\n\n".join([note, f"# {title}", intro, *parts]) + "\n"


def table(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines)


def plain(text: str) -> str:
    """Markdown of a docstring: one line, names in single back ticks."""
    return re.sub(r"\s+", " ", text.replace("``", "`")).strip()


def run_recorded(record: Path, tests: Iterable[str]) -> int:
    """Run tests of the conformance kit and keep their outcomes in ``record``; return pytest's exit code."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "engine_plugin_testing.recorder"]
    command += ["--rootdir", str(ROOT), "--record-contracts", str(record), *tests]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def recorded_page(
    doc: str | None,
    files: Mapping[Path, Callable[[], str]],
    backends: Collection[str],
    run: Callable[[list[str]], int],
) -> None:
    """Run the command line of a page of recorded outcomes: record, then write or check it.

    Args:
        doc: the docstring of the script, of which the first line is shown.
        files: the page and what else is written from the record, each with a function that returns its text.
        backends: names that ``--record`` takes.
        run: runs the tests of the named backends, of all if none is named; returns pytest's exit code.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if the page is out of date"
    )
    parser.add_argument(
        "--record",
        nargs="*",
        choices=[*backends],
        metavar="NAME",
        help="run the tests of these backends first, or of all",
    )
    given = parser.parse_args()
    code = 0 if given.record is None else run(given.record)
    for file, make in files.items():
        made = make()
        if not given.check:
            file.write_text(made, "utf-8")
        elif not file.is_file() or file.read_text("utf-8") != made:
            sys.exit(f"{file.relative_to(ROOT)} is out of date: run python docs/{Path(sys.argv[0]).name}.")
    sys.exit(code)
