"""Recipes: run files for published models and data sets, each with a comment block of fixed form at its beginning.

The block has a title and a line for each of ``FIELDS``; a line that begins with more spaces continues the one above:

    # Qwen2.5-0.5B-Instruct on GSM8K, GRPO
    #
    # what       GRPO of all weights; the reward is 1 if the last number is the answer
    # hardware   1 GPU of 24 GB
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine_core.errors import ConfigError, did_you_mean

RECIPES = Path(__file__).parent / "templates" / "recipes"
FIELDS = ("what", "install", "hardware", "minutes", "memory", "published", "source", "differs", "status")
"""What is done, how to install what it needs, GPUs, duration, memory of each GPU, published results, their addresses,
what is not as published, and whether it was run on real weights."""


@dataclass(frozen=True)
class Recipe:
    """A run file that comes with this package.

    Attributes:
        name: of the file, without its ending.
        title: first line of the comment block.
        about: text of each of ``FIELDS``.
        text: the whole file.
    """

    name: str
    title: str
    about: Mapping[str, str]
    text: str


def recipe_names() -> list[str]:
    """Return the names of all recipes, in alphabetical order."""
    return sorted(file.stem for file in RECIPES.glob("*.toml"))


def read_recipe(name: str) -> Recipe:
    """Read a recipe.

    Raises:
        ConfigError: there is no such recipe.
        ValueError: the file's comment block is not of the form that this module describes.
    """
    if name not in recipe_names():
        raise ConfigError(
            f"--recipe '{name}' is unknown.{did_you_mean(name, recipe_names())} "
            "`engine new run --list` shows all with their hardware."
        )
    text = (RECIPES / f"{name}.toml").read_text("utf-8")
    title, about = parse_header(text)
    return Recipe(name, title, about, text)


def parse_header(text: str) -> tuple[str, dict[str, str]]:
    """Return the title and the fields of the comment block with which a recipe begins.

    Raises:
        ValueError: a line is not of the form, or the fields are not ``FIELDS`` in their order.
    """
    title, rule, *lines = text.partition("\n\n")[0].splitlines()
    about: dict[str, str] = {}
    for line in lines:
        if found := re.fullmatch(r"# ([a-z]+) +(\S.*)", line):
            about[found[1]] = found[2]
        elif about and (found := re.fullmatch(r"#  +(\S.*)", line)):
            about[[*about][-1]] += f" {found[1]}"
        else:
            raise ValueError(f"'{line}' is no line '# FIELD   text' of a recipe's comment block.")
    if rule != "#" or not title.startswith("# ") or tuple(about) != FIELDS:
        raise ValueError(
            f"A recipe begins with '# TITLE', '#' and the fields {', '.join(FIELDS)}; got {', '.join(about)}."
        )
    return title.removeprefix("# "), about
