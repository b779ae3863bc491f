"""Every command's help ends with an example, and docs/cli.md links every command."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from engine_core.plugins.metadata import known_names

DOCS = Path(__file__).parents[3] / "docs"
ALL = [name.replace(".", " ") for name in known_names("commands")]


def test_the_page_links_exactly_the_commands_that_exist():
    linked = re.findall(
        r"\]\(reference/commands\.md#engine-([a-z-]+)\)", (DOCS / "cli.md").read_text("utf-8")
    )
    assert {*linked} == {name.replace(" ", "-") for name in ALL}


@pytest.mark.parametrize("command", ALL)
def test_the_help_ends_with_an_example_whose_options_exist(engine, command):
    shown = engine(*command.split(), "--help").out
    paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", shown)]
    assert paragraphs[-1].startswith("Exit codes: 0 done, 1 bug")
    (example,) = [each for each in paragraphs if each.startswith("Example: engine ")]
    words = shlex.split(example.removeprefix("Example: engine "))
    assert words[: len(command.split())] == command.split()
    for word in words:
        if word.startswith("-"):
            assert len(re.findall(rf"{re.escape(word)}\b", shown)) > 1, word
