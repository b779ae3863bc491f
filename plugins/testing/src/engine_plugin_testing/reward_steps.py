"""A contract of random steps of a run: sums, validity and metrics follow from the values and the settings."""

from __future__ import annotations

import contextlib
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine_core.errors import EngineError, TrainingFailed
from engine_core.rewards.models import Known
from engine_core.types import Request, Rollout, Sampling
from engine_plugin_testing.contracts import contract
from engine_plugin_testing.reward_cases import Values, equal, scored
from engine_plugin_testing.reward_random import SEED, random_units

if TYPE_CHECKING:
    from engine_core.rewards import RewardRunner
    from engine_plugin_testing.reward_bench import RewardBench, Sample

GIVEN, LIVE = "of_the_environment", "characters"
LISTED = "kit_list"  # a column that ``characters`` changes


def characters(completions: list[str], kit_list: list[list[int]]) -> list[float | None]:
    """Score each completion by its number of characters, None if it is empty; change what it gets."""
    found = [len(text) % 7 / 4 if text else None for text in completions]
    completions.clear()
    for values in kit_list:
        values.clear()
    return found


@dataclass(frozen=True)
class Settings:
    """The settings of one run.

    Attributes:
        weight: of the reward of the suite.
        clip: range of its values.
        policy: what follows a failure, "drop", "zero" or "fail".
        workers: its processes.
        given: weight of the reward that the environment sets; None: there is none.
    """

    weight: float
    clip: tuple[float, float] | None
    policy: str
    workers: int
    given: float | None


RUNS = (
    Settings(-2.0, (0.25, 0.75), "drop", 2, -1.0),
    Settings(0.5, (-0.1, 0.5), "zero", 0, None),
    Settings(0.0, None, "drop", 0, 0.5),
)
WAYS = ("at the end", "as they arrive", "known before")
MOST = 20  # random completions


@dataclass(frozen=True)
class Scored:
    """A group of samples with the values that they must get; ``failure`` is the kind if its one sample fails."""

    samples: list[Sample]
    values: Values
    failure: str = ""


def _groups(bench: RewardBench, draws: random.Random) -> tuple[list[Scored], list[Scored]]:
    """Return groups that can be scored, with their values in calls of one group, and samples that fail."""
    units = [*(group for group, _ in bench.examples), *random_units(bench, draws, MOST)]
    values = [batch[0] for batch in scored(bench, [[unit] for unit in units], workers=0)]
    found = [Scored(unit, each) for unit, each in zip(units, values, strict=True)]
    if not bench.function().signature.per_sample:
        return found, []  # whether such a sample fails depends on those in the same call
    failing = [
        Scored([sample], [None], outcome.failure) for sample, _, outcome, _ in bench.failing() if outcome
    ]
    return found, failing


def _drawn_step(
    scorable: Sequence[Scored], failing: Sequence[Scored], draws: random.Random
) -> list[list[Scored]]:
    """Draw the groups of a step: several of one sample each become one group, or stay apart."""
    groups: list[list[Scored]] = []
    for _ in range(draws.randint(2, 6)):
        size = draws.randint(1, 4) if all(len(each.samples) == 1 for each in scorable) else 1
        groups.append(draws.choices(scorable, k=size))
    if failing:
        groups.insert(draws.randrange(len(groups)), draws.sample(failing, 1))
    return groups


def score_step(
    runner: RewardRunner, rollouts: list[Rollout], step: int, way: str, draws: random.Random
) -> dict[str, float]:
    """Score a step in one of ``WAYS``: rollouts arrive in any order, groups are scored before.

    Raises:
        EngineError: the runner's; what was scored early is cancelled.
    """
    early: Any = None
    if way == "as they arrive":
        requests = [Request(r.request_id, r.prompt, Sampling(), r.group_id) for r in rollouts]
        early = runner.early(requests, step)
        if early is not None:
            try:
                order = draws.sample(rollouts, len(rollouts))
                while order:
                    size = draws.randint(1, 4)
                    early.take(order[:size])
                    order = order[size:]
                early.seal()
            except EngineError:
                early.cancel()
                raise
    elif way == "known before":
        outcomes: dict[str, list[Any]] = {}
        for group in sorted({r.group_id for r in rollouts}):
            part = runner.outcomes([r for r in rollouts if r.group_id == group])
            for name, found in part.items():
                outcomes.setdefault(name, []).extend(found)
        early = Known(outcomes, 0.0)
    return runner.score(rollouts, step, early)


