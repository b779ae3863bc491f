"""``engine replay``: replays a step of a run and prints its numbers next to the recorded ones."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine_core.cli.loading import read_run, trainer_of
from engine_core.cli.options import Json, Run, Sets
from engine_core.cli.output import print_json, print_table
from engine_core.config.dump import as_data, differences
from engine_core.redaction import Redactor
from engine_core.runs.tracking import RunFolder

if TYPE_CHECKING:
    from engine_core.config import EngineConfig
    from engine_plugin_tools.replaying import Replayed


def replay(
    run: Run,
    step: Annotated[int, typer.Option("--step", min=1, metavar="N", help="The step that is done again.")],
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Do one step of a run again from its stored rollouts, and print its metrics next to the recorded ones.

    It starts from the newest checkpoint of an earlier step, or from the model, and learns the steps between
    from their rollouts first. With unchanged settings on the same machine the numbers are equal. Nothing is
    sampled, and nothing is written into RUN.

    Example: engine replay latest --step 12 --set algorithm.loss=cispo
    """
    from engine_plugin_tools.replaying import check_step, find_start, first_difference
    from engine_plugin_tools.replaying import replay as do_again

    folder = RunFolder.open(run)
    check_step(step, folder)
    config = read_run(folder, sets)
    with closing(trainer_of(config)) as trainer:
        start = find_start(trainer, folder, step)
        print(
            f"step {step} of {folder.path}, {start}", file=sys.stderr if as_json else sys.stdout, flush=True
        )
        done, updates = do_again(trainer, folder, step, start), trainer.optimizer_steps_per_step
    changed = _changed(folder, config)
    if as_json:
        print_json(_plain(folder, step, done, changed))
        return
    for difference in changed:
        print(f"changed: {difference}")
    print_table([_row(*row) for row in done.rows()], header=("METRIC", "RECORDED", "AGAIN", ""))
    pairs = {name: (then, now) for name, then, now in done.rows() if then is not None}
    if said := first_difference(pairs, updates):
        print(said)


def _row(name: str, then: float | None, now: float) -> tuple[str, str, str, str]:
    if then is None:
        return name, "-", f"{now:.8g}", ""
    return name, f"{then:.8g}", f"{now:.8g}", "equal" if now == then else f"{now - then:+.3g}"


def _changed(folder: RunFolder, config: EngineConfig) -> list[str]:
    """Return the settings that --set has changed, without secrets."""
    was, now = as_data(read_run(folder, None)), as_data(config)
    hide = Redactor.of(now)
    return [f"{d.key}: {d.was} -> {d.now}" for d in differences(hide.tree(was), hide.tree(now))]


def _plain(folder: RunFolder, step: int, done: Replayed, changed: list[str]) -> dict[str, Any]:
    start = done.start
    return {
        "run": str(folder.path),
        "step": step,
        "checkpoint": None if start.checkpoint is None else str(start.checkpoint),
        "learned_again": list(start.again),
        "left_out": list(start.left_out),
        "changed": changed,
        "metrics": {name: {"recorded": then, "again": now} for name, then, now in done.rows()},
    }
