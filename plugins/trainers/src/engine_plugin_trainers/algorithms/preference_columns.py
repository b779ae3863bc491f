"""Columns of a mini-batch of preferences that are computed before its update.

A pair is two sequences with one ``keep_together`` id, the chosen one before the rejected one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine_core.types import Batch

if TYPE_CHECKING:
    from torch import Tensor


def response_log_probs(log_probs: Tensor, batch: Batch, normalise: bool = False) -> Tensor:
    """Return the log-prob [B] of each response from ``log_probs`` [T]; ``normalise``: the mean over its tokens."""
    mask = batch["loss_mask"]
    total = batch.sum_by_sequence(torch.where(mask, log_probs, torch.zeros_like(log_probs)))
    return total / batch.sum_by_sequence(mask.to(total.dtype)).clamp(min=1) if normalise else total


def log_ratios(log_probs: Tensor, batch: Batch, normalise: bool = False) -> Tensor:
    """Return ``log p(response) - log p_ref(response)`` [B]; without ``ref_log_probs`` the log-prob alone.

    The column ``tail_weights`` [T], if present, weights the tokens.
    """
    own = response_log_probs(weighed(log_probs, batch), batch, normalise)
    if "ref_log_probs" not in batch:
        return own
    return own - response_log_probs(weighed(batch["ref_log_probs"], batch), batch, normalise)


def weighed(log_probs: Tensor, batch: Batch) -> Tensor:
    """Return log-probs [T] times ``tail_weights`` [T], if the batch has that column."""
    return log_probs * batch["tail_weights"] if "tail_weights" in batch else log_probs


def tail_weights(batch: Batch, alpha: float) -> Tensor:
    """Return LD-DPO's token weights: tokens beyond the length of the pair's shorter response count less.

    Formula: weight 1 for the first min(L_c, L_r) tokens of both responses, ``ld_alpha`` for those after them
    Paper: https://arxiv.org/abs/2409.06411
    Differs: applied to the policy and the reference, so that at the reference every reward is 0

    The sum over a longer response has a larger magnitude whatever its content, so part of DPO's gradient depends on
    length only.

    Args:
        batch: whole pairs.
        alpha: weight of those tokens; 1 is plain DPO, 0 ignores them.

    Returns:
        [T] float32.
    """
    mask, (better, worse) = batch["loss_mask"], sides(batch)
    lengths = batch.sum_by_sequence(mask.long())
    shorter = torch.empty_like(lengths)
    shorter[better] = shorter[worse] = torch.minimum(lengths[better], lengths[worse])
    before = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)[:-1]])  # loss tokens of earlier sequences
    number = mask.long().cumsum(0) - batch.to_tokens(before)  # of a loss token within its response, from 1
    return torch.where(number <= batch.to_tokens(shorter), 1.0, alpha)


def policy_weights(log_probs: Tensor, sum_pi_squared: Tensor, batch: Batch) -> Tensor:
    """Return WPO's weights of pairs: how likely the current policy is to sample the pair's responses.

    Formula: ``min(1, exp(a_c + a_r))``, ``a = mean_t (log p_t - log sum_v p_t(v)^2)``, without gradient
    Paper: https://arxiv.org/abs/2406.11827

    a is 0 if tokens are as likely as those that the policy samples.

    Args:
        log_probs: [T] of the current policy.
        sum_pi_squared: [T], the sum of the squared probabilities of the vocabulary.
        batch: whole pairs.

    Returns:
        [P], in the order of ``sides``.
    """
    mask, (better, worse) = batch["loss_mask"], sides(batch)
    squares = torch.where(mask, sum_pi_squared, torch.ones_like(sum_pi_squared)).log()
    aligned = response_log_probs((log_probs - squares).detach(), batch, normalise=True)
    return (aligned[better] + aligned[worse]).exp().clamp(max=1.0)


def sides(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the positions [P] of the chosen and of the rejected sequences, pair by pair.

    Raises:
        ValueError: a pair was split between micro-batches.
    """
    chosen, together = batch["chosen"], batch.keep_together
    better, worse = chosen.nonzero().flatten(), (~chosen).nonzero().flatten()
    if together is None or not torch.equal(together[better], together[worse]):
        raise ValueError("A pair was split: sequences of one keep_together id must stay in one micro-batch.")
    return better, worse


def with_shares(batch: Batch) -> Batch:
    """Add the weights of a mini-batch of pairs.

    Returns:
        The batch with ``pair_share`` [B] (1 / P at both sequences of a pair), and ``weights`` and
        ``token_share`` [T], each chosen token's share of all chosen tokens (0 at the rejected ones).
    """
    chosen = (batch["loss_mask"] & batch.to_tokens(batch["chosen"])).float()
    share = chosen / chosen.sum().clamp(min=1)
    each = torch.full((len(batch),), 1 / max(len(batch) // 2, 1))
    return batch.with_columns(tokens={"weights": share, "token_share": share}, sequences={"pair_share": each})


def mismatched(batch: Batch, max_tokens: int) -> Batch:
    """Combine each prompt with the response of the previous sequence (the first with the last's), for KTO's z.

    Args:
        batch: sequences whose responses begin at the first loss token.
        max_tokens: limit to which longer sequences are cut, because prompt and response together may exceed the model's
            positions.

    Returns:
        As many sequences, with the column ``loss_mask`` [T].
    """
    ends = batch.offsets.tolist()
    parts: list[tuple[Tensor, Tensor]] = []
    for i in range(len(batch)):
        (prompt, _), (_, response) = _split(batch, ends, i), _split(batch, ends, i - 1)
        ids, mask = (torch.cat([prompt[k], response[k]])[:max_tokens] for k in (0, 1))
        parts.append((ids, mask))
    return Batch(
        token_ids=torch.cat([ids for ids, _ in parts]),
        lengths=torch.tensor([len(ids) for ids, _ in parts], dtype=torch.int64),
        tokens={"loss_mask": torch.cat([mask for _, mask in parts])},
    )


def _split(batch: Batch, ends: Sequence[int], i: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return (ids, mask) of the prompt and of the response of sequence ``i``, each 1-D."""
    i %= len(batch)
    part = slice(ends[i], ends[i + 1])
    ids, mask = batch.token_ids[part], batch["loss_mask"][part]
    first = int(mask.int().argmax())
    return (ids[:first], mask[:first]), (ids[first:], mask[first:])
