"""The health of a run: conditions with a name, found in the metrics of its newest steps, and what to do about each.

``docs/reference/health.md`` has a heading for each name. Nothing here imports torch.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine_plugin_tools.advice import advice

Lines = Sequence[Mapping[str, Any]]
WINDOW = 5
"""Newest steps whose median decides, and first steps that entropy is compared with."""
STEPS_BEFORE_ADVICE = 10


@dataclass(frozen=True)
class Condition:
    """A state of a run that its user should know.

    Args:
        check: returns what is found in the first and the newest steps, empty if all is well.
        fix: what to do.
    """

    check: Callable[[Lines, Lines], str]
    fix: str


def _median(lines: Lines, name: str) -> float | None:
    """Return the median of a metric; None if a line lacks it."""
    values: list[Any] = [line.get(name) for line in lines]
    return None if not values or None in values else float(statistics.median(values))


def _above(name: str, bound: float, text: str) -> Callable[[Lines, Lines], str]:
    """Return a check that the median of a metric is above a bound; ``text`` has the value as ``{}``."""

    def check(first: Lines, newest: Lines) -> str:
        value = _median(newest, name)
        return text.format(value) if value is not None and value > bound else ""

    return check


def _mismatch(first: Lines, newest: Lines) -> str:
    stale = any("mismatch/fresh_share" in line for line in newest)  # tokens of older policies differ anyway
    value = _median(newest, "mismatch/fresh_mean_abs" if stale else "mismatch/mean_abs")
    if value is None or value <= 0.1:
        return ""
    return f"Log-probs of sampler and trainer differ by {value:.2g} nats in the mean."


def _entropy(first: Lines, newest: Lines) -> str:
    before, now = _median(first, "actor/entropy"), _median(newest, "actor/entropy")
    if before is None or now is None or not now < min(0.05 * before, 0.05):
        return ""
    return (
        f"The entropy is {now:.2g} nats, at first it was {before:.2g}: samples of a prompt are nearly equal."
    )


def _idle(first: Lines, newest: Lines) -> str:
    busy, step = _median(newest, "time/sampling"), _median(newest, "time/step")
    if busy is None or not step or busy >= 0.5 * step:
        return ""
    return f"The sampler has work for {busy:.3g} of {step:.3g} s of a step, and waits for the trainer."


def _failures(first: Lines, newest: Lines) -> str:
    failed = sum(line.get("reward/failures") or 0 for line in newest)
    rollouts = sum(line.get("rollouts") or 0 for line in newest)
    return (
        f"Rewards failed {failed:.0f} times on {rollouts:.0f} rollouts." if failed > 0.05 * rollouts else ""
    )


def _skipped(first: Lines, newest: Lines) -> str:
    count = sum(line.get("actor/skipped_steps") or 0 for line in newest)
    return f"{count:.0f} updates were skipped: their gradient was not finite." if count else ""


CONDITIONS = {
    "entropy_collapse": Condition(
        _entropy,
        "If the reward no longer rises, lower actor.optim.lr, raise the clip ratio above (clip_ratio_high), or set algorithm.entropy_coef.",
    ),
    "truncation": Condition(
        _above("response_length/truncated_share", 0.25, "{:.0%} of the responses are cut."),
        "Raise rollout.max_response_tokens, or reward shorter responses.",
    ),
    "zero_variance_groups": Condition(
        _above(
            "reward/zero_variance_groups", 0.8, "{:.0%} of the groups have equal rewards and teach nothing."
        ),
        "Read some responses: does a right one get the reward? Then take prompts that are neither solved nor hopeless, a "
        "larger rollout.group_size, or a finer reward.",
    ),
    "mismatch": Condition(
        _mismatch,
        "Compare number types, attention and custom code of the two, or correct with algorithm.correction.",
    ),
    "idle_sampler": Condition(
        _idle,
        "Give devices of the sampler to the trainer, or raise data.prompts_per_step.",
    ),
    "reward_failures": Condition(
        _failures,
        "Read the traceback in the log, and fix the reward or its limits.",
    ),
    "skipped_updates": Condition(
        _skipped,
        "Lower actor.optim.lr, or train in bf16 rather than fp16.",
    ),
}
"""Name -> condition, in the order in which they are shown."""


def conditions(first: Lines, newest: Lines) -> dict[str, str]:
    """Return the conditions that hold: name -> what was found, what to do, and where it is explained.

    Args:
        first: metrics of the first steps, as in ``metrics.jsonl``.
        newest: metrics of the newest ``WINDOW`` steps; with fewer there are no conditions.
    """
    if len(newest) < WINDOW:
        return {}
    found = {name: condition.check(first, newest) for name, condition in CONDITIONS.items()}
    return {name: explained(name, f"{text} {CONDITIONS[name].fix}") for name, text in found.items() if text}


def explained(name: str, text: str) -> str:
    """Return a text with the heading that explains its condition."""
    return f"{text} See '{name}' on the page 'Health' of the documentation."


def health_of(lines: Lines) -> dict[str, str]:
    """Return the conditions of a run by all its metrics: those of its newest steps, and ``step_time`` (``advice``)."""
    steps = [line for line in lines if line.get("step")]
    found = conditions(steps[:WINDOW], steps[-WINDOW:])
    if text := advice(lines):
        found["step_time"] = explained("step_time", text)
    return found


class Health:
    """The part ``health``: called with the metrics of each finished step, it returns what ``conditions`` finds.

    The tenth step adds ``step_time``: what would make the run faster (``advice``).
    """

    def __init__(self) -> None:
        self._first: list[Mapping[str, Any]] = []
        self._newest: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)

    def __call__(self, metrics: Mapping[str, Any]) -> dict[str, str]:
        """Add a step and return the conditions that hold now."""
        self._newest.append(metrics)
        found = conditions(self._first[:WINDOW], list(self._newest))
        if len(self._first) < STEPS_BEFORE_ADVICE:
            self._first.append(metrics)
            if len(self._first) == STEPS_BEFORE_ADVICE and (text := advice(self._first)):
                found["step_time"] = explained("step_time", text)
        return found
