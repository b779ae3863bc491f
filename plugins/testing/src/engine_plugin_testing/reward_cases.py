"""Contracts of a reward: right, pure, and safe with any text that a model writes."""

from __future__ import annotations

import copy
import itertools
import math
import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import psutil
from pydantic import ValidationError

from engine_plugin_testing.contracts import contract
from engine_plugin_testing.reward_bench import OF_RESPONSE

if TYPE_CHECKING:
    from engine_plugin_testing.reward_bench import RewardBench, Sample

MANY = 150  # samples of a large batch
SECONDS = 1.5  # that one call with a large batch may take; of a slow reward the batch is smaller
Values = Sequence[float | None]
STRANGE = (
    "",
    " \n\t",
    "\u00e9\u4f60\U0001f600\u202e\u0000\ufffd",
    "\\boxed{",
    "((((((",
    "<<>>",
    "nan",
    "-inf",
    "1/0",
)
LONG = ("so the answer is 4. " * 5000, "9" * 5000, "(" * 2000)


def equal(value: float | None, wanted: float | None) -> bool:
    """Return whether two values are equal but for rounding; None equals None alone."""
    if value is None or wanted is None:
        return value is wanted
    return math.isclose(value, wanted, rel_tol=1e-6, abs_tol=1e-9)


def same(found: Values, expected: Values, what: str) -> None:
    """Assert that two lists of values are equal but for rounding."""
    assert len(found) == len(expected), f"{what}: {len(found)} values, expected {len(expected)}."
    for at, (value, wanted) in enumerate(zip(found, expected, strict=True)):
        assert equal(value, wanted), f"{what}: sample {at} got {value}, expected {wanted}."


@contract(catches=("wrong length returned", "an answer that is not the one of its example"))
def values_are_right(bench: RewardBench) -> None:
    """In a worker process, every example gets its value, both in a separate call and in a call with all others.

    An example that names an answer has this answer, which votes of a group count.
    """
    samples, groups = bench.samples()
    expected = [value for _, values in bench.examples for value in values]
    calls = [(group, [0] * len(group)) for group, _ in bench.examples]
    *each, whole = bench.score_each([*calls, (samples, groups)], workers=1)
    for i, (found, (group, values)) in enumerate(zip(each, bench.examples, strict=True)):
        same(found, values, f"Example {i} ({str(group[0])[:80]})")
    same(whole, expected, "All examples in one call")
    for group, answers, read in bench.answers:
        assert read == answers, f"{str(group[0])[:120]}: the answers read are {read}, expected {answers}."


@contract()
def in_process_it_gives_the_same(bench: RewardBench) -> None:
    """With ``workers = 0``, the values are the same as in a worker process."""
    samples, groups = bench.samples()
    same(
        bench.score(samples, groups), bench.score(samples, groups, workers=1), "In process, against a worker"
    )


@contract(catches=("a random reward",))
def it_is_deterministic(bench: RewardBench) -> None:
    """A second call with the same samples gives the same values."""
    samples, groups = bench.samples()
    first, *more = bench.score_each([(samples, groups)] * 3)
    for found in more:
        same(found, first, "Called again")


@contract(catches=("depends on the order of the samples",))
def order_and_company_do_not_matter(bench: RewardBench) -> None:
    """The values of a group do not depend on other groups in the same call.

    Cases: first in a batch, last, alone, and next to a copy of itself.
    """
    samples, groups = bench.samples()
    calls: list[tuple[list, list[int]]] = [(samples, groups), (samples[::-1], groups[::-1])]
    calls += [(group * 2, [0] * len(group) + [1] * len(group)) for group, _ in bench.examples]
    calls += [(group, [0] * len(group)) for group, _ in bench.examples]
    first, turned, *rest = bench.score_each(calls)
    same(turned[::-1], first, "In the opposite order")
    split = {i: [v for v, g in zip(first, groups, strict=True) if g == i] for i in set(groups)}
    count = len(bench.examples)
    for i, (doubled, alone) in enumerate(zip(rest[:count], rest[count:], strict=True)):
        same(alone, split[i], f"Example {i} alone")
        same(doubled, split[i] * 2, f"Example {i} next to a copy of itself")


@contract(
    catches=(
        "rows beyond the sixty-fourth shifted",
        "the value of another row that has the same text",
        "a value that depends on how many were scored",
        "the first row for all",
    )
)
def rows_of_a_large_batch_stay_apart(bench: RewardBench) -> None:
    """In a call with 150 samples, each response is scored with its own row.

    The responses of all examples meet the rows of all examples. Each sample gets the value that it gets in small
    calls, in the opposite order, and in worker processes that have scored nothing before.
    """
    units = _crossed(bench)
    parts = [units[at : at + 7] for at in range(0, len(units), 7)]
    found = scored(bench, [part[::-1] for part in parts[::-1]], workers=1)
    small = [values for part in found for values in part][::-1]
    for workers in (0, 1):
        large = scored(bench, [units], workers)[0]
        for (group, values), alone in zip(zip(units, large, strict=True), small, strict=True):
            same(values, alone, f"{str(group[0])[:120]} among {len(units)} samples, against calls of 7")


def affordable(bench: RewardBench, most: int) -> int:
    """Return the number of samples that are scored within ``SECONDS``, at most ``most``."""
    samples, groups = bench.samples()
    bench.score(samples, groups)
    start = time.perf_counter()
    bench.score(samples, groups)
    return min(most, int(len(samples) * SECONDS / max(time.perf_counter() - start, 1e-6)))


