"""docs/cli.md describes exactly the command line that exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from engine_core.cli.main import COMMANDS

PAGE = (Path(__file__).parents[3] / "docs" / "cli.md").read_text("utf-8")
EXAMPLES = re.findall(r"^\$ engine (.+)$", PAGE, re.MULTILINE)
ALL = [
    command
    for name, entry in COMMANDS.items()
    for command in ([name] if isinstance(entry, str) else [f"{name} {inner}" for inner in entry])
]


def command_of(words):
    return " ".join(words[:1] if isinstance(COMMANDS.get(words[0], ""), str) else words[:2])


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
