"""Divergences between a student and a teacher: from log-probs of the same outcomes to a number per token.

At each position both models give a distribution over V tokens. The teacher's K likeliest tokens are known one by one,
and all other tokens as one sum, *the rest*. The student's distribution is reduced to the same K tokens and the rest. A
divergence compares these K + 1 outcomes::

    sum over the K tokens and the rest of  f(student, teacher)

With K = V no rest exists, and the value is the exact divergence. With K < V the value is at most the exact divergence,
because merging outcomes loses information. The two are equal exactly if student and teacher divide the rest in the same
proportions. So only the distribution within the rest is ignored: a student that puts probability on tokens that the
teacher finds unlikely is penalized. Truncating both distributions to K tokens and renormalizing them would ignore that
probability.

Left out: a factor temperature^2 (Hinton, https://arxiv.org/abs/1503.02531), which only scales the learning rate.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from engine_core.algorithms.correction import mismatch_metrics, rollout_log_ratio
from engine_core.metrics import over_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from engine_core.types import Batch

NOTHING = -1e4  # nats: e^-1e4 is 0, and 0 * -1e4 is 0, while 0 * -inf is NaN
DIVERGENCES = ("reverse_kl", "forward_kl", "jsd")


def token_divergence(student: Tensor, teacher: Tensor, kind: str, jsd_beta: float = 0.5) -> Tensor:
    """Return the divergence of two distributions over the same outcomes.

    GKD, https://arxiv.org/abs/2306.13649, equation 1 and section 3. With T the teacher and S the student:

    - ``reverse_kl``: ``sum S (log S - log T)``, which seeks one mode.
    - ``forward_kl``: ``sum T (log T - log S)``, which covers all modes.
    - ``jsd``: ``b KL(T | M) + (1 - b) KL(S | M)`` with ``M = b T + (1 - b) S``. It is about b times the forward KL for
      b near 0 and about 1 - b times the reverse KL for b near 1. At b = 0 and b = 1 it is 0 for all S and T, so these
      limits are separate kinds.

    Args:
        student: [N, K] log-probs, natural; they sum to 1 over the outcomes.
        teacher: [N, K] log-probs of the same outcomes.
        kind: one of ``DIVERGENCES``.
        jsd_beta: b of ``jsd``, the teacher's share of the mixture; between 0 and 1.

    Returns:
        [N], at least 0 up to rounding, with gradient to both.

    Raises:
        ValueError: the kind is unknown.
    """
    if kind == "reverse_kl":
        return _kl(student, teacher)
    if kind == "forward_kl":
        return _kl(teacher, student)
    if kind == "jsd":
        mixture = torch.logaddexp(teacher + math.log(jsd_beta), student + math.log1p(-jsd_beta))
        return jsd_beta * _kl(teacher, mixture) + (1 - jsd_beta) * _kl(student, mixture)
    raise ValueError(f"Unknown divergence '{kind}'. Known: {', '.join(DIVERGENCES)}.")


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p | q) [N] of log-probs [N, K]."""
    return (p.exp() * (p - q)).sum(-1)


def distill(
    outputs: Mapping[str, Tensor], batch: Batch, *, divergence: str, jsd_beta: float = 0.5
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the divergence of student and teacher over the teacher's K likeliest tokens and the rest.

    Formula: ``sum_t w_t D(student_t, teacher_t)``, D = ``reverse_kl``, ``forward_kl`` or ``jsd`` of these K + 1 outcomes
    Paper: https://arxiv.org/abs/2306.13649
    Differs: the K tokens are not renormalized: all others count as one outcome

    Args:
        outputs: ``log_probs_at`` [T, K] and ``log_rest`` [T] with gradient; optionally ``log_probs`` [T] and
            ``entropy`` [T] for metrics.
        batch: the teacher's ``candidate_ids`` [T, K], ``candidate_log_probs`` [T, K] and ``candidate_log_rest`` [T];
            ``weights`` [T], ``token_share`` [T]; ``rollout_log_probs`` [T] if the student sampled these tokens at
            this temperature; ``fresh`` [T] bool if older policies sampled some of them.
        divergence: one of ``DIVERGENCES``.
        jsd_beta: the teacher's share of the mixture of ``jsd``.

    Returns:
        The sum; and means over tokens of the divergence, of the teacher's and the student's probability of the K tokens
        (``teacher/top_mass``, ``actor/top_mass``), of the student's entropy, and of the gap to the sampler.
    """
    weights, share = batch["weights"], batch["token_share"]
    learned = share > 0
    student = _outcomes(outputs["log_probs_at"], outputs["log_rest"], learned)
    teacher = _outcomes(batch["candidate_log_probs"], batch["candidate_log_rest"], learned)
    cost = token_divergence(student, teacher, divergence, jsd_beta)
    watched = {
        "actor/divergence": cost,
        "teacher/top_mass": -torch.expm1(teacher[:, -1]),
        "actor/top_mass": -torch.expm1(student[:, -1]),
    }
    if "entropy" in outputs:
        watched["actor/entropy"] = outputs["entropy"][learned]
    if "rollout_log_probs" in batch and "log_probs" in outputs:
        gap = mismatch_metrics(rollout_log_ratio(batch, outputs["log_probs"]))
        if "fresh" in batch:
            fresh = batch["fresh"].to(gap["mismatch/mean_abs"].dtype)
            gap |= {"mismatch/fresh_share": fresh, "mismatch/fresh_abs": fresh * gap["mismatch/mean_abs"]}
        watched |= {name: value[learned] for name, value in gap.items()}
    return (weights[learned] * cost).sum(), over_tokens(watched, share[learned])


def _outcomes(log_probs: Tensor, log_rest: Tensor, learned: Tensor) -> Tensor:
    """Return log-probs [n, K + 1] of candidates and rest at the n learned tokens, clamped at ``NOTHING``."""
    return torch.cat([log_probs[learned], log_rest[learned][:, None]], dim=-1).clamp(min=NOTHING)
