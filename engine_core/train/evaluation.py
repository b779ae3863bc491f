"""Metrics of a held-out set that was sampled as ``[eval]`` says and scored, with their uncertainty."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_core.algorithms.evaluation import (
    Estimate,
    bootstrap_interval,
    majority_at_k,
    mean_interval,
    pass_at_k,
    score_interval,
)
from engine_core.types import CUT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine_core.config.evaluation import HeldOut
    from engine_core.types import Rollout


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
    prompts = [_Prompt.of(members, score, held_out) for members in scored.values()]
    found = {"accuracy": score_interval([prompt.scores for prompt in prompts])}
    if held_out.samples_per_prompt > 1:
        found[f"mean@{held_out.samples_per_prompt}"] = found["accuracy"]
    for k in held_out.k:
        if enough := [prompt for prompt in prompts if len(prompt.scores) >= k]:
            passes = [pass_at_k(sum(prompt.passed), len(prompt.passed), k) for prompt in enough]
            found[f"pass@{k}"] = bootstrap_interval(passes)
            if held_out.majority != "off":
                votes = [majority_at_k(prompt.answers, prompt.passed, k) for prompt in enough]
                found[f"maj@{k}"] = bootstrap_interval(votes)
    return found


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The scored responses to one prompt."""

    scores: list[float]
    passed: list[bool]
    answers: list[str | None]  # the vote of each response; None: no vote

    @classmethod
    def of(cls, members: Sequence[Rollout], score: str, held_out: HeldOut) -> _Prompt:
        """Build from the scored responses to a prompt, with the reward ``score`` as their score."""
        scores = [r.rewards[score] or 0.0 for r in members]
        return cls(
            scores,
            [value >= held_out.pass_threshold for value in scores],
            _answers(members, held_out.majority),
        )


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
