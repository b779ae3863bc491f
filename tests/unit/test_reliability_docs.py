"""docs/reliability.md promises nothing that no test shows."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text("utf-8")
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


def rows():
    """Return the rows of the tables of scenarios: those with a column of tests."""
    tables = re.findall(r"^\| what happens.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    return [row for table in tables for row in table.splitlines()]


def functions(folder):
    """Return (file, function) of every test in a folder."""
    return {
        (path.name, node.name)
        for path in folder.rglob("test_*.py")
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }


def test_every_scenario_names_a_test():
    assert len(rows()) > 40
    without = [row for row in rows() if not NAMED.search(row) and "| the same |" not in row[-12:]]
    assert without == []


def test_every_named_test_exists():
    named = {match.groups() for match in NAMED.finditer(PAGE)}
    assert len(named) > 50
    folders = [ROOT / "tests", *(ROOT / "plugins").glob("[a-z]*/tests")]
    assert named - set().union(*map(functions, folders)) == set()


def test_every_file_of_the_chaos_tests_is_in_the_page():
    files = {path.name for path in (ROOT / "tests" / "chaos").glob("test_*.py")} - {"test_launcher.py"}
    assert files - {match[1] for match in NAMED.finditer(PAGE)} == set()
