"""Divergences between a student and a teacher: log-probs of the same outcomes in, a number a token out.

At a token both give a distribution over V tokens. Of the teacher's, the K likeliest are known one by one
and all others as one sum, *the rest*; of the student's, the same K tokens and the rest. A divergence is
that of these K + 1 outcomes::

    sum over the K tokens and the rest of  f(student, teacher)

With K = V there is no rest, and it is the divergence itself. With K < V it is never more than that (merging
outcomes loses information), and equal to it exactly where student and teacher share the rest in the same
proportions. So what is missed is the order of tokens within the rest; a student that puts *weight* on what
the teacher thinks unlikely is held to account, unlike where both are cut to K tokens and normalised anew,
which neither sees nor punishes such weight.

Left out: a factor temperature^2 (Hinton, https://arxiv.org/abs/1503.02531), which is a learning rate.
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

NOTHING = -1e4  # nats: e^-1e4 is 0, and 0 times it is 0, which 0 times -inf is not
DIVERGENCES = ("reverse_kl", "forward_kl", "jsd")


def token_divergence(student: Tensor, teacher: Tensor, kind: str, jsd_beta: float = 0.5) -> Tensor:
    """The divergence of two distributions over the same outcomes.

    GKD, https://arxiv.org/abs/2306.13649, equation 1 and section 3. With T the teacher and S the student:
    ``reverse_kl`` ``sum S (log S - log T)``, which seeks one mode; ``forward_kl`` ``sum T (log T - log S)``,
    which covers all; ``jsd`` ``b KL(T | M) + (1 - b) KL(S | M)`` with ``M = b T + (1 - b) S``. The last is 0
    for b = 0 and b = 1 whatever S and T are, and close to b times the forward KL for a small b, 1 - b times
    the reverse KL for one near 1: with a step size that is to stay the same, the ends are names of their own.

    Args:
        student: [N, K] log-probs, natural; they sum to 1 over the outcomes.
        teacher: [N, K], the same.
        kind: of ``DIVERGENCES``.
        jsd_beta: b of ``jsd``, the teacher's share of the mixture; between 0 and 1.

    Returns:
        [N], at least 0 but for rounding, with gradient to both.
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
    return (p.exp() * (p - q)).sum(-1)


def distill(
    outputs: Mapping[str, Tensor], batch: Batch, *, divergence: str, jsd_beta: float = 0.5
) -> tuple[Tensor, dict[str, Tensor]]:
    """Divergence of student and teacher over the teacher's likeliest tokens and the rest together.

    Formula: ``sum_t w_t D(student_t, teacher_t)``, D = ``reverse_kl``, ``forward_kl`` or ``jsd`` of these K + 1 outcomes
    Paper: https://arxiv.org/abs/2306.13649
    Differs: the K tokens are not normalised anew: all others count as one outcome

    Args:
        outputs: ``log_probs_at`` [T, K] and ``log_rest`` [T] with gradient; ``log_probs`` [T], ``entropy`` [T]
            for metrics, where they are there.
        batch: ``candidate_ids`` [T, K], ``candidate_log_probs`` [T, K] and ``candidate_log_rest`` [T], what the
            teacher says of them; ``weights``, ``token_share``; ``rollout_log_probs`` where the student sampled
            these tokens at this temperature.
        divergence: of ``DIVERGENCES``.
        jsd_beta: of ``jsd``.

    Returns:
        The sum; means over tokens of the divergence, of the teacher's probability of the K tokens
        (``teacher/top_mass``), of the student's of them, of its entropy, and of the gap to the sampler.
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
        watched |= {name: value[learned] for name, value in gap.items()}
    return (weights[learned] * cost).sum(), over_tokens(watched, share[learned])


def _outcomes(log_probs: Tensor, log_rest: Tensor, learned: Tensor) -> Tensor:
    """[n, K + 1]: the candidates and the rest, at the learned tokens; a token that cannot come has ``NOTHING``."""
    return torch.cat([log_probs[learned], log_rest[learned][:, None]], dim=-1).clamp(min=NOTHING)
