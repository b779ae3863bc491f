"""docs/reference/failures.md promises nothing that no test shows: docs/reference/reliability_tests.md names the tests of each row."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "failures.md").read_text("utf-8")
TESTS = (ROOT / "docs" / "reference" / "reliability_tests.md").read_text("utf-8")
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


def rows(page):
    """Return (section, what happens, next cell) of each row of the tables of scenarios."""
    sections = re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", page, re.MULTILINE)
    return [
        (section, *row.strip("| ").split(" | ")[:2])
        for section, text in sections
        for table in re.findall(r"^\| what happens.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
        for row in table.splitlines()
    ]


def functions(folder):
    """Return (file, function) of every test in a folder."""
    return {
        (path.name, node.name)
        for path in folder.rglob("test_*.py")
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }


def test_every_scenario_names_a_test():
    assert len(rows(PAGE)) > 40
    assert [row[:2] for row in rows(PAGE)] == [row[:2] for row in rows(TESTS)]
    assert [row for row in rows(TESTS) if not NAMED.search(row[2])] == []


def test_every_named_test_exists():
    named = {match.groups() for match in NAMED.finditer(TESTS)}
    assert len(named) > 50
    folders = [ROOT / "tests", *(ROOT / "plugins").glob("[a-z]*/tests")]
    assert named - set().union(*map(functions, folders)) == set()


def test_every_file_of_the_chaos_tests_is_in_the_page():
    files = {path.name for path in (ROOT / "tests" / "chaos").glob("test_*.py")} - {"test_launcher.py"}
    assert files - {match[1] for match in NAMED.finditer(TESTS)} == set()
