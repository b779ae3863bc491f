"""Tests of a model on a few tokens: whether it keeps packed sequences separate, and whether a head is its own.

Rounding differs between kernels and shapes and grows with depth: two ways to compute the same value in bfloat16 differ
by several percent in a model of 8B weights. The strict tests therefore compare runs of the same kernels on the same
shapes, where rounding is the same. Comparisons between kernels have a loose tolerance.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FIRST, SECOND = 8, 4
SAME, ALIKE = 0.03, 0.2  # tolerance, relative to the root mean square: same kernels, different kernels


def probe_ids(vocabulary: int, device: torch.device, other: bool = False) -> Tensor:
    """Return token ids [12] of two sequences; ``other`` replaces the first sequence by a different one."""
    ids = torch.arange(1, FIRST + SECOND + 1, device=device)
    if other:
        ids[:FIRST] = ids[:FIRST].flip(0) + FIRST + SECOND
    return ids % vocabulary


def probe_lengths() -> Tensor:
    """Return the lengths [2] of the two sequences, in host memory."""
    return torch.tensor([FIRST, SECOND])


def keeps_apart(pack: Callable[[Tensor], Tensor], alone: Tensor, vocabulary: int, same: float = SAME) -> bool:
    """Return whether the second sequence of a pack has the same result alone and after different first sequences.

    Args:
        pack: runs the model on ids [12] of two packed sequences and returns [12, ...].
        alone: [4, ...] result of the second sequence alone, from kernels for a single sequence.
        vocabulary: size of the vocabulary.
        same: tolerance between different first sequences: ``ALIKE`` if tokens are rounded by a scale of the whole pack.
    """
    first, other = (pack(probe_ids(vocabulary, alone.device, other))[FIRST:] for other in (False, True))
    return differs_by(other, first) <= same and differs_by(first, alone) <= ALIKE


def differs_by(found: Tensor, expected: Tensor) -> float:
    """Return the root mean square of the difference, relative to that of ``expected``; inf if it is NaN.

    Both tensors have the same shape ``[N, ...]``.
    """
    found, expected = found.float(), expected.float()
    share = float((found - expected).norm() / expected.norm().clamp_min(torch.finfo(torch.float32).tiny))
    return share if share == share else float("inf")
