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
    values, compared = _standardized(rewards, batch, batch["valid"], normalize_by_std, epsilon)
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


def gdpo(batch: Batch, *, whiten_batch: bool = True) -> Tensor:
    """Each reward is normalized within its group before the sum, so that no reward dominates the others.

    Formula: ``A = whiten(sum_k w_k (R_k - mean_k) / (std_k + 1e-6))`` over the rewards k, whitened over the batch's rollouts
    Paper: https://arxiv.org/abs/2601.05242
    Differs: a reward that does not apply to a rollout is left out of its group's statistics and adds nothing

    Args:
        batch: ``reward_term/NAME`` [B], the clipped value of each reward with a weight (NaN where it
            does not apply), and ``reward_weight/NAME`` [B]; ``group_ids`` [B], ``valid`` [B], ``loss_mask`` [T].
        whiten_batch: also standardize over the rollouts of the batch.
    """
    total = torch.zeros(len(batch), dtype=torch.float64)
    compared = torch.zeros(len(batch), dtype=torch.bool)
    for column in [name for name in batch.sequences if name.startswith("reward_term/")]:
        term = batch[column].double()
        applies = batch["valid"] & term.isfinite()
        values, here = _standardized(term.nan_to_num(), batch, applies, divide=True)
        weight = batch[column.replace("reward_term/", "reward_weight/")].double()
        total += torch.where(here, weight * values, 0.0)
        compared |= here
    return on_tokens(batch, whiten(total, compared) if whiten_batch else total, compared)


def grpo_passk(batch: Batch, *, normalize_by_std: bool = True) -> Tensor:
    """Only the best rollout of a group gets an advantage, its lead over the second best; for pass@k.

    Formula: ``A = (R_first - R_second) / (std + 1e-6)`` for the best rollout of the group, 0 for the others
    Paper: https://arxiv.org/abs/2503.19595
    Differs: a group of one gets 0 (verl: an error)

    Args:
        batch: as for ``grpo``.
        normalize_by_std: False omits the divisor.

    Returns:
        [T] float32.
    """
    rewards, valid = batch["rewards"].double(), batch["valid"]
    _, std, count = group_statistics(rewards, batch["group_ids"], valid)
    group, size = _groups(batch["group_ids"])
    lowest = rewards.new_full((size,), -torch.inf)
    candidates = torch.where(valid, rewards, -torch.inf)
    best = lowest.scatter_reduce(0, group, candidates, "amax")[group]
    leads = valid & (rewards == best)
    ties = torch.zeros(size, dtype=torch.int64).index_add(0, group, leads.long())[group]
    second = lowest.scatter_reduce(0, group, candidates.masked_fill(leads, -torch.inf), "amax")[group]
    ahead = leads & (ties == 1) & (count > 1)  # with two equal best rollouts the lead is 0
    values = torch.where(ahead, rewards - second, 0.0)
    return on_tokens(batch, values / (std + EPSILON) if normalize_by_std else values, ahead)


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


def opo(batch: Batch) -> Tensor:
    """The baseline of minimum variance if the squared norm of the gradient grows with the length.

    Formula: ``A = R - sum_i L_i R_i / sum_i L_i``, L the sampled tokens of a rollout
    Paper: https://arxiv.org/abs/2505.23585

    Args:
        batch: as for ``grpo``, and ``response_lengths`` [B].
    """
    rewards, valid = batch["rewards"].double(), batch["valid"]
    group, size = _groups(batch["group_ids"])
    lengths = torch.where(valid, batch["response_lengths"].double(), 0.0)
    total = rewards.new_zeros(size).index_add(0, group, lengths)
    weighted = rewards.new_zeros(size).index_add(0, group, lengths * torch.where(valid, rewards, 0.0))
    count = torch.zeros(size, dtype=torch.int64).index_add(0, group, valid.long())
    baseline = weighted / torch.where(total > 0, total, 1.0)
    return on_tokens(batch, rewards - baseline[group], valid & (count > 1)[group])


def gpg(batch: Batch, *, f_norm: float = 1.0) -> Tensor:
    """Group-centered rewards, scaled up to make up for the rollouts without a gradient.

    Formula: ``A = B / (B - M) (R - mean) / f_norm``, B all rollouts, M those of groups whose rewards are all equal
    Paper: https://arxiv.org/abs/2504.02546
    Differs: verl scales by B / (number of rollouts with a reward other than 0)

    Args:
        batch: as for ``grpo``.
        f_norm: the paper's constant divisor.

    Returns:
        [T] float32.
    """
    rewards, valid = batch["rewards"].double(), batch["valid"]
    mean, std, count = group_statistics(rewards, batch["group_ids"], valid)
    taught = (valid & (std > 0)).sum().clamp(min=1)
    return on_tokens(batch, valid.sum() / taught * (rewards - mean) / f_norm, valid & (count > 1))


def reinforce_plus_plus_baseline(batch: Batch) -> Tensor:
    """REINFORCE++ with the group's mean as baseline: centered in the group, scaled over the batch.

    Formula: ``A = whiten(R - mean)`` over the sampled tokens of the batch
    Paper: https://arxiv.org/abs/2501.03262
    Differs: a group of one gets 0 and takes no part in the whitening

    Args:
        batch: as for ``grpo``.

    Returns:
        [T] float32.
    """
    rewards, valid = batch["rewards"].double(), batch["valid"]
    mean, _, count = group_statistics(rewards, batch["group_ids"], valid)
    compared = batch["loss_mask"] & batch.to_tokens(valid & (count > 1))
    return whiten(batch.to_tokens(torch.where(valid, rewards - mean, 0.0)), compared).float()


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
    group, size = _groups(group_ids)
    lowest = values.new_full((size,), torch.inf)
    lowest = lowest.scatter_reduce(0, group, torch.where(valid, values, torch.inf), "amin")[group]
    above = torch.where(valid, values - lowest, torch.zeros_like(values))  # equal values: exactly 0
    count = values.new_zeros(size).index_add(0, group, valid.to(values.dtype))
    offset = values.new_zeros(size).index_add(0, group, above) / count.clamp(min=1)
    squares = torch.where(valid, (above - offset[group]) ** 2, torch.zeros_like(values))
    variance = values.new_zeros(size).index_add(0, group, squares) / (count - 1).clamp(min=1)
    mean = torch.where(count[group] > 0, lowest + offset[group], torch.zeros_like(values))
    return mean, variance.sqrt()[group], count[group]


def _groups(group_ids: Tensor) -> tuple[Tensor, int]:
    """Return the groups numbered from 0, [B], and the number of groups."""
    names, group = torch.unique(group_ids, return_inverse=True)
    return group, len(names)


def _standardized(
    values: Tensor, batch: Batch, counts: Tensor, divide: bool, epsilon: float = EPSILON
) -> tuple[Tensor, Tensor]:
    """Return values relative to their group [B], and whether each had a comparison [B] bool."""
    mean, std, number = group_statistics(values, batch["group_ids"], counts)
    centred = values - mean
    return centred / (std + epsilon) if divide else centred, counts & (number > 1)
