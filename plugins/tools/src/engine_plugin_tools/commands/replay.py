"""``engine replay``: replays a step of a run and prints its numbers next to the recorded ones, or to those of a second replay."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine_core.cli.loading import load_trainer, read_run
from engine_core.cli.options import Json, Run, Sets
from engine_core.cli.output import print_json, print_table
from engine_core.config.dump import as_data, differences
from engine_core.redaction import Redactor
from engine_core.runs.tracking import RunFolder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.config import EngineConfig
    from engine_plugin_tools.layer_updates import LayerUpdate
    from engine_plugin_tools.replaying import Replayed


SAMPLED = ("rollout.", "reward.", "environment.")
"""Keys whose swap shows only if the step is sampled again."""


def replay(
    run: Run,
    step: Annotated[int, typer.Option("--step", min=1, metavar="N", help="The step that is done again.")],
    sets: Sets = None,
    swaps: Annotated[
        list[str] | None,
        typer.Option(
            "--swap",
            metavar="KEY=VALUE",
            help="Replay twice, without and with this change, and compare both.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Do one step of a run again from its stored rollouts, and print its metrics next to the recorded ones.

    It starts from the newest checkpoint of an earlier step, or from the model, and learns the steps between
    from their rollouts first. With unchanged settings on the same machine the numbers are equal. Nothing is
    sampled, and nothing is written into RUN. With --swap, the step is replayed twice on this machine; the
    updates of the weights are compared by layer. A swap of [rollout], [[reward]] or [environment] samples and
    scores the step's prompts again.

    Example: engine replay latest --step 12 --swap actor.backend=fsdp
    """
    from engine_plugin_tools.replaying import check_step

    folder = RunFolder.open(run)
    check_step(step, folder)
    config = read_run(folder, sets)
    layers: list[LayerUpdate] = []
    swapped = read_run(folder, [*(sets or []), *swaps]) if swaps else config
    if swaps:
        sample = any(swap.startswith(SAMPLED) for swap in swaps)
        done, layers, said = _compare(folder, config, swapped, step, sample, as_json)
    else:
        done, updates = _again(folder, config, step, as_json)
        said = _first_difference(done, updates)
    changed, lines = _changed(folder, swapped), [line for line in (said, _where(layers)) if line]
    if as_json:
        print_json(_plain(folder, step, done, changed, layers, lines))
        return
    for difference in changed:
        print(f"changed: {difference}")
    header = ("METRIC", "FIRST", "SWAPPED", "") if swaps else ("METRIC", "RECORDED", "AGAIN", "")
    print_table([_row(*row) for row in done.rows()], header=header)
    if layers:
        _print_layers(layers, done)
    for line in lines:
        print(line)


def _compare(
    folder: RunFolder, config: EngineConfig, swapped: EngineConfig, step: int, sample: bool, quiet: bool
) -> tuple[Replayed, list[LayerUpdate], str]:
    """Replay a step without and with a change; return the second replay, the updates by layer, and what differs first.

    The metrics of the first replay are the recorded ones of the second.
    """
    from engine_plugin_tools.layer_updates import compare_updates
    from engine_plugin_tools.replaying import differing_samples

    with tempfile.TemporaryDirectory() as name:
        first, second = Path(name, "first"), Path(name, "second")
        before, _ = _again(folder, config, step, quiet, first, sample)
        done, updates = _again(folder, swapped, step, quiet, second, sample)
        layers = compare_updates(first, second)
    done = dataclasses.replace(done, recorded=before.metrics)
    said = differing_samples(before.samples, done.samples) or _first_difference(done, updates)
    if not said and _where(layers):
        said = "The first part that differs: update (its metrics are equal)."
    return done, layers, said


def _first_difference(done: Replayed, updates: int) -> str:
    from engine_plugin_tools.replaying import first_difference

    return first_difference(
        {name: (then, now) for name, then, now in done.rows() if then is not None}, updates
    )


def _print_layers(layers: Sequence[LayerUpdate], done: Replayed) -> None:
    rows = [(row.name, f"{row.size:.3g}", f"{row.other:.3g}", f"{row.share:.1e}") for row in layers]
    print_table(rows, header=("UPDATE OF", "FIRST", "SWAPPED", "DIFFERENCE"))
    if done.start.again:
        print(
            "The steps before it were learned with the change too: a step after a checkpoint shows it alone."
        )


def _again(
    folder: RunFolder,
    config: EngineConfig,
    step: int,
    quiet: bool,
    weights: Path | None = None,
    sample: bool = False,
) -> tuple[Replayed, int]:
    """Return the replayed step and the optimizer steps of a step; say from which state it starts."""
    from engine_plugin_tools.replaying import find_start, replay

    with closing(load_trainer(config)) as trainer:
        start = find_start(trainer, folder, step)
        print(f"step {step} of {folder.path}, {start}", file=sys.stderr if quiet else sys.stdout, flush=True)
        return replay(trainer, folder, step, start, weights, sample), trainer.optimizer_steps_per_step


def _where(layers: Sequence[LayerUpdate]) -> str:
    """Return a sentence on the layers whose updates differ by more than float32 rounds; empty if none does."""
    from engine_plugin_tools.layer_updates import ROUNDING

    differing = [row for row in layers if row.share > ROUNDING]
    if not differing:
        return ""
    names = [row.name for row in differing]
    last = f" The last in the model is {names[-1]}: in a backward pass, a difference begins there." * (
        len(names) < len(layers)
    )
    return f"The updates of {len(names)} of {len(layers)} layers differ by more than float32 rounds.{last}"


def _row(name: str, then: float | None, now: float) -> tuple[str, str, str, str]:
    if then is None:
        return name, "-", f"{now:.8g}", ""
    return name, f"{then:.8g}", f"{now:.8g}", "equal" if now == then else f"{now - then:+.3g}"


def _changed(folder: RunFolder, config: EngineConfig) -> list[str]:
    """Return the settings that --set has changed, without secrets."""
    was, now = as_data(read_run(folder, None)), as_data(config)
    hide = Redactor.of(now)
    return [f"{d.key}: {d.was} -> {d.now}" for d in differences(hide.tree(was), hide.tree(now))]


def _plain(
    folder: RunFolder,
    step: int,
    done: Replayed,
    changed: list[str],
    layers: Sequence[LayerUpdate],
    said: list[str],
) -> dict[str, Any]:
    start = done.start
    return {
        "run": str(folder.path),
        "step": step,
        "checkpoint": None if start.checkpoint is None else str(start.checkpoint),
        "learned_again": list(start.again),
        "left_out": list(start.left_out),
        "changed": changed,
        "said": said,
        "metrics": {name: {"recorded": then, "again": now} for name, then, now in done.rows()},
        "layers": {
            row.name: {"update": row.size, "swapped": row.other, "difference": row.share} for row in layers
        },
    }