def _crossed(bench: RewardBench) -> list[list[Sample]]:
    """Return groups of samples: responses with the rows of other examples first, the examples last; ``MANY`` if time allows."""
    count = affordable(bench, MANY)
    examples = [group for group, _ in bench.examples]
    singles = [group[0] for group in examples if len(group) == 1]
    units: list[list[Sample]] = []
    for one, other in itertools.permutations(singles, 2):
        row = {key: value for key, value in other.items() if key not in OF_RESPONSE}
        units.append([{**row, **{key: one[key] for key in OF_RESPONSE if key in one}}])
    more = itertools.islice(itertools.cycle(units + examples), max(0, count - len(units) - len(examples)))
    between = list(more)
    random.Random(5).shuffle(between)
    return [*units, *between, *examples]


def scored(bench: RewardBench, calls: Sequence[Sequence[list[Sample]]], workers: int) -> list[list[Values]]:
    """Score each call's groups in a new runner; return the values of each group."""
    given = [
        ([sample for group in units for sample in group], [i for i, group in enumerate(units) for _ in group])
        for units in calls
    ]
    found: list[list[Values]] = []
    for units, values in zip(calls, bench.score_each(given, workers), strict=True):
        left = iter(values)
        found.append([list(itertools.islice(left, len(group))) for group in units])
    return found


@contract(catches=("a lock that a lost worker leaves",))
def a_worker_that_is_lost_is_replaced(bench: RewardBench) -> None:
    """If a worker process is killed between two calls, another replaces it, and the values stay the same.

    Samples of the call after it may fail, because the loss may be noticed late; those of the next one do not. The
    reward has nothing in a process, or outside of it, that the next process misses or that stops it.
    """
    samples, groups = bench.samples()
    own = psutil.Process()
    before = {process.pid for process in own.children()}
    killed: list[int] = []

    def kill() -> None:
        """Kill the worker processes."""
        for process in own.children():
            if process.pid not in before:
                process.kill()
                killed.append(process.pid)

    first, _, again = bench.score_each([(samples, groups)] * 3, workers=1, after_first=kill)
    assert killed, "No worker process was found: with `workers = 1` a reward has one."
    same(again, first, "After the loss of its worker")


@contract(catches=("changes its inputs",))
def inputs_are_left_alone(bench: RewardBench) -> None:
    """The function changes none of the lists, rows and options that it gets."""
    samples, groups = bench.samples()
    reward = bench.function()
    columns = bench.columns(reward, samples, groups)
    before, options = copy.deepcopy(columns), copy.deepcopy(reward.options)
    bench.call(reward, columns, len(samples))
    changed = [name for name in before if columns[name] != before[name]]
    assert not changed, f"The function changed its arguments: {', '.join(changed)}."
    assert reward.options == options, "The function changed its options."


@contract(catches=("fails on an empty completion",))
def any_text_gets_a_value(bench: RewardBench) -> None:
    """Any text gets a finite number or None, without an error.

    Cases: empty text, control characters, other scripts, broken LaTeX and ``nan``.
    """
    first = bench.samples()[0][0]
    samples = [{**first, "completion": text, "completion_ids": [7] * len(text)} for text in STRANGE]
    for text, value in zip(STRANGE, bench.score(samples, workers=1), strict=True):
        assert value is None or math.isfinite(value), f"Completion {text!r} got {value}."


@contract(catches=("a failure that becomes a number", "a time-out that counts as an error"))
def what_cannot_be_scored_fails(bench: RewardBench) -> None:
    """A sample of ``failing`` counts as a failure of the reward, of the kind that the suite names, and gets no number.

    Under the policy ``drop`` its rollout is left out of training; with weight 0, where the reward only measures, it is not.
    """
    for weight, workers in ((1.0, 0), (0.0, 0), (1.0, 1)):
        for sample, kind, outcome, rollout in bench.failing(weight, workers):
            shown = f"{str(sample)[:80]}, with weight {weight:g} and workers = {workers},"
            assert outcome is not None, f"{shown} got no outcome."
            assert outcome.failure, f"{shown} got {outcome.value}; expected a failure."
            assert kind in ("", outcome.failure), (
                f"{shown} failed with '{outcome.failure}' ({outcome.message}); expected '{kind}'."
            )
            assert rollout.rewards == {bench.name: None}, f"{shown} got the rewards {rollout.rewards}."
            dropped = "is left out of training" if weight == 0 else "stays in training"
            assert rollout.valid == (weight == 0), f"{shown} failed, and its rollout {dropped}."


@contract(catches=("a value beyond its bounds",))
def very_long_text_gets_a_value(bench: RewardBench) -> None:
    """Even a very long text gets a value within the timeout.

    Cases: a hundred thousand characters, a number of 5000 digits, 2000 open brackets.
    """
    first = bench.samples()[0][0]
    samples = [{**first, "completion": text, "completion_ids": [7] * len(text)} for text in LONG]
    for text, value in zip(LONG, bench.score(samples, workers=1), strict=True):
        assert value is None or math.isfinite(value), f"Completion {text[:20]!r}... got {value}."


@contract(catches=("an option without a docstring", "unknown options accepted"))
def options_are_documented_and_checked(bench: RewardBench) -> None:
    """Every option has a description, and an unknown option raises an error that names the option."""
    config = bench.load_plugins().spec("rewards", bench.name).config
    bare = [name for name, field in config.model_fields.items() if not field.description]
    assert not bare, f"Options without a description: {bare}. Write a docstring below the field."
    options = {**bench.settings["options"], "no_such_option": 1}
    try:
        config.model_validate(options, context={"folder": bench.settings["root"]})
    except ValidationError as error:
        if "no_such_option" in str(error):
            return
        raise AssertionError(f"An unknown option is refused, but not named: {error}") from error
    raise AssertionError("An unknown option is accepted: derive the options from engine_core.specs.Options.")
