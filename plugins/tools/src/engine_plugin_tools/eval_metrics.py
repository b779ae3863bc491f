"""Metrics of an evaluation and their uncertainty: pass@k, maj@k, means, intervals over prompts.

Each prompt has n sampled responses. Every metric is a mean over prompts of one value per prompt, so
all intervals are over prompts: the responses to one prompt are not independent, and more of them do
not make the set larger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from engine_core.types import CUT

if TYPE_CHECKING:
    from engine_core.config.evaluation import HeldOut
    from engine_core.types import Rollout

LEVEL = 0.95
"""Of all intervals."""
RESAMPLES = 2000
"""Draws of a bootstrap."""


def pass_at_k(passed: int, samples: int, k: int) -> float:
    """Return the probability that at least one of k of the samples passed; unbiased for k responses.

    Formula: ``1 - C(n - c, k) / C(n, k)``, as ``1 - prod_{i = n - c + 1}^{n} (1 - k / i)``, which needs no large numbers
    Paper: https://arxiv.org/abs/2107.03374

    Args:
        passed: c, the number of samples that passed.
        samples: n.
        k: 1 to n.

    Raises:
        ValueError: k is not in that range.
    """
    _check_k(k, samples)
    if samples - passed < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - passed + 1, samples + 1))


def majority_at_k(answers: Sequence[str | None], passed: Sequence[bool], k: int) -> float:
    """Return the probability that the most frequent answer among k of the samples is right.

    Formula: mean over all subsets of k samples of how right the most frequent answer is
    Paper: https://arxiv.org/abs/2203.11171
    Differs: subsets are counted exactly (verl draws them); answers that tie share the subset

    A sample without an answer has no vote, and a subset without votes counts as wrong.

    Args:
        answers: [n] the answer of each sample; None: no answer. Equal texts are one answer.
        passed: [n] whether the sample passed. The correctness of an answer is the share of its samples that passed.
        k: 1 to n.

    Raises:
        ValueError: k is not in that range.
    """
    samples = len(answers)
    _check_k(k, samples)
    votes: dict[str, list[bool]] = {}
    for answer, is_right in zip(answers, passed, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(is_right)
    counts = [len(rights) for rights in votes.values()]
    right = [sum(rights) / len(rights) for rights in votes.values()]
    # Each sample is drawn with probability k / n on its own; if k are drawn, every subset of k is equally probable.
    drawn = [_drawn(count, k, samples) for count in counts]
    silent = _drawn(samples - sum(counts), k, samples)
    total = sum(
        _won_with(most, drawn, right, silent, k) for most in range(1, min(k, max(counts, default=0)) + 1)
    )
    return total / _drawn(samples, k, samples)[k]


def _drawn(count: int, k: int, samples: int) -> list[float]:
    """Return the probability of each number of draws, from 0 to k, among ``count`` samples: a binomial distribution."""
    return [  # whole numbers, which do not overflow
        math.comb(count, taken) * k**taken * (samples - k) ** (count - taken) / samples**count
        if taken <= count
        else 0.0
        for taken in range(k + 1)
    ]


def _won_with(
    most: int, drawn: Sequence[Sequence[float]], right: Sequence[float], silent: Sequence[float], k: int
) -> float:
    """Return the sum of the winner's correctness over draws of k samples in which it has ``most`` votes, by probability.

    Args:
        most: votes of the winner.
        drawn: of each answer, the probability of each number of votes, 0 to k.
        right: correctness of each answer.
        silent: the same as ``drawn``, of the samples without an answer.
        k: number of samples in a draw.
    """
    ties = k // most
    # [votes so far, answers with `most` votes]: the probability, and the sum of the winners' correctness times it
    ways, sums = np.zeros((2, k + 1, ties + 1))
    ways[0, 0] = 1.0
    for chances, worth in zip(drawn, right, strict=True):
        new_ways, new_sums = np.zeros_like(ways), np.zeros_like(sums)
        for taken, times in enumerate(chances[: most + 1]):
            first = int(taken == most)
            rows, columns = k + 1 - taken, ties + 1 - first
            new_ways[taken:, first:] += times * ways[:rows, :columns]
            new_sums[taken:, first:] += times * (sums + first * worth * ways)[:rows, :columns]
        ways, sums = new_ways, new_sums
    return float((np.array(silent[::-1]) @ sums)[1:] @ (1.0 / np.arange(1, ties + 1)))


def _check_k(k: int, samples: int) -> None:
    if not 1 <= k <= samples:
        raise ValueError(f"k is {k}; expected 1 to the number of samples, {samples}.")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts with its 95% interval; the bounds are NaN if a single prompt gives no interval."""

    mean: float
    low: float
    high: float
    prompts: int

    @property
    def half_width(self) -> float:
        """Half the width of the interval, the number after the ``±``."""
        return (self.high - self.low) / 2

    def __str__(self) -> str:
        return f"{self.mean:.3g}" if math.isnan(self.low) else f"{self.mean:.2f} ± {self.half_width:.2f}"


