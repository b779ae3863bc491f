"""Arithmetic of the comparison: medians, percentiles, the interval of a ratio, and the gates. No torch here."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RESAMPLES = 4000
LOSS_WITHIN = {
    "fp32": 1e-5,
    "bf16": 2e-2,
    "bf16 gpu": 2e-2,  # log-probs: their mean, and their spread as ``ROUNDED_WITHIN`` says
}  # G1: loss, log-probs and advantages absolute, gradient norm relative
EXACT_WITHIN = 1e-4  # G1, the beginning of the batch in float32: as above
# G1 on a GPU: log-probs of both are no further apart than so many times TRL's own rounding
ROUNDED_WITHIN = 2.0
GAP_WITHIN = {
    "fp32": 1e-4,
    "bf16": 5e-2,
    "bf16 gpu": 5e-2,
}  # G2: mean |log-prob of the sampler - of the trainer|, nats
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

    In bfloat16 the first responses are computed in float32 too, where nothing but the order of sums is left to differ.
    On a GPU the furthest of 262,144 log-probs says how long a tail of rounding is, and not whether two programs compute
    one thing: there the differences must be as narrow as rounding makes them, by ``rounding``.

    Args:
        trl: what ``same_batch`` of its runner found.
        engine: likewise.
        precision: a key of ``LOSS_WITHIN``.
    """
    within = LOSS_WITHIN[precision]
    told = [
        ("rewards", _furthest(trl["rewards"], engine["rewards"]), within),
        *((name, value, within) for name, value in apart(trl, engine, mean=precision == "bf16 gpu").items()),
    ]
    if precision != "fp32":
        exact = apart(trl["float32"], engine["float32"])
        told += [(f"float32 {name}", value, EXACT_WITHIN) for name, value in exact.items()]
    if precision == "bf16 gpu":
        told += [(name, value, ROUNDED_WITHIN) for name, value in rounding(trl, engine).items()]
    found = ", ".join(f"{name} {value:.1e}" + " (!)" * (not value <= bound) for name, value, bound in told)
    return Gate("G1 same batch, same maths", all(value <= bound for _, value, bound in told), found)


def apart(trl: Mapping[str, Any], engine: Mapping[str, Any], mean: bool = False) -> dict[str, float]:
    """How far two answers to one batch are apart; of log-probs the furthest, or the mean."""
    log_probs = differences(trl["log_probs"], engine["log_probs"])
    found = {
        "advantages": _furthest(trl["advantages"], engine["advantages"]),
        "log-probs": statistics.fmean(log_probs) if mean else max(log_probs),
    }
    for case in ("on_policy", "off_policy"):
        one, other = trl[case], engine[case]
        found[f"loss {case}"] = abs(one["loss"] - other["loss"])
        found[f"gradient {case}"] = abs(one["grad_norm"] - other["grad_norm"]) / one["grad_norm"]
    return found


def rounding(trl: Mapping[str, Any], engine: Mapping[str, Any]) -> dict[str, float]:
    """|log-prob of TRL - of the engine| in bfloat16 over |log-prob of TRL in bfloat16 - in float32|: mean, 99th percentile, furthest.

    Independent errors of one size give the square root of 2, equal ones 0. The yard-stick is TRL's own error, so that one
    of the engine does not widen its own bound. All are of the responses that were computed in float32, too.
    """
    exact = trl["float32"]["log_probs"]
    own = differences(trl["log_probs"][: len(exact)], exact)
    between = differences(trl["log_probs"][: len(exact)], engine["log_probs"][: len(exact)])
    spreads: dict[str, Callable[[Sequence[float]], float]] = {
        "mean": statistics.fmean,
        "p99": lambda values: percentile(values, 0.99),
        "furthest": max,
    }
    return {f"rounding {name}": spread(between) / max(spread(own), 1e-12) for name, spread in spreads.items()}


def differences(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> list[float]:
    """|difference| of log-probs [responses][tokens], one after another."""
    return [abs(a - b) for row, its in zip(one, other, strict=True) for a, b in zip(row, its, strict=True)]


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
