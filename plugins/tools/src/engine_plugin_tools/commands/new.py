"""``engine new``: a plugin or a run file to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine_core.cli.output import writing_problem
from engine_core.errors import EnvironmentProblem
from engine_plugin_tools.recipes import read_recipe, recipe_names
from engine_plugin_tools.scaffold import KINDS, new_plugin, new_run


def plugin(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Lower-case letters, digits, '_' and '-': my_reward.")
    ],
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Where its own folder is put.")
    ] = Path(),
    kind: Annotated[
        str, typer.Option("--kind", metavar="KIND", help=f"One of {', '.join(KINDS)}.")
    ] = "reward",
) -> None:
    """Write a complete plugin with a reward, or with another kind of thing, its tests and its packaging; prints its folder.

    Example: engine new plugin my_loss --kind loss --dir plugins
    """
    check_writable(folder)
    path = new_plugin(name, folder, kind)
    print(f"{path}\nInstall it: pip install -e '{path}[dev]'")


def run(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Where run.toml and its data are put.")
    ] = Path(),
    recipe: Annotated[
        str,
        typer.Option(
            "--recipe", metavar="NAME", help="Write the run file of a published model and data set."
        ),
    ] = "",
    listed: Annotated[bool, typer.Option("--list", help="Only list the recipes.")] = False,
) -> None:
    """Write a run file to start from, with a few rows of data, or a recipe; prints its path and the next commands.

    Example: engine new run small --recipe qwen3-0.6b-gsm8k
    """
    if listed:
        list_recipes()
        return
    chosen = read_recipe(recipe) if recipe else None
    check_writable(folder)
    path = new_run(folder, chosen)
    print(path)
    if chosen is None:
        print(f"Check it: engine validate {path}")
        return
    about = chosen.about
    print(f"{chosen.title}: {about['hardware']}, {about['status']}.")
    print(f"Install:  {about['install']}\nCheck it: engine validate {path}\nTrain:    engine train {path}")


def list_recipes() -> None:
    """Print the name, the hardware and the title of each recipe."""
    recipes = [read_recipe(name) for name in recipe_names()]
    width = max(len(recipe.name) for recipe in recipes)
    for recipe in recipes:
        print(f"{recipe.name:{width}}  {recipe.about['hardware']:16}  {recipe.title}")
    print("Write one: engine new run DIR --recipe NAME")


def check_writable(folder: Path) -> None:
    """Raise if nothing can be written below ``folder``.

    Raises:
        EnvironmentProblem: with the reason.
    """
    if problem := writing_problem(folder):
        raise EnvironmentProblem(f"Nothing can be written in '{folder}': {problem}. Choose another place.")
