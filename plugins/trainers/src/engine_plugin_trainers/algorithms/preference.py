"""Losses over pairs of responses: scores of the better and the worse one in, a loss per pair out.

A score is ``s = f'(d)`` of the log-ratio ``d = log p(response) - log p_ref(response)``, a sum over the
response's tokens or their mean; for the reverse KL ``s = d``. With c the chosen and r the rejected one,
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
bco_pair      ``-log σ(βs_c - δ) - log σ(δ - βs_r)``, δ the mean reward so far     arXiv:2404.04656
sppo_hard     ``(s_c - 1/(2β))² + (s_r + 1/(2β))²``                                arXiv:2405.00675
aot           cdpo of (policy margin - the reference's margin of the same rank)    arXiv:2406.05882
aot_unpaired  cdpo of (s_c - s_r of the same rank)                                 arXiv:2406.05882
apo_zero      ``1 - σ(βs_c) + σ(βs_r)``                                            arXiv:2408.06266
apo_down      ``σ(βs_c) + 1 - σ(βD)``                                              arXiv:2408.06266
discopop      ``(1-m)(-log σ(βD)) + m exp(-βD)``, ``m = σ(βD/τ)``                  arXiv:2406.08414
orpo          ``-β log σ(log odds_c - log odds_r)`` of mean log-probs              arXiv:2403.07691
simpo         cdpo of mean log-probs with ``βD - γ`` in place of ``βD``            arXiv:2405.14734
cpo           cdpo of log-probs                                                    arXiv:2401.08417
============= ==================================================================== =======================

Differs (bco_pair): TRL's has no running mean any more
Differs (orpo): the sum with the likelihood is `dpo.sft_coef` (TRL: a trainer of its own)
Differs (simpo): a loss of the trainer `dpo` (TRL: an option of its CPO trainer)
Differs (cpo): the sum with the likelihood is `dpo.sft_coef` (TRL: a trainer of its own)

Names and defaults are TRL's. What compares a pair with others (``shift``) comes as a column that was
made before the update, so that no loss depends on how the mini-batch is split: see
``preference_columns``, also for WPO's weights and LD-DPO's discount of tails, which go with any of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import logsigmoid, softplus

if TYPE_CHECKING:
    from torch import Tensor

MOST = 80.0  # of an exponent: e^80 is finite in float32
LEAST_LOSS = 1e-6  # nats a token: odds of a response that is certain are infinite


def f_score(log_ratio: Tensor, divergence: str, alpha: float = 0.5) -> Tensor:
    """``f'(t)`` at ``t = exp(log_ratio)``, without its constant, which a difference of scores cancels.

    f-DPO, https://arxiv.org/abs/2309.16240, table 1. Exponents stop at 80, where the gradient is then 0.

    Args:
        log_ratio: any shape.
        divergence: ``reverse_kl`` ``log t``, ``forward_kl`` ``-1 / t``, ``js`` ``log(t / (1 + t))``,
            ``alpha`` ``t^(alpha - 1) / (alpha - 1)``, which is ``log t`` at 1.
        alpha: of ``alpha``.
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
    return -logsigmoid(beta * (chosen - rejected))


def cdpo(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    return _smoothed(beta * (chosen - rejected), label_smoothing)


def _smoothed(logits: Tensor, e: float) -> Tensor:
    return -(1 - e) * logsigmoid(logits) - e * logsigmoid(-logits)


def robust(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    logits, e = beta * (chosen - rejected), label_smoothing
    return (-(1 - e) * logsigmoid(logits) + e * logsigmoid(-logits)) / (1 - 2 * e)


def hinge(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    return torch.relu(1 - beta * (chosen - rejected))


def ipo(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    return (chosen - rejected - 1 / (2 * beta)) ** 2


def exo_pair(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    logits = beta * (chosen - rejected)
    aims = torch.tensor([1 - label_smoothing, label_smoothing], dtype=torch.float64).log().tolist()
    signed = zip((logits, -logits), aims, strict=True)
    return torch.stack([one.sigmoid() * (logsigmoid(one) - aim) for one, aim in signed]).sum(0)


def nca_pair(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    better, worse = beta * chosen, beta * rejected
    return -logsigmoid(better) - 0.5 * logsigmoid(-better) - 0.5 * logsigmoid(-worse)


def bco_pair(chosen: Tensor, rejected: Tensor, *, beta: float, shift: Tensor) -> Tensor:
    return -logsigmoid(beta * chosen - shift) - logsigmoid(shift - beta * rejected)


def sppo_hard(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    return (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2


def aot(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float, shift: Tensor) -> Tensor:
    return _smoothed(beta * (chosen - rejected + shift), label_smoothing)


def apo_zero(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    return (-beta * chosen).sigmoid() + (beta * rejected).sigmoid()


def apo_down(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    return (beta * chosen).sigmoid() + (-beta * (chosen - rejected)).sigmoid()


def discopop(chosen: Tensor, rejected: Tensor, *, beta: float, discopop_tau: float) -> Tensor:
    logits = beta * (chosen - rejected)
    blend = (logits / discopop_tau).sigmoid()
    return (1 - blend) * softplus(-logits) + blend * (-logits).clamp(max=MOST).exp()


def orpo(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    return -beta * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(log_prob: Tensor) -> Tensor:
    """``log(p / (1 - p))``; p stops short of 1."""
    held = log_prob.clamp(max=-LEAST_LOSS)
    return held - (-torch.expm1(held)).log()


def simpo(
    chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float, simpo_gamma: float
) -> Tensor:
    return _smoothed(beta * (chosen - rejected) - simpo_gamma, label_smoothing)
