"""Trials of a model on a few tokens: whether it keeps packed sequences apart, whether a head is its own.

Rounding differs with kernel and shape, and grows with depth: two ways to compute one thing in bfloat16 are several
percent apart in a model of 8B weights. So what is judged finely is compared between runs of the same kernels on the
same shapes, where rounding is the same, and what differs by kernel is judged coarsely.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FIRST, SECOND = 8, 4
SAME, ALIKE = 0.03, 0.2  # of the root mean square: the same kernels, other kernels


def probe_ids(vocabulary: int, device: torch.device, other: bool = False) -> Tensor:
    """[12] token ids of two sequences; with ``other`` the first sequence is another one."""
    ids = torch.arange(1, FIRST + SECOND + 1, device=device)
    if other:
        ids[:FIRST] = ids[:FIRST].flip(0) + FIRST + SECOND
    return ids % vocabulary


def probe_lengths() -> Tensor:
    """[2] tokens of the two sequences, in host memory."""
    return torch.tensor([FIRST, SECOND])


def keeps_apart(pack: Callable[[Tensor], Tensor], alone: Tensor, vocabulary: int, same: float = SAME) -> bool:
    """Whether the second sequence of a pack is what it is alone, whatever stands before it.

    Args:
        pack: the model over ids [12] of two packed sequences, [12, ...].
        alone: [4, ...] of the second alone, by kernels that know of one sequence only.
        same: what the sequence before may change: ``ALIKE`` where a token is rounded by a scale of the whole pack.
    """
    first, other = (pack(probe_ids(vocabulary, alone.device, other))[FIRST:] for other in (False, True))
    return differs_by(other, first) <= same and differs_by(first, alone) <= ALIKE


def differs_by(found: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference, as a share of that of ``expected``; inf where it is not a number."""
    found, expected = found.float(), expected.float()
    share = float((found - expected).norm() / expected.norm().clamp_min(torch.finfo(torch.float32).tiny))
    return share if share == share else float("inf")
