"""Advantages of episodes with several sequences, which share one reward (``Rollout.branches``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from engine_core.types import BRANCH

if TYPE_CHECKING:
    from engine_core.types import Batch


def advantages_of(estimator: Callable[..., Any], batch: Batch, options: Mapping[str, Any]) -> Any:
    """Return the result of an advantage estimator, in whose statistics each episode counts once.

    An estimator that gives a whole sequence one value sees no branches of episodes; their tokens get the value of the
    episode's own sequence. An estimator that gives each token its value sees all sequences.

    Args:
        estimator: the function.
        batch: B sequences; with ``branch`` [B] bool, branches follow their episode's sequence.
        options: arguments of the estimator.
    """
    if BRANCH not in batch:
        return estimator(batch, **options)
    own = ~batch[BRANCH]
    episodes = batch.select(own.nonzero().flatten())
    made = estimator(episodes, **options)
    if not isinstance(made, torch.Tensor) or made.shape != (episodes.num_tokens,):
        return estimator(batch, **options)
    values, mask = made.new_zeros(len(episodes)), episodes["loss_mask"]
    values[episodes.sequence_index[mask]] = made[mask]  # any token of a sequence: all are compared with it
    if not torch.equal(episodes.to_tokens(values)[mask], made[mask]):
        return estimator(batch, **options)
    return batch.to_tokens(values[own.cumsum(0) - 1]) * batch["loss_mask"]
