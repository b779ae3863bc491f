"""Replay of a step of a run from its stored rollouts and its initial state. The run is only read.

The state before step N is the newest good checkpoint of an earlier step, or the model if there is none. Steps in
between are replayed from their own rollouts, so that on the same machine with unchanged settings the numbers of step N
equal the recorded ones.

A replay learns from the rollouts that were written. It samples and scores its prompts again if asked to, to compare samplers
and rewards; the checkpoint must then be that of step N - 1, whose place in the data it has.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine_core.errors import DataError
from engine_core.runs.checkpoint import Checkpoints, problems
from engine_core.runs.rollout_files import RolloutFile
from engine_core.train.checkpointing import Resume

if TYPE_CHECKING:
    from pathlib import Path

    from engine_core.runs.tracking import RunFolder
    from engine_core.train.run import TrainingRun
    from engine_core.types import Rollout

log = logging.getLogger("engine")

PARTS = {
    "samples": ("rollouts", "response_length/", "sampling/", "async/", "environment/", "greedy/", "tokens/"),
    "rewards": ("reward/", "stage/"),
    "log-probs": ("mismatch/", "correction/", "teacher/", "logps/"),
    "advantages or loss": ("actor/loss", "actor/nll", "critic/loss", "rewards/"),
    "gradient": ("actor/grad_norm", "critic/grad_norm"),
    "update": ("actor/", "critic/"),
}
"""The parts of a step in their order, and the prefixes of the numbers that show each; the last stands for the rest."""

LEARNED = ("advantages or loss", "gradient", "update")

ROUNDING = 1e-4
"""Largest relative difference, of log-probs absolute difference in nats, that the rounding of float32 explains."""

NOT_OF_A_STEP = ("time", "throughput/", "memory/", "sync/")
"""Prefixes of metrics that depend on the machine."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """The state from which a step is replayed.

    Args:
        step: the checkpoint's step; 0: the model itself.
        checkpoint: the checkpoint's folder.
        again: steps between the checkpoint and the replayed step that are replayed first.
        left_out: such steps that are skipped, because their rollouts were not kept.
    """

    step: int
    checkpoint: Path | None
    again: Sequence[int]
    left_out: Sequence[int]

    def __str__(self) -> str:
        lines = [f"from {self.checkpoint or 'the model: there is no checkpoint of an earlier step'}"]
        if self.again:
            lines.append(f"{_steps(self.again)} learned again on the way")
        if self.left_out:
            lines.append(f"{_steps(self.left_out)} left out, so the numbers are not those of the run")
        return "; ".join(lines)


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The result of a replayed step.

    Args:
        start: the state before.
        metrics: the metrics of the replayed step.
        recorded: the line of the step in the run's ``metrics.jsonl``; empty if the run did not finish the step.
        samples: the rollouts of a replay that samples.
    """

    start: Start
    metrics: Mapping[str, float]
    recorded: Mapping[str, Any]
    samples: Sequence[Rollout] = ()

    def rows(self) -> list[tuple[str, float | None, float]]:
        """Return name, recorded value and present value of each metric, without times and memory."""
        names = sorted(name for name in self.metrics if not name.startswith(NOT_OF_A_STEP))
        return [(name, self.recorded.get(name), self.metrics[name]) for name in names]


def find_start(run: TrainingRun, folder: RunFolder, step: int) -> Start:
    """Find the state from which ``step`` can be replayed.

    Args:
        run: a trainer of the run's config.
        folder: the run's folder.
        step: the step to replay, from 1.

    Raises:
        DataError: the rollouts of ``step`` were not kept.
    """
    if run.samples:
        RolloutFile(folder.rollout_file(step))  # raises an error that names the existing ones
    checkpoints = Checkpoints(folder.checkpoints)
    good = [s for s in checkpoints.steps() if s < step and not problems(checkpoints.path(s))]
    start = good[-1] if good else 0
    path = checkpoints.path(start) if good else None
    between = list(range(start + 1, step))
    if run.samples and not all(folder.rollout_file(s).is_file() for s in between):
        return Start(step=start, checkpoint=path, again=[], left_out=between)
    return Start(step=start, checkpoint=path, again=between, left_out=[])


