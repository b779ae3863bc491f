"""Contracts of the reward runner and its workers: rewards of every form, samples that fail, deadlines, what is left."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import psutil

from engine_core.errors import ConfigError, DataError, TrainingFailed
from engine_plugin_testing.contracts import contract, refused
from engine_plugin_testing.reward_probe import SLOW
from engine_plugin_testing.reward_runner_bench import (
    BAD,
    KILLING,
    NOTHING,
    NUMBERS,
    RAISING,
    SINGULAR,
    STREAMS,
    TIMEOUT,
    RewardRunnerBench,
    Settings,
    Step,
)
from engine_plugin_testing.reward_steps import WAYS, score_step

if TYPE_CHECKING:
    from engine_core.rewards import RewardRunner

SEED = 3
MEMORY = 2.5  # gigabytes of a worker
PATIENCE = 10.0  # seconds that a machine under load may need besides a timeout
USUAL = (*NUMBERS, *NOTHING, *BAD)
ENDING: dict[str, tuple[str, ...]] = {  # what may end a call of this form in a worker
    "each": (*KILLING, "allocate"),
    "each_later": ("late", "raise", "exit"),
    "lists": ("given error", "given timeout", "crash"),
}
RUNS = (
    Settings({"each": -0.5}, 2, None, "zero", "drop"),
    Settings({"each_later": 2.0}, 1, (0.2, 0.7), "drop", "zero"),
    Settings({"lists": 1.0}, 1, None, "zero", "drop"),
    Settings({"verl": 1.0, "trl": -2.0}, 1, (0.1, 50.0), "drop", "zero"),
    Settings({"groups": 3.0}, 2, None, "zero", "zero"),
    Settings(
        dict.fromkeys(("each", "each_later", "lists", "lists_later", "groups", "verl", "trl", "object"), 1.0),
        0,
    ),
)


NEED = {"row": ("each", "each_later"), "do": SINGULAR, "data_source": ("verl",), "answer": ("verl",)}
COLUMNS = ((), ("label", "ground_truth"), ("label",), ("ground_truth", "extra_info"))


def _kinds(settings: Settings, draws: random.Random, number: int) -> list[str]:
    """Draw what happens to each sample of a step: mostly a result, and at one or two what may end a call."""
    kinds = draws.choices(USUAL, k=draws.randint(9, 30))
    form, *more = settings.weights
    every = ("raise",) if more or form not in ENDING else ENDING[form]
    ending = every[:2] if number == 1 else every[number : number + 1]
    for at, kind in zip(draws.sample(range(len(kinds)), len(ending)), ending, strict=True):
        kinds[at] = kind
    if settings.workers:
        kinds[draws.choice([at for at, kind in enumerate(kinds) if kind in USUAL])] = "print"
    return kinds


@contract(
    catches=(
        "the samples behind one that ends its worker lost",
        "a sample scored again after its worker ended",
        "an alias before the column of its name",
        "options changed by a call",
        "a timeout counted as an error",
    )
)
def random_samples_of_any_form_are_scored_apart(bench: RewardRunnerBench) -> None:
    """Each sample of a random step gets the outcome that follows from its own row, whatever happens to the others.

    Functions have every form, and show each argument that they get. Samples get numbers of any type, nothing, or a result
    that is no reward; they raise errors, print, exit, crash or hang. The samples behind one that ends its worker are scored
    by the next worker. A sample that ended no call is scored once. `max_memory_gb` limits what a function allocates. One
    reward of several can score alone.
    """
    draws = random.Random(SEED)
    for settings in RUNS:
        runner = bench.runner(settings, max_memory_gb=MEMORY if settings.workers else 0.0)
        for number, way in enumerate(WAYS if settings.workers else WAYS[:1], 1):
            columns = COLUMNS[number] if "trl" in settings.weights else draws.choice(COLUMNS)
            step = bench.step(_kinds(settings, draws, number), draws, columns)
            metrics = score_step(runner, step.rollouts, number, way, draws)
            what = f"Seed {SEED}, {settings}, step {number}, scored {way}"
            bench.check(runner, settings, step, metrics, what)
            _check_calls(settings, step, what)
        _check_part(bench, runner, settings, draws)
        runner.close()


def _check_part(
    bench: RewardRunnerBench, runner: RewardRunner, settings: Settings, draws: random.Random
) -> None:
    """Score a step by one of the rewards of a runner alone; the others leave no trace."""
    form = draws.choice(list(settings.weights))
    part = dataclasses.replace(settings, weights={form: settings.weights[form]})
    step, found = bench.step(["number", "nan", "score"], draws), runner.only([f"kit_{form}"])
    metrics = found.score(step.rollouts, 1)
    bench.check(found, part, step, metrics, f"Seed {SEED}, {form} alone of {settings}")
    names = {name for rollout in step.rollouts for name in rollout.rewards}
    assert names == {f"kit_{form}"}, f"Of kit_{form} alone, rollouts have the rewards {names}."
    _check_calls(part, step, f"{form} alone of {settings}")
    with contextlib.suppress(ConfigError):
        runner.only(["no_such_reward"])
        raise AssertionError("A reward that the run does not have is accepted by `only`.")


def _check_calls(settings: Settings, step: Step, what: str) -> None:
    """Assert that samples were scored once, unless a call that ended may have had them."""
    calls, most = step.calls, len(settings.weights)
    again = {*RAISING, *KILLING} & set(step.kinds)  # in a call with others, those behind may not be reached
    for rollout, kind in zip(step.rollouts, step.kinds, strict=True):
        found, ended = calls[rollout.request_id], again and not set(settings.weights) <= set(SINGULAR)
        least = 0 if ended or kind in ("late", "given error", "given timeout") else 1
        assert least <= found, f"{what}: the function never got '{rollout.request_id}' ('{kind}')."
        assert found <= most or (again and not set(settings.weights) <= set(STREAMS)), (
            f"{what}: '{rollout.request_id}' ('{kind}') was scored {found} times by {most} functions."
        )


@contract(
    catches=(
        "a deadline that began before the request",
        "a deadline of all samples of a request",
    )
)
def a_deadline_is_that_of_one_sample(bench: RewardRunnerBench) -> None:
    """A sample that hangs fails within its timeout, and samples that take long fail only by their own time.

    Seven slow samples of one request take longer than a timeout. A worker that had nothing to do for long, one that has
    just replaced another, and those of a step that was given up have the same deadlines.
    """
    settings, draws = Settings({"each": 1.0}, 1), random.Random(SEED)
    slow, hung = ["slow"] * 7, ["number", "stuck", "slow", "number"]
    runner = bench.runner(settings)
    _timed(bench, runner, settings, [*slow, *["number"] * 7], draws, 7 * SLOW)
    time.sleep(TIMEOUT + 1.5)  # nothing to do
    _timed(bench, runner, settings, ["slow", "number"], draws, SLOW)
    _timed(bench, runner, settings, [*hung, *slow], draws, TIMEOUT)
    strict = Settings({"each": 1.0}, 1, None, "fail", "drop")
    failing = bench.runner(strict)
    _given_up(failing, bench.step(["raise", "stuck", "stuck"], draws))
    _timed(bench, failing, strict, [*hung, "stuck", "number"], draws, 2 * TIMEOUT)


def _timed(
    bench: RewardRunnerBench,
    runner: RewardRunner,
    settings: Settings,
    kinds: Sequence[str],
    draws: random.Random,
    least: float,
) -> None:
    """Score a step and check it; it takes at least these seconds, and few more than its timeouts."""
    step, began = bench.step(kinds, draws), time.monotonic()
    metrics = runner.score(step.rollouts, 1)
    took = time.monotonic() - began
    bench.check(runner, settings, step, metrics, f"A step of {list(kinds)}")
    most = PATIENCE + len(kinds) * SLOW + sum(kind in ("stuck", "late") for kind in kinds) * (TIMEOUT + 1)
    assert least <= took <= most, (
        f"A step of {list(kinds)} took {took:.2f} s; expected {least:.2f} to {most:.2f}."
    )


def _given_up(runner: RewardRunner, step: Step) -> None:
    """Score a step that an error ends."""
    error, _ = _scored(runner, step)
    for word in ("kit_each", "step 1", "on_error"):
        assert word in error, f"A step of {step.kinds} must end and name '{word}'; its error is '{error}'."
    changed = [r.request_id for r in step.rollouts if r.rewards or r.reward or r.answers or not r.valid]
    assert not changed, f"A step that failed has changed the rollouts {changed}."


@contract(catches=("a step ended at the share itself",))
def more_failures_than_allowed_end_the_step(bench: RewardRunnerBench) -> None:
    """A step ends with ``TrainingFailed`` exactly if more than ``max_failure_share`` of its samples fail.

    The share counts the samples of this step alone. The next step is scored.
    """
    draws = random.Random(SEED)
    settings = Settings({"each": 1.0}, 0)
    for share in (0.0, 0.25, 0.5):
        runner = bench.runner(settings, max_failure_share=share)
        for _ in range(4):
            count = draws.randint(3, 12)
            allowed = int(share * count)
            for failing in (allowed, allowed + 1, allowed):
                kinds = [*draws.choices(BAD, k=failing), *draws.choices(NUMBERS, k=count - failing)]
                step = bench.step(draws.sample(kinds, count), draws)
                what = f"{failing} of {count} samples fail, max_failure_share is {share}"
                error, metrics = _scored(runner, step)
                assert bool(error) == (failing > allowed), f"{what}; the error is '{error}'."
                assert not error or "max_failure_share" in error, f"The error does not name the key: {error}"
                if not error:
                    bench.check(runner, settings, step, metrics, what)


def _scored(runner: RewardRunner, step: Step) -> tuple[str, dict[str, float]]:
    """Score a step; return the text of the ``TrainingFailed`` that ends it, or "", and the metrics."""
    try:
        return "", runner.score(step.rollouts, 1)
    except TrainingFailed as error:
        return str(error), {}


@contract(catches=("columns that are never checked",))
def a_missing_column_is_refused(bench: RewardRunnerBench) -> None:
    """A reward that needs a column that the data lacks is refused with a ``DataError`` that names the column.

    It names every such reward. An argument with a default needs no column. ``ground_truth`` is found as ``answer``. Where
    no column of the data is known, ``score`` raises for rows that all lack one.
    """
    draws = random.Random(SEED)
    given = {"row", "do", "data_source", "answer"}
    runner = bench.runner(Settings(dict.fromkeys(SINGULAR, 1.0), 0))
    for name in sorted(given):
        step = bench.step(["number"] * 3, draws, ())
        for rollout in step.rollouts:
            del rollout.prompt.columns[name]
        with refused(f"scoring of rows without the column '{name}'"):
            runner.score(step.rollouts, 1)
    runner.check_columns(given)
    for name in sorted(given):
        found = ""
        try:
            runner.check_columns(given - {name})
        except DataError as error:
            found = str(error)
        asked = "ground_truth" if name == "answer" else name
        for form in NEED[name]:
            assert f"kit_{form}: " in found, f"kit_{form} needs '{name}'; the error is '{found}'."
        assert f"'{asked}'" in found, f"The column '{name}' lacks; the error is '{found}'."


@contract(catches=("a process in another session left",))
def what_a_function_started_is_ended(bench: RewardRunnerBench) -> None:
    """Processes that a function leaves behind end with its worker, also those in separate sessions.

    A worker ends when its sample hangs, and when the runner is closed. Then no worker is left, and a later step starts
    others.
    """
    settings, draws = Settings({"each": 1.0}, 1), random.Random(SEED)
    runner = bench.runner(settings)
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    for kinds in (["child", "stuck", "number"], ["child", "number"]):
        step = bench.step(kinds, draws)
        bench.check(runner, settings, step, runner.score(step.rollouts, 1), f"A step of {kinds}")
        if "stuck" not in kinds:
            runner.close()
        pids = [int(line) for line in step.file.with_name(f"{step.file.name}-children").read_text().split()]
        _ended(pids, f"a function of a step of {kinds} started")
    left = {process.pid for process in psutil.Process().children(recursive=True)} - before
    _ended(sorted(left), "were its workers")
    step = bench.step(["number"], draws)
    bench.check(runner, settings, step, runner.score(step.rollouts, 1), "A step after close")


def _ended(pids: Sequence[int], what: str) -> None:
    """Assert that processes end within ``PATIENCE``."""
    end = time.monotonic() + PATIENCE
    while left := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < end, f"Processes {left}, which {what}, still run."
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
