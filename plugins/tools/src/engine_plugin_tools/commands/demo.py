"""``engine demo``: from nothing to a trained model, in minutes, on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    folder: Annotated[Path, typer.Option("--folder", metavar="DIR", help="Where everything is put.")] = Path(
        "demo"
    ),
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of data, weights and sampling.")] = 0,
    sft_steps: Annotated[
        int | None,
        typer.Option("--sft-steps", min=1, help="Steps of the warm start; default: those of its run file."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Steps of GRPO; default: those of its run file.")
    ] = None,
    control: Annotated[
        bool, typer.Option("--control", help="Shuffle the rewards among the prompts: accuracy must not rise.")
    ] = False,
) -> None:
    """Make word problems and a small model, train it by SFT and GRPO, and write a report; no downloads."""
    from engine_plugin_tools.demo.walkthrough import walk

    walk(folder, seed, sft_steps, steps, control)
