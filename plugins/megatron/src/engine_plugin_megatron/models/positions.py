"""Rotary positions of a stretch of a pack, which may begin in the midst of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn


@dataclass
class Stretch(PackedSeqParams):
    """What a rank has of a pack whose tokens it shares.

    ``cu_seqlens_q`` bounds the sequences of the whole pack, which attention sees; ``cu_seqlens_q_padded``, which megatron-core's
    rotary embedding reads first, is the stretch as one sequence.
    """

    positions: Tensor | None = None  # [tokens of the stretch] each one's place in its sequence


class StretchRotary(nn.Module):
    """In the place of megatron-core's ``RotaryEmbedding``, whose positions begin at 0 in each sequence.

    Args:
        inverse_frequencies: [dim / 2].
    """

    def __init__(self, inverse_frequencies: Tensor) -> None:
        super().__init__()
        self.inv_freq = inverse_frequencies  # moved at its first use; no buffer, as megatron-core's is none

    def get_rotary_seq_len(self, *of: Any, **named: Any) -> Tensor:
        """The positions of a stretch: what the model gives on to ``forward``."""
        stretch = next(value for value in (*of, *named.values()) if isinstance(value, Stretch))
        assert stretch.positions is not None
        return stretch.positions

    def forward(self, positions: Tensor, **_: Any) -> Tensor:
        """[n] to [n, 1, 1, dim] angles."""
        self.inv_freq = self.inv_freq.to(positions.device)
        angles = torch.outer(positions.float(), self.inv_freq)
        return torch.cat([angles, angles], dim=-1)[:, None, None]
