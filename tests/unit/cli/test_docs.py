"""docs/cli.md describes exactly the command line that exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from engine_core.plugins.metadata import known_names

PAGE = (Path(__file__).parents[3] / "docs" / "cli.md").read_text("utf-8")
EXAMPLES = re.findall(r"^\$ engine (.+)$", PAGE, re.MULTILINE)
ALL = [name.replace(".", " ") for name in known_names("commands")]


def command_of(words):
    return " ".join(words[:2] if " ".join(words[:2]) in ALL else words[:1])


def test_the_page_lists_exactly_the_commands_that_exist():
    assert sorted(re.findall(r"^### engine (.+)$", PAGE, re.MULTILINE)) == sorted(ALL)


def test_every_command_has_an_example_below_its_heading():
    sections = dict(re.findall(r"^### engine (.+?)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))
    assert all(f"\n$ engine {command}" in sections[command] for command in ALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_options_of_an_example_exist(engine, example):
    words = shlex.split(example)
    shown = engine(*command_of(words).split(), "--help").out
    for word in words:
        if word.startswith("-"):
            assert re.search(rf"{re.escape(word)}\b", shown), word
