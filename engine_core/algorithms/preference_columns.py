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
    """[B]: ``log p(response) - log p_ref(response)``; without ``ref_log_probs`` the log-prob alone."""
    own = response_log_probs(log_probs, batch, normalise)
    if "ref_log_probs" not in batch:
        return own
    return own - response_log_probs(batch["ref_log_probs"], batch, normalise)


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


def mismatched(batch: Batch) -> Batch:
    """KTO: each prompt with the response of the sequence before it (the first with the last's).

    Args:
        batch: sequences whose responses are the tokens from the first loss token on.

    Returns:
        As many sequences, with the column ``loss_mask``.
    """
    ends = batch.offsets.tolist()
    parts: list[tuple[Tensor, Tensor]] = []
    for i in range(len(batch)):
        (prompt, _), (_, response) = _split(batch, ends, i), _split(batch, ends, i - 1)
        parts.append((torch.cat([prompt[0], response[0]]), torch.cat([prompt[1], response[1]])))
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
