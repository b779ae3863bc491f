"""Losses over pairs of responses: from the scores [P] of the chosen and the rejected responses to losses [P].

A score is ``s = f'(d)`` of the log-ratio ``d = log p(response) - log p_ref(response)``, which is a sum over the
response's tokens or their mean. For the reverse KL ``s = d``. With c the chosen and r the rejected response,
``D = s_c - s_r``, and e the label smoothing:

============= ==================================================================== =======================
loss          formula                                                              paper
============= ==================================================================== =======================
sigmoid       ``-log σ(βD)``                                                       DPO, arXiv:2305.18290
sigmoid_norm  the same over token means                                            arXiv:2405.14734
cdpo          ``-(1-e) log σ(βD) - e log σ(-βD)``                                  Mitchell, 2023
robust        ``(-(1-e) log σ(βD) + e log σ(-βD)) / (1-2e)``                       arXiv:2403.00409
hinge         ``max(0, 1 - βD)``                                                   SLiC, arXiv:2305.10425
ipo           ``(D - 1/(2β))²`` over token means                                   arXiv:2310.12036
exo_pair      ``KL((σ(βD), σ(-βD)) || (1-e, e))``                                  arXiv:2402.00856
nca_pair      ``-log σ(βs_c) - (log σ(-βs_c) + log σ(-βs_r)) / 2``                 arXiv:2402.05369
sppo_hard     ``(s_c - 1/(2β))² + (s_r + 1/(2β))²``                                arXiv:2405.00675
apo_zero      ``1 - σ(βs_c) + σ(βs_r)``                                            arXiv:2408.06266
apo_down      ``σ(βs_c) + 1 - σ(βD)``                                              arXiv:2408.06266
discopop      ``(1-m)(-log σ(βD)) + m exp(-βD)``, ``m = σ(βD/τ)``                  arXiv:2406.08414
orpo          ``-β log σ(log odds_c - log odds_r)`` of mean log-probs              arXiv:2403.07691
simpo         cdpo of mean log-probs with ``βD - γ`` in place of ``βD``            arXiv:2405.14734
cpo           cdpo of log-probs                                                    arXiv:2401.08417
============= ==================================================================== =======================

Differs (orpo): the sum with the likelihood is `dpo.sft_coef` (TRL: a separate trainer)
Differs (simpo): a loss of the trainer `dpo` (TRL: an option of the CPO trainer)
Differs (cpo): the sum with the likelihood is `dpo.sft_coef` (TRL: a separate trainer)

Names and defaults are TRL's. WPO's weights and LD-DPO's tail weights (``preference_columns``) combine with any loss.

Left out: losses that compare a pair with others of the mini-batch, such as AOT (arXiv:2406.05882) and BCO
(arXiv:2404.04656).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import logsigmoid, softplus

if TYPE_CHECKING:
    from torch import Tensor

MOST = 80.0  # largest exponent: e^80 is finite in float32
LEAST_LOSS = 1e-6  # nats per token, because the odds of a certain response are infinite


def f_score(log_ratio: Tensor, divergence: str, alpha: float = 0.5) -> Tensor:
    """Return ``f'(t)`` at ``t = exp(log_ratio)`` without its constant, which cancels in a difference of scores.

    f-DPO, https://arxiv.org/abs/2309.16240, table 1. Exponents are clamped at 80; beyond that the gradient is 0.

    Args:
        log_ratio: [B], or any shape, which the result has too.
        divergence: ``reverse_kl`` ``log t``, ``forward_kl`` ``-1 / t``, ``js`` ``log(t / (1 + t))``,
            ``alpha`` ``t^(alpha - 1) / (alpha - 1)``, which is ``log t`` at 1.
        alpha: parameter of the divergence ``alpha``.

    Raises:
        ValueError: the divergence is unknown.
    """
    if divergence == "reverse_kl" or (divergence == "alpha" and abs(alpha - 1) < 1e-6):
        return log_ratio
    if divergence == "forward_kl":
        return -(-log_ratio).clamp(max=MOST).exp()
    if divergence == "js":
        return logsigmoid(log_ratio)
    if divergence == "alpha":
        return ((alpha - 1) * log_ratio).clamp(max=MOST).exp() / (alpha - 1)
    raise ValueError(f"Unknown f-divergence '{divergence}'. Known: reverse_kl, forward_kl, js, alpha.")


def sigmoid(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Return DPO's losses [P] from scores [P]."""
    return -logsigmoid(beta * (chosen - rejected))


def cdpo(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """Return conservative DPO's losses [P] from scores [P]."""
    return _smoothed(beta * (chosen - rejected), label_smoothing)


def _smoothed(logits: Tensor, e: float) -> Tensor:
    """Return ``-(1-e) log σ(x) - e log σ(-x)`` of logits [P]."""
    return -(1 - e) * logsigmoid(logits) - e * logsigmoid(-logits)


def robust(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """Return robust DPO's losses [P] from scores [P]."""
    logits, e = beta * (chosen - rejected), label_smoothing
    return (-(1 - e) * logsigmoid(logits) + e * logsigmoid(-logits)) / (1 - 2 * e)


def hinge(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Return SLiC's hinge losses [P] from scores [P]."""
    return torch.relu(1 - beta * (chosen - rejected))


def ipo(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Return IPO's losses [P] from scores [P]."""
    return (chosen - rejected - 1 / (2 * beta)) ** 2


def exo_pair(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """Return EXO's losses [P] from scores [P]; label smoothing must be over 0."""
    logits = beta * (chosen - rejected)
    aims = torch.tensor([1 - label_smoothing, label_smoothing], dtype=torch.float64).log().tolist()
    signed = zip((logits, -logits), aims, strict=True)
    return torch.stack([one.sigmoid() * (logsigmoid(one) - aim) for one, aim in signed]).sum(0)


def nca_pair(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Return NCA's losses [P] from scores [P]."""
    better, worse = beta * chosen, beta * rejected
    return -logsigmoid(better) - 0.5 * logsigmoid(-better) - 0.5 * logsigmoid(-worse)


def sppo_hard(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Return SPPO's losses [P] from scores [P], with hard win probabilities."""
    return (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2


def apo_zero(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Return APO-zero's losses [P] from scores [P]."""
    return (-beta * chosen).sigmoid() + (beta * rejected).sigmoid()


def apo_down(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Return APO-down's losses [P] from scores [P]."""
    return (beta * chosen).sigmoid() + (-beta * (chosen - rejected)).sigmoid()


def discopop(chosen: Tensor, rejected: Tensor, *, beta: float, discopop_tau: float) -> Tensor:
    """Return DiscoPOP's losses [P] from scores [P]."""
    logits = beta * (chosen - rejected)
    blend = (logits / discopop_tau).sigmoid()
    return (1 - blend) * softplus(-logits) + blend * (-logits).clamp(max=MOST).exp()


def orpo(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Return ORPO's losses [P] from mean log-probs [P]."""
    return -beta * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(log_prob: Tensor) -> Tensor:
    """Return ``log(p / (1 - p))`` [P]; p is clamped below 1."""
    held = log_prob.clamp(max=-LEAST_LOSS)
    return held - (-torch.expm1(held)).log()


def simpo(
    chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float, simpo_gamma: float
) -> Tensor:
    """Return SimPO's losses [P] from mean log-probs [P]."""
    return _smoothed(beta * (chosen - rejected) - simpo_gamma, label_smoothing)
