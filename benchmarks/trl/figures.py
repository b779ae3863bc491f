"""Arithmetic of the comparison: medians, percentiles, the interval of a ratio, and the gates. No torch here."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RESAMPLES = 4000
LOSS_WITHIN = {
    "fp32": 1e-5,
    "bf16": 2e-2,
}  # G1: loss, log-probs and advantages absolute, gradient norm relative
GAP_WITHIN = {"fp32": 1e-4, "bf16": 5e-2}  # G2: mean |log-prob of the sampler - of the trainer|, nats
TOKENS_WITHIN = 0.02  # G5
RISE = 0.05  # G4: of the reward, by which each framework must have learned


@dataclass(frozen=True)
class Gate:
    """One condition without which a figure is void."""

    name: str
    passed: bool
    found: str


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between neighbours, as numpy's default."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile."""
    return {
        "median": statistics.median(values),
        "p10": percentile(values, 0.1),
        "p90": percentile(values, 0.9),
    }


def ratio_interval(
    slow: Sequence[Sequence[float]], fast: Sequence[Sequence[float]], seed: int = 0
) -> tuple[float, float, float]:
    """Median seconds of the one over those of the other, with a 95% bootstrap interval.

    Steps are drawn with replacement within each process, so that each process keeps its weight. What differs
    from one process to the next on the same machine is therefore not in the interval; read the processes' medians too.

    Args:
        slow: seconds of the steps of each process.
        fast: likewise, of the other framework.

    Returns:
        The ratio (above 1: ``fast`` is faster), and both ends of its interval.
    """
    draw = random.Random(seed)

    def median(processes: Sequence[Sequence[float]]) -> float:
        return statistics.median([draw.choice(steps) for steps in processes for _ in steps])

    ratio = statistics.median(_flat(slow)) / statistics.median(_flat(fast))
    drawn = [median(slow) / median(fast) for _ in range(RESAMPLES)]
    return ratio, percentile(drawn, 0.025), percentile(drawn, 0.975)


def _flat(processes: Sequence[Sequence[float]]) -> list[float]:
    return [seconds for steps in processes for seconds in steps]


def same_maths(trl: Mapping[str, Any], engine: Mapping[str, Any], precision: str) -> Gate:
    """G1: of one batch the same rewards, advantages, log-probs, loss and norm of its gradient.

    Args:
        trl: what ``same_batch`` of its runner found.
        engine: likewise.
        precision: ``fp32`` or ``bf16``.
    """
    within = LOSS_WITHIN[precision]
    apart = {
        "rewards": _furthest(trl["rewards"], engine["rewards"]),
        "advantages": _furthest(trl["advantages"], engine["advantages"]),
        "log-probs": max(map(_furthest, trl["log_probs"], engine["log_probs"])),
    }
    for case in ("on_policy", "off_policy"):
        one, other = trl[case], engine[case]
        apart[f"loss {case}"] = abs(one["loss"] - other["loss"])
        apart[f"gradient {case}"] = abs(one["grad_norm"] - other["grad_norm"]) / one["grad_norm"]
    found = ", ".join(f"{name} {value:.1e}" for name, value in apart.items())
    return Gate("G1 same batch, same maths", all(value <= within for value in apart.values()), found)


def _furthest(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def same_policy(steps: Sequence[Mapping[str, float]], precision: str) -> Gate:
    """G2: the engine's sampler gives the trainer's log-probs, and the first ratio is exactly 1.

    TRL's sampler (``generate``) tells no log-probs; its ratio is 1 because it takes its own log-probs, detached.
    """
    gap, first = max(step["gap"] for step in steps), steps[0]
    found = f"mean gap {gap:.1e} nats, first ratio {first['ratio']!r}, first kl {first['kl']!r}"
    exact = first["ratio"] == 1.0 and first["kl"] == 0.0
    return Gate("G2 sampler and trainer", gap <= GAP_WITHIN[precision] and exact, found)


def moved_weights(name: str, sampler: Sequence[str], trainer: Sequence[str]) -> Gate:
    """G3: the sampler of each step has the weights that the step before it left, and they differ from step to step.

    Args:
        name: of the framework.
        sampler: checksums as each step sampled.
        trainer: checksums before the first step, and after each.
    """
    same = len(sampler) > 1 and list(sampler) == list(trainer)
    moved = len(set(sampler)) == len(sampler)
    found = f"{len(sampler)} steps, {'equal' if same else 'NOT equal'}, {'moved' if moved else 'NOT moved'}"
    return Gate(f"G3 weights of {name}", same and moved, found)


def learns(trl: Sequence[Sequence[float]], engine: Sequence[Sequence[float]]) -> Gate:
    """G4: both rise, and the bands over seeds of the last quarter of steps overlap.

    Args:
        trl: reward of each step, for each seed.
        engine: likewise.
    """
    bands = {}
    rises = {}
    for name, curves in (("trl", trl), ("engine", engine)):
        quarter = max(1, len(curves[0]) // 4)
        last = [statistics.fmean(curve[-quarter:]) for curve in curves]
        rises[name] = min(end - curve[0] for end, curve in zip(last, curves, strict=True))
        bands[name] = (min(last), max(last))
    overlap = bands["trl"][0] <= bands["engine"][1] and bands["engine"][0] <= bands["trl"][1]
    found = ", ".join(f"{n} {a:.3f} to {b:.3f} (rise at least {rises[n]:.3f})" for n, (a, b) in bands.items())
    return Gate("G4 both learn alike", overlap and min(rises.values()) >= RISE, found)


def same_tokens(trl: Sequence[Mapping[str, float]], engine: Sequence[Mapping[str, float]]) -> Gate:
    """G5: as many response tokens a step, within 2%."""
    one, other = (statistics.fmean(step["completion_tokens"] for step in steps) for steps in (trl, engine))
    passed = abs(one - other) <= TOKENS_WITHIN * max(one, other)
    return Gate("G5 response tokens a step", passed, f"trl {one:,.0f}, engine {other:,.0f}")


def same_inputs(results: Sequence[Mapping[str, Any]]) -> Gate:
    """G0: every process read the same model and the same data."""
    found = {tuple(sorted(result["inputs"].items())) for result in results}
    return Gate(
        "G0 same model and data",
        len(found) == 1,
        f"{len(found)} of {len(results)} processes differ" if len(found) > 1 else "SHA-256 equal",
    )
