"""Advantage estimators that give each token of a rollout its own value.

A rollout's reward R is spread over its sampled tokens: with a KL in the reward each token has its own
penalty, and the last sampled token gets the rest of R. Observations (``loss_mask`` False
between sampled tokens) are not steps of the policy: recursions skip them, so they discount
nothing. (OpenRLHF does not skip them, which multiplies the future by
``(gamma lam)^k`` for k observation tokens; the two are equal only if gamma = lam = 1.)

``advantages`` describes the properties that all estimators share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine_core.algorithms.advantages import whiten

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.types import Batch


def gae(
    batch: Batch, *, gamma: float = 1.0, lam: float = 1.0, whiten_batch: bool = True
) -> dict[str, Tensor]:
    """Generalized advantage estimation, with the values of a critic.

    Formula: ``d_t = r_t + gamma V_{t+1} - V_t``, ``A_t = d_t + gamma lam A_{t+1}``, returns ``A + V``, then ``A = whiten(A)``
    Paper: https://arxiv.org/abs/1506.02438
    Differs: t + 1 is the next sampled token, so observations discount nothing (OpenRLHF: they do)

    Args:
        batch: ``values`` [T] of the critic at sampled tokens: the return expected before token t;
            ``rewards`` [B], ``valid`` [B], ``loss_mask`` [T], optionally ``kl_penalty`` [T].
        gamma: discount per token.
        lam: trace decay: 1 uses the whole return, 0 only the next value.
        whiten_batch: standardize A over the sampled tokens of the batch.

    Returns:
        ``advantages`` [T] and ``returns`` [T] (before whitening, the critic's target), float32;
        0 where no token was sampled.
    """
    rewards, counts = token_rewards(batch), sampled(batch)
    values = torch.where(counts, batch["values"].double(), 0.0)
    following = _following(values, counts, batch)
    advantages = discounted(rewards + gamma * following - values, counts, batch, gamma * lam)
    returns = torch.where(counts, advantages + values, 0.0)
    if whiten_batch:
        advantages = whiten(advantages, counts)
    return {"advantages": advantages.float(), "returns": returns.float()}


def reinforce(batch: Batch, *, gamma: float = 1.0) -> Tensor:
    """The rewards of a token and of those after it, without a baseline.

    Formula: ``A_t = G_t``, ``G_t = r_t + gamma G_{t+1}``
    Paper: https://doi.org/10.1007/BF00992696

    Args:
        batch: ``rewards`` [B], ``valid`` [B], ``loss_mask`` [T], optionally ``kl_penalty`` [T].
        gamma: discount per token.
    """
    return discounted(token_rewards(batch), sampled(batch), batch, gamma).float()


def sampled(batch: Batch) -> Tensor:
    """Return a mask of the tokens that the policy sampled in valid rollouts, [T] bool."""
    return batch["loss_mask"] & batch.to_tokens(batch["valid"])


def token_rewards(batch: Batch) -> Tensor:
    """Return the reward of each token, [T] float64; the sum over a rollout is its ``rewards``.

    If the batch has ``kl_penalty`` [T], each sampled token gets ``-kl_penalty``. The last sampled
    token also gets the rest of ``rewards`` [B], which is the reward before the KL was subtracted.
    """
    counts = sampled(batch)
    rewards = torch.where(batch["valid"], batch["rewards"].double(), 0.0)
    tokens = torch.zeros(batch.num_tokens, dtype=torch.float64)
    if "kl_penalty" in batch:
        tokens = torch.where(counts, -batch["kl_penalty"].double(), 0.0)
    missing = rewards - batch.sum_by_sequence(tokens)
    positions = torch.where(counts, torch.arange(batch.num_tokens), -1)
    last = torch.full((len(batch),), -1).scatter_reduce(0, batch.sequence_index, positions, "amax")
    ends = last >= 0
    return tokens.index_add(0, last[ends], missing[ends])


def discounted(rewards: Tensor, counts: Tensor, batch: Batch, factor: float) -> Tensor:
    """Return ``x_t = rewards_t + factor * x_{t+1}`` over the tokens that count, [T] float64; 0 elsewhere.

    Args:
        rewards: [T] float64.
        counts: [T] bool; t + 1 is the next such token of the same sequence.
        batch: gives the sequence of each token.
        factor: discount per token; 1 gives the plain sum of rewards from t on.
    """
    chosen = counts.nonzero().squeeze(1)
    sequence = batch.sequence_index[chosen].tolist()
    values = rewards[chosen].tolist()
    for t in range(len(values) - 2, -1, -1):  # plain floats are faster than a tensor operation each
        if sequence[t] == sequence[t + 1]:
            values[t] += factor * values[t + 1]
    return torch.zeros_like(rewards).index_put((chosen,), rewards.new_tensor(values))


def _following(values: Tensor, counts: Tensor, batch: Batch) -> Tensor:
    """Return the value at the next token of the sequence that counts, [T]; 0 after the last."""
    chosen = counts.nonzero().squeeze(1)
    sequence = batch.sequence_index[chosen]
    following = torch.zeros_like(values)
    same = sequence[:-1] == sequence[1:]
    following[chosen[:-1][same]] = values[chosen[1:][same]]
    return following
