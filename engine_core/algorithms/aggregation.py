"""From token losses to one number, the same on any split into micro-batches and ranks.

The weights are computed once over the global mini-batch and travel as a column; a loss is then the
plain sum of weight times token loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.types import Batch


def with_weights(batch: Batch, mode: str, length_norm: int = 1) -> Batch:
    """Add each token's share of the aggregated loss.

    With m the loss mask, T its sum, B the number of sequences that have a loss token and L_i the
    loss tokens of sequence i: token-mean ``m / T``; token-sum ``m``; seq-mean-token-sum ``m / B``;
    seq-mean-token-mean ``m / (L_i B)``; seq-mean-token-sum-norm ``m / (L B)`` with a constant L
    (Dr.GRPO, https://arxiv.org/abs/2503.20783; verl divides by the padded length unless told
    otherwise, which changes with padding).

    Args:
        batch: the whole mini-batch, all ranks.
        mode: one of the five names.
        length_norm: L of seq-mean-token-sum-norm, in tokens.

    Returns:
        The batch with ``weights`` [T] and ``token_share`` [T] (``m / T``, for metrics); all 0 where
        no token has loss.
    """
    mask = batch["loss_mask"].float()
    per_sequence = batch.sum_by_sequence(mask)
    num_tokens = mask.sum().clamp(min=1)
    num_sequences = (per_sequence > 0).sum().clamp(min=1)
    weights = mask * _weight(mode, batch, per_sequence, num_tokens, num_sequences, length_norm)
    return batch.with_columns(tokens={"weights": weights, "token_share": mask / num_tokens})


def _weight(
    mode: str, batch: Batch, per_sequence: Tensor, num_tokens: Tensor, num_sequences: Tensor, length_norm: int
) -> Tensor:
    if mode == "token-mean":
        return 1 / num_tokens
    if mode == "token-sum":
        return torch.ones(())
    if mode == "seq-mean-token-sum":
        return 1 / num_sequences
    if mode == "seq-mean-token-mean":
        return batch.to_tokens(1 / (per_sequence.clamp(min=1) * num_sequences))
    if mode == "seq-mean-token-sum-norm":
        return 1 / (length_norm * num_sequences)
    raise ValueError(f"Unknown loss aggregation '{mode}'.")