def replay(
    run: TrainingRun,
    folder: RunFolder,
    step: int,
    start: Start,
    weights: Path | None = None,
    sample: bool = False,
) -> Replayed:
    """Replay a step.

    Args:
        run: a trainer of the run's config, perhaps with changed settings; not set up.
        folder: the run's folder, which is only read.
        step: the step to replay, from 1.
        start: the result of ``find_start`` for these.
        weights: a folder that gets the actor's weights before and after the step, in ``before`` and ``after``.
        sample: sample and score the prompts of the step again.

    Raises:
        DataError: a replay should sample, and there is no checkpoint of the step before.
        ConfigError: a changed setting does not fit the checkpoint.
        TrainingFailed: the step fails, as it may have in the run.
    """
    if sample and (start.again or start.left_out):
        raise DataError(
            f"--step {step}: sampler and rewards can be compared in a step after a checkpoint. Choose step {start.step + 1}."
        )
    found = Resume.at(start.checkpoint) if start.checkpoint else None
    if found:
        found.compare(run.config, run.plugins)
    run.setup(training=True, resume=found)
    if found:
        run.restore(found)
    samples: list[Rollout] = []
    if sample:
        _keep_samples(run, samples)
    elif run.samples:
        run.recorded = folder.rollouts_dir  # type: ignore[attr-defined]
    metrics: dict[str, float] = {}
    for number in (*start.again, step):
        if number != step:
            log.info("Step %d again.", number)
        elif weights:
            run.export(weights / "before")
        run.begin_step(number)
        metrics = run.step(number)
        run.step_done = number
    if weights:
        run.export(weights / "after")
    return Replayed(start=start, metrics=metrics, recorded=folder.metrics_of(step), samples=samples)


def _keep_samples(run: Any, samples: list[Rollout]) -> None:
    """Let the run add the rollouts of its steps to ``samples``."""
    draw = run.rollouts

    def rollouts(step: int) -> tuple[list[Rollout], dict[str, float]]:
        """Draw the rollouts of a step and keep them."""
        drawn: tuple[list[Rollout], dict[str, float]] = draw(step)
        samples.extend(drawn[0])
        return drawn

    run.rollouts = rollouts


def differing_samples(first: Sequence[Rollout], second: Sequence[Rollout]) -> str:
    """Return a sentence on the responses of two replays that differ; "" if all tokens are equal."""
    others = {rollout.request_id: rollout.token_ids.tolist() for rollout in second}
    for count, rollout in enumerate(first):
        ids, other = rollout.token_ids.tolist(), others.get(rollout.request_id, [])
        if ids == other:
            continue
        differing = sum(each.token_ids.tolist() != others.get(each.request_id) for each in first[count:])
        at = next((i for i, pair in enumerate(zip(ids, other, strict=False)) if pair[0] != pair[1]), len(ids))
        where = f"{rollout.request_id} from its token {at - rollout.prompt_length} on"
        return f"The first part that differs: samples ({differing} of {len(first)} responses; {where})."
    return ""


def check_step(step: int, folder: RunFolder) -> None:
    """Raise for a step that the run never began.

    Raises:
        DataError: with the last step of the run.
    """
    steps = [line["step"] for line in folder.read_metrics() if line["step"]]
    last = max(steps, default=0)
    if step > last + 1:  # the next one may have failed
        raise DataError(f"--step {step}: {folder.path.name} has come to step {last}.")


def _steps(numbers: Sequence[int]) -> str:
    return f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]} to {numbers[-1]}"


def first_difference(pairs: Mapping[str, tuple[Any, Any]], updates: int) -> str:
    """Return a sentence on the first part of a step that differs; "" if all numbers are equal.

    Args:
        pairs: recorded and present value by name, of one step: numbers, or hashes as text.
        updates: optimizer steps of a step. After the first, numbers of the loss also show the updates before.
    """
    for part, prefixes in PARTS.items():
        named = {name: pair for name, pair in pairs.items() if name.startswith(prefixes)}
        sizes = {name: size for name, pair in named.items() if (size := _size(name, *pair))}
        if sizes:
            name = max(sizes, key=lambda each: sizes[each])
            why = "as much as rounding explains" if sizes[name] <= ROUNDING else "more than rounding explains"
            if updates > 1 and part in LEARNED:
                part = "the loss or an update"
            was, now = (each if isinstance(each, str) else f"{each:.6g}" for each in named[name])
            return f"The first part that differs: {part} ({name}: {was}, now {now}, {why})."
    return ""


def relative(first: float, second: float) -> float:
    """Return the difference of two numbers over the larger of them; 0 for two NaN."""
    if first == second or (math.isnan(first) and math.isnan(second)):
        return 0.0
    return abs(first - second) / max(abs(first), abs(second))


def _size(name: str, was: Any, now: Any) -> float:
    """Return the difference in nats of a number of log-probs, else relative to the larger number; infinite for hashes."""
    if isinstance(was, str):
        return 0.0 if was == now else math.inf
    return abs(was - now) if name.startswith("mismatch/") and was == was else relative(was, now)