def score_interval(scores: Sequence[Sequence[float]]) -> Estimate:
    """Return the mean over prompts of the mean score of a prompt, with its interval.

    Args:
        scores: [P], at least one, each with the scores of a prompt's responses. If all are 0 or 1 the interval is
            ``bootstrap_interval``, else ``mean_interval``.
    """
    binary = {value for prompt in scores for value in prompt} <= {0.0, 1.0}
    means = [math.fsum(prompt) / len(prompt) for prompt in scores]
    return bootstrap_interval(means) if binary else mean_interval(means)


def mean_interval(values: Sequence[float]) -> Estimate:
    """Return ``m ± t s / sqrt(P)``: m and s are mean and standard deviation (P - 1) of one value per prompt.

    t is the 97.5% quantile of Student's distribution with P - 1 degrees of freedom. This is the
    cluster-robust interval of all responses if each prompt has the same number of them.

    Args:
        values: [P], at least one: the mean of a prompt's responses, or a paired difference.
    """
    count, mean = len(values), math.fsum(values) / len(values)
    if count < 2:
        return Estimate(mean, math.nan, math.nan, count)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    half = student_quantile(count - 1) * deviation / math.sqrt(count)
    return Estimate(mean, mean - half, mean + half, count)


def bootstrap_interval(values: Sequence[float], seed: int = 0) -> Estimate:
    """Return the percentile bootstrap interval over prompts, for values in 0..1.

    P prompts are drawn with replacement, 2000 times; the bounds are the 2.5% and 97.5% quantiles of the means, which
    stay in 0..1. If all values are 0, or all are 1, the draws do not differ: one bound is then the exact bound
    of P equal trials (Clopper-Pearson), ``0.025^(1/P)`` from the other end of the range.

    Args:
        values: [P], at least one, each in 0..1.
        seed: seed of the draws, so that the same values give the same interval.
    """
    numbers = np.asarray(values, dtype=np.float64)
    count, mean = len(numbers), float(numbers.mean())
    tail = (1 - LEVEL) / 2
    if numbers.min() == numbers.max() and mean in (0.0, 1.0):
        edge = tail ** (1 / count)
        low, high = (edge, 1.0) if mean else (0.0, 1.0 - edge)
        return Estimate(mean, low, high, count)
    if count < 2:
        return Estimate(mean, math.nan, math.nan, count)
    rng = np.random.default_rng(seed)
    means = [float(numbers[rng.integers(count, size=count)].mean()) for _ in range(RESAMPLES)]
    return Estimate(mean, float(np.quantile(means, tail)), float(np.quantile(means, 1 - tail)), count)


