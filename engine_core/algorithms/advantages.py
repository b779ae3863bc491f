"""Advantage estimators: ``f(batch, **options) -> [T] float32``.

An estimator is a formula: it sees the typed batch (rewards, groups, masks, and the columns that it
declares to need) and returns how much better each token was than expected. In all estimators:

* a rollout that is not ``valid`` is in no statistic and gets 0;
* a token outside ``loss_mask`` gets 0;
* a group of one valid rollout has no comparison and gets 0;
* rewards that are all equal give 0 if the baseline is their mean.

The estimators of this module give a whole rollout one value, computed from the rewards of its group or batch. Those
that give each token its own value are in ``advantages_tokens``.

In formulas R is the reward, n the number of valid rollouts of the group; mean and std (n - 1) are over them. The
tables of docs/algorithms.md are generated from the first paragraph, ``Formula``, ``Paper`` and ``Differs`` of each
docstring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from engine_core.types import BRANCH

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.types import Batch

EPSILON = 1e-6
"""Added to a standard deviation that is a divisor."""


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


def grpo(batch: Batch, *, normalize_by_std: bool = True, epsilon: float = EPSILON) -> Tensor:
    """Group-relative advantage.

    Formula: ``A = (R - mean) / (std + epsilon)``
    Paper: https://arxiv.org/abs/2402.03300
    Differs: a group of one gets 0 (verl: its raw reward); `epsilon` is 1e-6 (1e-9 in OpenRLHF, 1e-4 in TRL)

    Args:
        batch: columns ``rewards`` [B], ``group_ids`` [B] (any ids, any order), ``valid`` [B],
            ``loss_mask`` [T].
        normalize_by_std: False gives only the numerator, which is ``dr_grpo``.
        epsilon: added to the divisor, which is near 0 if the rewards of a group hardly differ.

    Returns:
        [T] float32: the rollout's value on its sampled tokens, 0 elsewhere.
    """
    rewards = batch["rewards"].double()
    values, compared = standardized(rewards, batch, batch["valid"], normalize_by_std, epsilon)
    return on_tokens(batch, values, compared)


def dr_grpo(batch: Batch) -> Tensor:
    """GRPO without the division by std, which favors groups with a small spread.

    Formula: ``A = R - mean``
    Paper: https://arxiv.org/abs/2503.20783
    Differs: the constant divisor of the loss is a separate setting: `loss_aggregation = "seq-mean-token-sum-norm"`

    Args:
        batch: as for ``grpo``.

    Returns:
        [T] float32.
    """
    return grpo(batch, normalize_by_std=False)


def rloo(batch: Batch) -> Tensor:
    """The mean of the other rollouts of the group as baseline (leave one out).

    Formula: ``A = n / (n - 1) (R - mean)``
    Paper: https://arxiv.org/abs/2402.14740
    Differs: a group of one gets 0 (verl's `rloo`: its raw reward; its `rloo_vectorized`: 0)

    Args:
        batch: as for ``grpo``.

    Returns:
        [T] float32.
    """
    rewards, valid = batch["rewards"].double(), batch["valid"]
    mean, _, count = group_statistics(rewards, batch["group_ids"], valid)
    return on_tokens(batch, (rewards - mean) * count / (count - 1).clamp(min=1), valid & (count > 1))


def batch_mean(batch: Batch) -> Tensor:
    """The mean of the whole batch as baseline; needs no groups (OpenRLHF's FlashREINFORCE).

    Formula: ``A = R - mean(all R of the batch)``
    Paper: https://github.com/OpenRLHF/OpenRLHF

    Args:
        batch: ``rewards`` [B], ``valid`` [B], ``loss_mask`` [T].
    """
    rewards, valid = batch["rewards"].double(), batch["valid"]
    mean = torch.where(valid, rewards, 0.0).sum() / valid.sum().clamp(min=1)
    return on_tokens(batch, rewards - mean, valid)


def on_tokens(batch: Batch, values: Tensor, counts: Tensor) -> Tensor:
    """Spread values [B] over tokens: [T] float32, 0 outside ``loss_mask`` and where ``counts`` [B] is False."""
    held = torch.where(counts, values, torch.zeros_like(values))  # a value that does not count may be NaN
    return batch.to_tokens(held.float()).mul_(batch["loss_mask"].float())  # in place: faster than new memory


def whiten(values: Tensor, counts: Tensor) -> Tensor:
    """Return ``(x - mean) / sqrt(var + 1e-8)`` over the values that count (variance with n - 1); 0 elsewhere.

    Args:
        values: [B] or [T].
        counts: bool, the same shape. If fewer than two values count, the result is 0 everywhere.
    """
    number = counts.sum()
    if number < 2:
        return torch.zeros_like(values)
    mean = torch.where(counts, values, 0.0).sum() / number
    centred = torch.where(counts, values - mean, 0.0)
    return centred / (centred.square().sum() / (number - 1) + 1e-8).sqrt()


def group_statistics(values: Tensor, group_ids: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, sample standard deviation and count of each rollout's group, over its valid members.

    Args:
        values: [B] float.
        group_ids: [B] int.
        valid: [B] bool; members that count.

    Returns:
        Three [B] tensors with the value of the group at each member; the deviation is 0 with fewer than two members.
    """
    names, group = torch.unique(group_ids, return_inverse=True)
    size = len(names)
    lowest = values.new_full((size,), torch.inf)
    lowest = lowest.scatter_reduce(0, group, torch.where(valid, values, torch.inf), "amin")[group]
    above = torch.where(valid, values - lowest, torch.zeros_like(values))  # equal values: exactly 0
    count = values.new_zeros(size).index_add(0, group, valid.to(values.dtype))
    offset = values.new_zeros(size).index_add(0, group, above) / count.clamp(min=1)
    squares = torch.where(valid, (above - offset[group]) ** 2, torch.zeros_like(values))
    variance = values.new_zeros(size).index_add(0, group, squares) / (count - 1).clamp(min=1)
    mean = torch.where(count[group] > 0, lowest + offset[group], torch.zeros_like(values))
    return mean, variance.sqrt()[group], count[group]


def standardized(
    values: Tensor, batch: Batch, counts: Tensor, divide: bool, epsilon: float = EPSILON
) -> tuple[Tensor, Tensor]:
    """Return values [B] relative to their group [B], and whether each had a comparison [B] bool.

    Args:
        values: [B] float.
        batch: with ``group_ids`` [B].
        counts: [B] bool; the values that are in the statistics.
        divide: also divide by the deviation and ``epsilon``.
        epsilon: added to the deviation.
    """
    mean, std, number = group_statistics(values, batch["group_ids"], counts)
    centred = values - mean
    return centred / (std + epsilon) if divide else centred, counts & (number > 1)
