"""Advantage estimators: ``f(batch, **options) -> [T] float32``.

Formulas, not policies: an estimator sees the typed batch (rewards, groups, masks, and whatever it
declared to need) and says how much better each token was than expected. Rollouts that are not
``valid`` take no part in any statistic and get 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.types import Batch


def grpo(batch: Batch, *, normalize_by_std: bool = True) -> Tensor:
    """Group-relative advantage: ``(r - mean(group)) / (std(group) + 1e-6)``.

    DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1. The standard deviation is the sample
    one (n - 1). A group of one valid rollout gets 0: there is nothing to compare it with. (verl gives
    it the raw reward.)

    Args:
        batch: columns ``rewards`` [B], ``group_ids`` [B] (any ids, any order), ``valid`` [B],
            ``loss_mask`` [T].
        normalize_by_std: off gives the numerator alone (Dr.GRPO, https://arxiv.org/abs/2503.20783).

    Returns:
        [T] float32: the rollout's value on its sampled tokens, 0 elsewhere.
    """
    rewards, valid = batch["rewards"].double(), batch["valid"]
    mean, std, count = group_statistics(rewards, batch["group_ids"], valid)
    values = rewards - mean
    if normalize_by_std:
        values = values / (std + 1e-6)
    values = torch.where(valid & (count > 1), values, torch.zeros_like(values))
    return batch.to_tokens(values.float()) * batch["loss_mask"]


def group_statistics(values: Tensor, group_ids: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, sample standard deviation and count of each rollout's group, over its valid members.

    Args:
        values: [B] float.
        group_ids: [B] int.
        valid: [B] bool; members that count.

    Returns:
        Three [B] tensors, the group's figure at each member; the deviation is 0 below two members.
    """
    _, group = torch.unique(group_ids, return_inverse=True)
    size = int(group.max()) + 1 if len(group) else 0
    kept = torch.where(valid, values, torch.zeros_like(values))  # an invalid one may hold NaN
    count = values.new_zeros(size).index_add(0, group, valid.to(values.dtype))
    mean = values.new_zeros(size).index_add(0, group, kept) / count.clamp(min=1)
    squares = torch.where(valid, (kept - mean[group]) ** 2, torch.zeros_like(values))
    variance = values.new_zeros(size).index_add(0, group, squares) / (count - 1).clamp(min=1)
    return mean[group], variance.sqrt()[group], count[group]
