"""``engine demo``: from nothing to a trained model, in minutes, on a CPU."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Annotated

import typer

from engine_core.runs.tracking import RunFolder, read_rollouts
from engine_plugin_tools.curves import draw_curves
from engine_plugin_tools.demo.prepare import prepare
from engine_plugin_tools.demo.walkthrough import accuracies, engine, fresh
from engine_plugin_tools.demo.walkthrough import steps as length
from engine_plugin_tools.packages import require_package
from engine_plugin_tools.scaffold import new_demo


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
    """Make word problems and a small model, train it by SFT and GRPO, and write a report; no downloads.

    It starts over: what an earlier demo left in the folder is deleted. The last line printed holds the held-out
    accuracy before and after GRPO.

    Example: engine demo --folder demo
    """
    start = time.monotonic()
    for package, extra in (("tensorboard", "tensorboard"), ("matplotlib", "report")):
        require_package(package, extra, "engine demo")
    fresh(folder)
    print(f"Making data, tokenizer and a random model in {folder}", flush=True)
    prepare(folder, seed)
    new_demo(folder)
    seeds = [word for key in ("run", "model") for word in ("--set", f"{key}.seed={seed}")] if seed else []
    name = "control" if control else "grpo"
    run = folder / "runs" / name
    engine("train", str(folder / "sft.toml"), *seeds, *length(sft_steps))
    engine("export", str(folder / "runs" / "sft"), str(folder / "sft"))
    engine("train", str(folder / f"{name}.toml"), *seeds, *length(steps))
    engine("export", str(run), str(folder / "trained"))
    engine("report", str(run))
    finish(folder, run, time.monotonic() - start)


def finish(folder: Path, run: Path, seconds: float) -> None:
    """Print samples, the paths of the results, and the last line."""
    shutil.copy(run / "report.html", folder / "report.html")
    draw_curves(RunFolder(run).read_metrics()).savefig(folder / "curves.png", dpi=130)
    show_samples("Held-out problems before:", run, 0)
    show_samples("... and after:", run, -1)
    places = {
        "Report": "report.html",
        "curves": "curves.png",
        "model": "trained",
        "run file": f"{run.name}.toml",
    }
    print("\n" + "   ".join(f"{what}: {folder / path}" for what, path in places.items()))
    print(f"Wall time: {seconds:.0f} s")
    found = accuracies(run)
    print(f"held-out accuracy {found[0]:.2f} -> {found[-1]:.2f}")


def show_samples(title: str, run: Path, which: int, count: int = 3) -> None:
    """Print the first held-out problems and their responses in evaluation number ``which``."""
    print(f"\n{title}")
    file = sorted((run / "rollouts" / "eval").glob("*.parquet"))[which]
    for rollout in read_rollouts(file)[:count]:
        verdict = "right" if rollout.reward > 0 else "wrong"
        lines = rollout.text.strip().splitlines() or ["(no text)"]  # an untrained model writes line breaks
        print(f"  {rollout.prompt.text.strip()}\n    {verdict}: {' '.join(filter(None, lines))}")