def _expected(
    name: str, settings: Settings, rollouts: Sequence[Rollout], known: Sequence[tuple[float | None, str]]
) -> tuple[list[tuple[dict[str, float | None], float, bool]], dict[str, float]]:
    """Work out, for each rollout, its values, its reward and whether it is valid; and the metrics of the step."""
    weights = {name: settings.weight, LIVE: 1.0}
    weights |= {} if settings.given is None else {GIVEN: settings.given}
    rows: list[tuple[dict[str, float | None], float, bool]] = []
    unrewarded = 0
    for rollout, (value, failure) in zip(rollouts, known, strict=True):
        values = {name: 0.0 if failure and settings.policy == "zero" else value}
        values[LIVE] = characters([rollout.text], [[]])[0]
        if settings.given is not None:
            values[GIVEN] = rollout.rewards.get(GIVEN)
        terms = []
        for each, worth in values.items():
            if worth is not None and weights[each]:
                low, high = (settings.clip if each == name else None) or (-math.inf, math.inf)
                terms.append(weights[each] * min(max(worth, low), high))
        dropped = bool(failure) and settings.policy == "drop" and settings.weight != 0
        valid = rollout.valid and not dropped and bool(terms)
        unrewarded += not terms and not dropped and not rollout.failure
        if rollout.failure:
            values = dict.fromkeys(values, 0.0 if rollout.valid else None)
            terms, valid = [], rollout.valid and not dropped
        rows.append((values, math.fsum(terms), valid))
    rewards = [reward for _, reward, valid in rows if valid]
    groups: dict[int, set[float]] = {}
    for rollout, (_, reward, valid) in zip(rollouts, rows, strict=True):
        groups.setdefault(rollout.group_id, set()).update({reward} if valid else ())
    failures = [failure for _, failure in known if failure]
    metrics = {
        "reward/mean": statistics.fmean(rewards) if rewards else 0.0,
        "reward/std": statistics.pstdev(rewards) if rewards else 0.0,
        "reward/failures": len(failures),
        "reward/timeouts": failures.count("timeout"),
        f"reward/{name}/errors": failures.count("error"),
        f"reward/{name}/timeouts": failures.count("timeout"),
        "reward/unrewarded": unrewarded,
        "reward/zero_variance_groups": sum(len(each) < 2 for each in groups.values()) / len(groups)
        if len(groups) < len(rollouts)
        else 0.0,
    }
    for each in weights:
        counted = [worth for values, _, valid in rows if valid and (worth := values[each]) is not None]
        if counted:
            metrics[f"reward/{each}"] = statistics.fmean(counted)
    return rows, metrics


@contract(
    catches=(
        "the samples of a group turned as it arrives",
        "failures of the step before",
        "a failure that is known before and not counted",
        "a weight before the range",
        "answers of a step that was given up",
        "the lists of a row changed by a function",
    )
)
def random_steps_are_summed_as_configured(bench: RewardBench) -> None:
    """In random steps of a run, rewards, validity and metrics follow from the values and the settings.

    Settings: weight (0 and below too), ``clip``, failure policy, workers, a reward of the environment, a function in the
    controller. Steps have groups of any number, failing samples, and rollouts of failed episodes. They are scored at
    the end, as rollouts arrive in any order, or from outcomes that are known before. After a step that a failure ends,
    the next one is right.
    """
    draws = random.Random(SEED)
    scorable, failing = _groups(bench, draws)
    for settings in RUNS:
        runner = bench.runner(
            workers=settings.workers,
            weight=settings.weight,
            clip=settings.clip,
            on_error=settings.policy,
            on_timeout=settings.policy,
            live=[characters],
            given={} if settings.given is None else {GIVEN: settings.given},
        )
        with contextlib.closing(runner):
            for step, way in enumerate(draws.sample(WAYS, len(WAYS)), 1):
                _check_step(bench, runner, settings, _drawn_step(scorable, failing, draws), step, way, draws)
    if failing:
        _check_ends(bench, scorable, failing, draws)


