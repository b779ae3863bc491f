"""What is known of a mini-batch of preferences before its update: who is compared with whom.

A pair is two sequences of one ``keep_together`` id, the chosen one before the rejected one. Everything
that compares a pair with others is made here, over the whole mini-batch and without gradient, and the
losses read it as a column.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine_core.types import Batch

if TYPE_CHECKING:
    from torch import Tensor


def response_log_probs(log_probs: Tensor, batch: Batch, normalise: bool = False) -> Tensor:
    """[T] -> [B]: the log-prob of each response, or its mean over the response's tokens."""
    mask = batch["loss_mask"]
    total = batch.sum_by_sequence(torch.where(mask, log_probs, torch.zeros_like(log_probs)))
    return total / batch.sum_by_sequence(mask.to(total.dtype)).clamp(min=1) if normalise else total


def log_ratios(log_probs: Tensor, batch: Batch, normalise: bool = False) -> Tensor:
    """[B]: ``log p(response) - log p_ref(response)``; without ``ref_log_probs`` the log-prob alone.

    With the column ``tail_weights`` each token counts by it.
    """
    own = response_log_probs(weighed(log_probs, batch), batch, normalise)
    if "ref_log_probs" not in batch:
        return own
    return own - response_log_probs(weighed(batch["ref_log_probs"], batch), batch, normalise)


def weighed(log_probs: Tensor, batch: Batch) -> Tensor:
    """[T]: log-probs times ``tail_weights``, where the batch has that column."""
    return log_probs * batch["tail_weights"] if "tail_weights" in batch else log_probs


def tail_weights(batch: Batch, alpha: float) -> Tensor:
    """LD-DPO: the tokens by which a response is longer than the other one of its pair count less.

    Formula: weight 1 for the first min(L_c, L_r) tokens of both responses, ``ld_alpha`` for those after them
    Paper: https://arxiv.org/abs/2409.06411
    Differs: in the policy and in the reference, so that at the reference every reward is 0

    The sum over a longer response is larger in size whatever it says, so a part of DPO's gradient is only about
    length.

    Args:
        batch: whole pairs.
        alpha: 1 is plain DPO, 0 leaves what is beyond the shorter response out.

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
    """WPO: each pair weighs as much as the current policy is likely to say its responses.

    Formula: ``min(1, exp(a_c + a_r))``, ``a = mean_t (log p_t - log sum_v p_t(v)^2)``, without gradient
    Paper: https://arxiv.org/abs/2406.11827

    a is 0 where tokens are as likely as those that the policy draws.

    Args:
        log_probs: [T].
        sum_pi_squared: [T].
        batch: whole pairs.

    Returns:
        [P], in the order of ``sides``.
    """
    mask, (better, worse) = batch["loss_mask"], sides(batch)
    squares = torch.where(mask, sum_pi_squared, torch.ones_like(sum_pi_squared)).log()
    aligned = response_log_probs((log_probs - squares).detach(), batch, normalise=True)
    return (aligned[better] + aligned[worse]).exp().clamp(max=1.0)


def sides(batch: Batch) -> tuple[Tensor, Tensor]:
    """Positions [P] of the chosen and of the rejected sequences, pair by pair.

    Raises:
        ValueError: a pair was split.
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


def order_shift(policy: Tensor, reference: Tensor) -> Tensor:
    """AOT: by how much a pair's margin is to be moved, so that margins of one rank are compared.

    ``policy margin - reference margin + shift`` is the policy's margin less the reference's margin of
    the same rank in the mini-batch. The order is that before the update, where the gradient is taken too.

    Args:
        policy: [P], ``log p(chosen) - log p(rejected)``.
        reference: [P], the same of the reference (0 where there is none).

    Returns:
        [P].
    """
    rank = torch.argsort(torch.argsort(policy, stable=True), stable=True)
    return reference - reference.sort().values[rank]


def rank_matched(batch: Batch, scores: Tensor) -> Batch:
    """AOT without pairs: the chosen response of each rank beside the rejected one of that rank.

    Args:
        batch: pairs.
        scores: [B], by which each side is ranked.

    Returns:
        The same sequences in new pairs.
    """
    better, worse = sides(batch)
    order = [side[torch.argsort(scores[side], stable=True)] for side in (better, worse)]
    matched = batch.select(torch.stack(order, dim=1).flatten())
    return dataclasses.replace(matched, keep_together=torch.arange(len(better)).repeat_interleave(2))


def mismatched(batch: Batch, max_tokens: int) -> Batch:
    """KTO: each prompt with the response of the sequence before it (the first with the last's).

    Args:
        batch: sequences whose responses are the tokens from the first loss token on.
        max_tokens: a longer sequence is cut: a long prompt and a long response may have more positions than the model.

    Returns:
        As many sequences, with the column ``loss_mask``.
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
    """(ids, mask) of the prompt and of the response of sequence ``i``."""
    i %= len(batch)
    part = slice(ends[i], ends[i + 1])
    ids, mask = batch.token_ids[part], batch["loss_mask"][part]
    first = int(mask.int().argmax())
    return (ids[:first], mask[:first]), (ids[first:], mask[first:])
