"""The lines of commands that check something: doctor, check-template."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from engine_core.cli.output import print_json
from engine_core.redaction import harmless

WIDTH = 20
"""Of the column of names."""


class Check(NamedTuple):
    """A line of the answer."""

    state: str  # ok, warning, problem
    name: str  # what was checked
    found: str  # with the fix or the reason, if it is not ok


def show_checks(checks: Iterable[Check], as_json: bool, problem_code: int) -> int:
    """Print each check when it is done; return the exit code, which is ``problem_code`` if one of them is a problem."""
    found = []
    for check in checks:
        found.append(check)
        if not as_json:
            print(harmless(f"{check.state:7}  {check.name:{WIDTH}}  {check.found}"), flush=True)
    if as_json:
        print_json([check._asdict() for check in found])
    return problem_code if any(check.state == "problem" for check in found) else 0
