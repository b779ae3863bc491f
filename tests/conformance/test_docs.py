"""docs/reference/contracts.md lists the contracts as they are; ``python -m engine_plugin_testing`` prints the tables."""

import re
from pathlib import Path

import pytest

import engine_plugin_testing as kit
from engine_plugin_testing.__main__ import table

DOCS = Path(__file__).parents[2] / "docs"
TABLES = (DOCS / "reference" / "contracts.md").read_text("utf-8")


@pytest.mark.parametrize("name", kit.__all__)
def test_the_table_of_contracts_is_that_of_the_suite(name):
    part = TABLES.split(f"<!-- {name} -->\n")[1].split(f"\n<!-- end of {name} -->")[0]
    assert part == table(getattr(kit, name))


def test_the_attributes_in_the_text_are_those_of_the_suites():
    section = TABLES.split("## Attributes of a suite")[1].split("\n## ")[0]
    said = {
        name
        for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    there = {
        name
        for suite in (getattr(kit, name) for name in kit.__all__)
        for cls in suite.__mro__[:-1]
        for name in cls.__annotations__
        if not name.startswith("_")
    }
    assert said == there - {"kind", "section", "bench", "fields", "contracts"}
