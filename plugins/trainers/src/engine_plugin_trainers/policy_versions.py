"""The policy versions of sampled tokens, stored as runs of equal versions.

A response has few runs, so its tokens are scanned only once, to find where runs end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from engine_core.types import Rollout


class VersionRuns(NamedTuple):
    """The S runs of consecutive sampled tokens of one version, in the order of their rollouts.

    Example: a response whose last two of five tokens came after new weights has two runs,
    ``versions = [3, 4], counts = [3, 2], of = [0, 0]``.
    """

    versions: NDArray[np.int32]  # [S] int32
    counts: NDArray[np.int64]  # [S] int64, tokens
    of: NDArray[np.int64]  # [S] int64, ascending: index of the rollout

    def oldest(self) -> dict[int, int]:
        """Return the lowest version of each rollout that has a sampled token, by index of the rollout."""
        places, lowest, _ = self._by_rollout()
        return dict(zip(places.tolist(), lowest.tolist(), strict=True))

    def counted(self) -> list[tuple[int, int]]:
        """Return version and number of tokens of each run, in order."""
        return list(zip(self.versions.tolist(), self.counts.tolist(), strict=True))

    def mixed(self) -> int:
        """Return the number of rollouts with sampled tokens of more than one version."""
        _, lowest, highest = self._by_rollout()
        return int(np.count_nonzero(lowest != highest))

    def _by_rollout(self) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
        """Return index, lowest and highest version of each rollout that has a run."""
        places, first = np.unique(self.of, return_index=True)
        if not len(places):
            return places, self.versions, self.versions
        lowest = np.minimum.reduceat(self.versions, first)
        return places, lowest, np.maximum.reduceat(self.versions, first)


def joined(rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
    """Return ``loss_mask`` and ``policy_versions`` [T] of the concatenated rollouts; {} if there are none."""
    names = ("loss_mask", "policy_versions") if rollouts else ()
    return {name: torch.cat([getattr(rollout, name) for rollout in rollouts]) for name in names}


def version_runs(rollouts: Sequence[Rollout], columns: Mapping[str, Tensor] | None = None) -> VersionRuns:
    """Return the version runs of the rollouts.

    Args:
        rollouts: T tokens in all.
        columns: the [T] columns of ``joined`` for these rollouts, if already built.
    """
    if not rollouts:
        return VersionRuns(np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int64))
    columns = columns or joined(rollouts)
    lengths = np.array([rollout.loss_mask.numel() for rollout in rollouts])
    versions = columns["policy_versions"].cpu().numpy()  # [T]
    sampled = columns["loss_mask"].cpu().numpy()  # [T] bool
    # [T] True where the version or the mask changes
    begins = np.empty(len(versions), dtype=bool)
    np.not_equal(versions[1:], versions[:-1], out=begins[1:])
    begins[1:] |= sampled[1:] != sampled[:-1]
    ends = lengths.cumsum()
    begins[(ends - lengths)[lengths > 0]] = True
    first = begins.nonzero()[0]
    counts = np.diff(first, append=len(versions))
    kept = sampled[first]
    of = np.searchsorted(ends, first, side="right")
    return VersionRuns(versions[first][kept], counts[kept], of[kept])
