"""From token losses to one number, the same on any split into micro-batches and ranks.

The weights are computed once over the global mini-batch and travel as a column; a loss is then the
plain sum of weight times token loss. With m the loss mask, T its sum, B the number of sequences that
have a loss token and L_i the loss tokens of sequence i, the weight of a token is

======================= ============= =================================================================
mode                    formula       paper
======================= ============= =================================================================
token-mean              ``m / T``     DAPO, arXiv:2503.14476
token-sum               ``m``
seq-mean-token-sum      ``m / B``
seq-mean-token-mean     ``m/(L_i B)`` GRPO, arXiv:2402.03300
seq-mean-token-sum-norm ``m / (L B)`` Dr.GRPO, arXiv:2503.20783
======================= ============= =================================================================

Differs (seq-mean-token-sum-norm): L is a constant (verl divides by the padded length unless told otherwise, which changes with padding)
Differs (token-mean): T is of the whole mini-batch over all ranks, never of a micro-batch
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine_core.types import counted

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.types import Batch


def with_weights(batch: Batch, mode: str, length_norm: int = 1) -> Batch:
    """Add each token's share of the aggregated loss: see the table above.

    Args:
        batch: the whole mini-batch, all ranks.
        mode: one of the five names.
        length_norm: L of seq-mean-token-sum-norm, in tokens.

    Returns:
        The batch with ``weights`` [T] and ``token_share`` [T] (``m / T``, for metrics); all 0 where
        no token has loss.
    """
    mask = batch["loss_mask"].to(torch.float32, copy=True)
    per_sequence = counted(batch["loss_mask"].bool(), batch.lengths).float()
    num_tokens = mask.sum().clamp(min=1)
    num_sequences = (per_sequence > 0).sum().clamp(min=1)
    weights = mask * _weight(mode, batch, per_sequence, num_tokens, num_sequences, length_norm)
    # in place: memory for one more column of 4 bytes a token takes longer than dividing it
    return batch.with_columns(tokens={"weights": weights, "token_share": mask.div_(num_tokens)})


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
