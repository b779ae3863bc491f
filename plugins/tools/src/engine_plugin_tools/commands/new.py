"""``engine new``: a plugin or a run file to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine_core.cli.output import writing_problem
from engine_core.errors import EnvironmentProblem
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
    """Write a complete plugin with a reward, or with another kind of thing, its tests and its packaging; prints its folder."""
    check_writable(folder)
    path = new_plugin(name, folder, kind)
    print(f"{path}\nInstall it: pip install -e {path}")


def run(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Where run.toml and its data are put.")
    ] = Path(),
) -> None:
    """Write a run file to start from, with a few rows of data; prints its path."""
    check_writable(folder)
    path = new_run(folder)
    print(f"{path}\nCheck it: engine validate {path}")


def check_writable(folder: Path) -> None:
    """Raise if nothing can be written below ``folder``.

    Raises:
        EnvironmentProblem: with the reason.
    """
    if problem := writing_problem(folder):
        raise EnvironmentProblem(f"Nothing can be written in '{folder}': {problem}. Choose another place.")
