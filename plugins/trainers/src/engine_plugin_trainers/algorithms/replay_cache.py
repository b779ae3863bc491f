"""Experience replay: a stage that stores groups of rollouts and replays them in later steps."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from engine_core.metrics import Max, Sum
from engine_core.train.rollouts import groups_of
from engine_core.types import StageState

if TYPE_CHECKING:
    from engine_core.types import Rollout

Group = Sequence["Rollout"]


class ReplayCache:
    """A stage that replays whole groups of earlier steps with the log-probs of the policy that sampled them.

    Formula: n new groups are joined by ``round(n share / (1 - share))`` drawn without replacement from the newest `size` groups of at most `max_staleness` policy versions ago
    Paper: https://arxiv.org/abs/2506.09340
    Differs: groups of any prompt (RePO: of the step's prompts), each with separate advantages; weighted by the correction, not by a clipped ratio to the sampler

    A step draws from the groups that earlier steps stored and then stores its own groups, as they reach this stage. New
    and old groups alternate evenly in the batch, so that each mini-batch has its share of both. All groups get new ids.

    Args:
        share: share of replayed groups in the batch, under 1.
        size: most groups that are stored; the oldest are dropped first.
        max_staleness: most policy versions (weight updates that the sampler has seen) between the oldest token of a
            group and the newest token of the step; an older group is dropped.
        seed: seed of the draw, to which the step is added.
    """

    def __init__(self, *, share: float = 0.5, size: int = 256, max_staleness: int = 8, seed: int = 0) -> None:
        self.share, self.size, self.max_staleness, self.seed = share, size, max_staleness, seed
        self.groups: list[Group] = []  # oldest first
        self.stored = 0  # groups stored so far: number of the next one

    def __call__(self, rollouts: list[Rollout], step: int) -> tuple[list[Rollout], dict[str, float]]:
        """Return new and replayed groups, and metrics.

        Args:
            rollouts: rollouts of this step; they are not changed, and the cache shares only their tensors.
            step: number of the step, which seeds the draw together with ``seed``.

        Returns:
            The rollouts, and metrics. Of the batch: ``share`` of replayed rollouts, their ``age_mean`` and ``age_max``
            in policy versions. Of the cache: ``size`` in groups, and ``too_old``, the groups dropped now for their age.
        """
        fresh = groups_of(rollouts)
        versions = [version for group in fresh for version in _versions(group)]
        newest = max(versions, default=0)
        too_old = self._forget(newest) if versions else 0
        old = self._draw(len(fresh), step) if versions else []
        batch = _numbered(_alternating(fresh, old))
        self._store(fresh)
        metrics = {
            "share": sum(map(len, old)) / max(len(batch), 1),
            "size": float(len(self.groups)),
            "too_old": Sum(too_old),
        }
        if ages := [newest - min(_versions([r])) for group in old for r in group if _versions([r])]:
            metrics |= {"age_mean": sum(ages) / len(ages), "age_max": Max(max(ages))}
        return batch, metrics

    def state(self) -> StageState:
        """Return the contents of the cache; nothing in the result changes later."""
        return StageState({"stored": self.stored}, list(itertools.chain.from_iterable(self.groups)))

    def load_state(self, state: StageState) -> None:
        """Restore the result of ``state``; of a larger cache, the newest groups."""
        self.stored = int(state.values["stored"])
        self.groups = list(groups_of(state.rollouts)[-self.size :])

    def _forget(self, newest: int) -> int:
        """Drop groups that are more than ``max_staleness`` versions older than ``newest``; return their number."""
        kept = [group for group in self.groups if newest - min(_versions(group)) <= self.max_staleness]
        gone, self.groups = len(self.groups) - len(kept), kept
        return gone

    def _draw(self, fresh: int, step: int) -> list[Group]:
        """Draw the groups to replay with ``fresh`` new ones; return them oldest first."""
        wanted = min(int(fresh * self.share / (1 - self.share) + 0.5), len(self.groups))
        drawn = random.Random(f"{self.seed}:{step}").sample(range(len(self.groups)), wanted)
        return [self.groups[i] for i in sorted(drawn)]

    def _store(self, groups: Sequence[Group]) -> None:
        """Store copies of the groups under new ids; a group without a sampled token is not stored."""
        for group in groups:
            if _versions(group):
                number = self.stored
                self.groups.append(tuple(_copy(rollout, number) for rollout in group))
                self.stored += 1
        del self.groups[: -self.size]


def _versions(group: Iterable[Rollout]) -> list[int]:
    """Return lowest and highest policy version of the sampled tokens of each rollout that has sampled tokens."""
    sampled = [rollout.policy_versions[rollout.loss_mask] for rollout in group]
    return [int(version) for held in sampled if len(held) for version in (held.min(), held.max())]


def _alternating(fresh: Sequence[Group], old: Sequence[Group]) -> list[Group]:
    """Interleave both lists evenly, each in its own order; a new group comes first."""
    placed = [
        ((i + 0.5) / len(held), groups, group)
        for groups, held in enumerate((fresh, old))
        for i, group in enumerate(held)
    ]
    return [group for _, _, group in sorted(placed, key=lambda entry: entry[:2])]


def _numbered(groups: Sequence[Group]) -> list[Rollout]:
    """Return copies of the rollouts with group ids from 0."""
    return [_copy(rollout, number) for number, group in enumerate(groups) for rollout in group]


def _copy(rollout: Rollout, group_id: int) -> Rollout:
    """Return a copy that shares the tensors but neither rewards nor extras, which later stages may change."""
    return dataclasses.replace(
        rollout, group_id=group_id, rewards=dict(rollout.rewards), extras=dict(rollout.extras)
    )
