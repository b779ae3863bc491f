"""Rotary positions of a rank's part of a pack, which may begin in the middle of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn


@dataclass
class Stretch(PackedSeqParams):
    """A rank's part of a pack whose tokens several ranks share (`cp`).

    ``cu_seqlens_q`` holds the boundaries of the whole pack's sequences, for attention. ``cu_seqlens_q_padded``, which
    megatron-core's rotary embedding prefers, describes the part as one sequence.
    """

    positions: Tensor | None = None  # [T / cp] each token's position in its sequence


class StretchRotary(nn.Module):
    """A rotary embedding of given positions; those of megatron-core's ``RotaryEmbedding`` begin at 0 in each sequence.

    Args:
        inverse_frequencies: [dim / 2].
    """

    def __init__(self, inverse_frequencies: Tensor) -> None:
        super().__init__()
        self.inv_freq = inverse_frequencies  # moved at its first use; like megatron-core's, not a buffer

    def get_rotary_seq_len(self, *of: Any, **named: Any) -> Tensor:
        """Return the positions [T / cp] of this rank's tokens, which the model passes to ``forward``."""
        stretch = next(value for value in (*of, *named.values()) if isinstance(value, Stretch))
        assert stretch.positions is not None
        return stretch.positions

    def forward(self, positions: Tensor, **_: Any) -> Tensor:
        """Return the angles [n, 1, 1, dim] of positions [n]."""
        self.inv_freq = self.inv_freq.to(positions.device)
        angles = torch.outer(positions.float(), self.inv_freq)
        return torch.cat([angles, angles], dim=-1)[:, None, None]