def student_quantile(freedom: int, level: float = LEVEL) -> float:
    """Return t with ``P(|T| <= t) = level``.

    Bisection of the closed form (Abramowitz and Stegun, 26.7.3 and 26.7.4); above 1000 degrees of freedom the normal
    quantile.
    """
    if freedom > 1000:
        return NormalDist().inv_cdf((1 + level) / 2)
    low, high = 0.0, 1e4
    while high - low > 1e-9 * max(low, 1.0):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < level else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """Return ``P(|T| <= t)``."""
    angle = math.atan(t / math.sqrt(freedom))
    term = total = math.cos(angle) if freedom % 2 else 1.0
    for power in range(3 if freedom % 2 else 2, freedom - 1, 2):
        term *= (power - 1) / power * math.cos(angle) ** 2
        total += term
    if freedom % 2 == 0:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + (math.sin(angle) * total if freedom > 1 else 0.0))


def set_metrics(rollouts: Sequence[Rollout], held_out: HeldOut) -> dict[str, float]:
    """Return the metrics of one set; an interval adds ``NAME_low`` and ``NAME_high``.

    A response without a score (its reward does not apply, or failed and `on_error` drops it) is left out
    and counted in ``unscored``. A prompt with fewer than k scored responses is not in pass@k and maj@k.

    Args:
        rollouts: scored rollouts; those of one prompt share a ``group_id``.
        held_out: how they were sampled, and the metrics to compute.

    Returns:
        ``reward_mean``, ``accuracy`` (mean score), ``mean@N`` (the same, with N > 1 responses per prompt),
        ``pass@K``, ``maj@K``, ``NAME`` of each reward, ``response_length``, ``truncated_share`` (responses that were cut),
        ``prompts``, ``unscored``.
    """
    names = list(dict.fromkeys(name for r in rollouts for name in r.rewards))
    score = held_out.score or next(iter([*held_out.rewards, *names]), None)
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group_id, []).append(rollout)
    scored = {
        group: kept
        for group, members in groups.items()
        if (kept := [r for r in members if score is not None and r.rewards.get(score) is not None])
    }
    found: dict[str, Estimate] = {
        "reward_mean": mean_interval([_mean([r.reward for r in members]) for members in groups.values()])
    }
    if score is not None and scored:
        found |= _of_score(scored, score, held_out)
    metrics = {name: _mean([r.rewards.get(name) for r in rollouts]) for name in names}
    metrics |= {"accuracy": 0.0} | flat(found)
    return metrics | {
        "response_length": _mean([float(r.response_length) for r in rollouts]),
        "truncated_share": _mean([float(r.finish_reason in CUT) for r in rollouts]),
        "prompts": float(len(groups)),
        "unscored": float(len(rollouts) - sum(map(len, scored.values()))),
    }


def _of_score(scored: Mapping[int, Sequence[Rollout]], score: str, held_out: HeldOut) -> dict[str, Estimate]:
    """Return the means of the score, pass@k and maj@k over the prompts."""
    scores = [[r.rewards[score] or 0.0 for r in members] for members in scored.values()]
    found = {"accuracy": score_interval(scores)}
    if held_out.samples_per_prompt > 1:
        found[f"mean@{held_out.samples_per_prompt}"] = found["accuracy"]
    passed = [[value >= held_out.pass_threshold for value in prompt] for prompt in scores]
    for k in held_out.k:
        enough = [(p, members) for p, members in zip(passed, scored.values(), strict=True) if len(p) >= k]
        if enough:
            found[f"pass@{k}"] = bootstrap_interval([pass_at_k(sum(p), len(p), k) for p, _ in enough])
            if held_out.majority != "off":
                votes = [majority_at_k(_answers(each, held_out.majority), p, k) for p, each in enough]
                found[f"maj@{k}"] = bootstrap_interval(votes)
    return found


def _answers(members: Sequence[Rollout], majority: str) -> list[str | None]:
    """Return the vote of each response: the answer found by reward ``majority``, or its text with white space collapsed."""
    if majority == "text":
        return [" ".join(r.text.split()) or None for r in members]
    return [r.answers.get(majority) for r in members]


def flat(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    """Return estimates as metrics: ``NAME``, and ``NAME_low`` and ``NAME_high`` if there is an interval."""
    metrics = {}
    for name, estimate in estimates.items():
        metrics[name] = estimate.mean
        if not math.isnan(estimate.low):
            metrics |= {f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    return metrics


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0
