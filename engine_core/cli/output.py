"""Output of commands: aligned tables and JSON on stdout, and checks of output paths."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_core.errors import ConfigError, EnvironmentProblem
from engine_core.redaction import harmless
from engine_core.runs.folders import writing_problem


def print_json(value: Any) -> None:
    """Print one JSON document. A value that JSON cannot represent (a path, a date) is printed as text."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_table(rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> None:
    """Print left-aligned columns, two spaces apart. Print nothing if there are no rows."""
    if not rows:
        return
    lines = [[harmless(cell) for cell in line] for line in ([header, *rows] if header else rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def check_new(path: Path) -> None:
    """Check that an output folder can be created at ``path``. An empty folder there is accepted.

    Raises:
        ConfigError: ``path`` exists and is not an empty folder.
        EnvironmentProblem: ``path`` cannot be created.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigError(f"'{path}' exists already, and nothing is overwritten. Choose another name.")
    if problem := writing_problem(path):
        raise EnvironmentProblem(f"'{path}' cannot be made: {problem}. Choose another place.")