def _check_ends(
    bench: RewardBench, scorable: Sequence[Scored], failing: Sequence[Scored], draws: random.Random
) -> None:
    """Check that a step that a failure ends leaves its rollouts alone, and that the next step is right."""
    settings = Settings(1.0, None, "fail", 2, None)
    runner = bench.runner(workers=2, on_error="fail", on_timeout="fail", live=[characters])
    with contextlib.closing(runner):
        for step, way in enumerate(WAYS, 1):
            groups = _drawn_step(scorable, failing, draws)
            rollouts = _rollouts(bench, groups)[0]
            try:
                score_step(runner, rollouts, step, way, draws)
            except TrainingFailed:
                changed = [r.request_id for r in rollouts if r.rewards or r.reward or not r.valid]
                assert not changed, f"A step that failed, scored {way}, has changed the rollouts {changed}."
            else:
                raise AssertionError(
                    f"With `on_error = fail`, a step with a failing sample continues, scored {way}."
                )
            try:
                _check_step(bench, runner, settings, _drawn_step(scorable, [], draws), step, way, draws)
            except TrainingFailed as error:
                raise AssertionError(
                    f"Seed {SEED}: the step after one that failed fails, too: {error}"
                ) from error


def _rollouts(bench: RewardBench, groups: Sequence[Sequence[Scored]]) -> tuple[list[Rollout], list[Sample]]:
    """Return the rollouts of a step, and the samples that they were made of."""
    samples = [sample for group in groups for each in group for sample in each.samples]
    numbers = [at for at, group in enumerate(groups) for each in group for _ in each.samples]
    rollouts = bench.rollouts(samples, numbers)
    for rollout in rollouts:
        rollout.prompt.columns[LISTED] = [1]
    return rollouts, samples


def _check_step(
    bench: RewardBench,
    runner: RewardRunner,
    settings: Settings,
    groups: Sequence[Sequence[Scored]],
    step: int,
    way: str,
    draws: random.Random,
) -> None:
    """Score the groups of one step and compare everything."""
    known = [(value, each.failure) for group in groups for each in group for value in each.values]
    rollouts, samples = _rollouts(bench, groups)
    for rollout in rollouts:
        if settings.given is not None and draws.random() < 0.7:
            rollout.rewards[GIVEN] = draws.uniform(-1, 1)
        kind = draws.choice(("", "", "", "unused", "failed", "failed, counts"))
        rollout.valid = kind in ("", "failed, counts")
        rollout.failure = "error" if kind.startswith("failed") else ""
    rows, metrics = _expected(bench.name, settings, rollouts, known)
    found = score_step(runner, rollouts, step, way, draws)
    what = f"Seed {SEED}, {settings}, step {step}, scored {way}"
    for at, (rollout, (values, reward, valid)) in enumerate(zip(rollouts, rows, strict=True)):
        shown = f"{what}: rollout {at} of group {rollout.group_id} ({str(samples[at])[:80]})"
        _compare(f"{shown}: rewards", rollout.rewards, values)
        _compare(f"{shown}: reward", {"reward": rollout.reward}, {"reward": reward})
        listed = rollout.prompt.columns[LISTED]
        assert listed == [1], f"{shown}: a function has changed a list of the row to {listed}."
        assert rollout.valid == valid, f"{shown} is {rollout.valid}, expected {valid}: valid."
    _compare(f"{what}: metrics", {key: found.get(key) for key in metrics}, metrics)


def _compare(what: str, found: Mapping[str, float | None], expected: Mapping[str, float | None]) -> None:
    """Assert that two mappings have the same keys and, but for rounding, the same numbers."""
    assert set(found) == set(expected), f"{what}: {sorted(found)}, expected {sorted(expected)}."
    for key, wanted in expected.items():
        assert equal(found[key], wanted), f"{what}: {key} is {found[key]}, expected {wanted}."
