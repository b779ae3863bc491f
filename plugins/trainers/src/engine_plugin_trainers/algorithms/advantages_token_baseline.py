"""The optimal token baseline: the baseline of each position of a group that minimizes the gradient's variance.

Left out: the weighting of the gradient norms by importance weights (verl's option), which are 1 on-policy. The module
``advantages`` describes the conventions of all estimators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine_core.algorithms.advantages_tokens import discounted, sampled, token_rewards

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.types import Batch


def optimal_token_baseline(batch: Batch) -> Tensor:
    """Return rewards to go minus a baseline for each position of the group, weighted by gradient norms.

    Formula: ``A_t = G_t - sum_i G_i,t W_i,t / sum_i W_i,t``, ``W_t = sum_{j <= t} (1 - 2 p_j + sum_v p_j(v)^2)``; baseline 0 beyond the second longest response
    Paper: https://arxiv.org/abs/2602.07078
    Differs: a group of one gets 0; where all W are 0 the baseline is the plain mean

    Args:
        batch: ``rewards`` [B], ``group_ids`` [B], ``valid`` [B], ``loss_mask`` [T], optionally ``kl_penalty`` [T];
            ``old_log_probs`` [T] and ``sum_pi_squared`` [T], the sum of the squared probabilities of the whole
            vocabulary at each sampled token. Positions count from the first sampled token, observations included.

    Returns:
        [T] float32 advantages, 0 at tokens that were not sampled.
    """
    counts = sampled(batch)
    place = torch.arange(batch.num_tokens)
    first = torch.full((len(batch),), batch.num_tokens).scatter_reduce(
        0, batch.sequence_index, torch.where(counts, place, batch.num_tokens), "amin"
    )
    return _against_baseline(batch, counts, place - batch.to_tokens(first))


def optimal_token_baseline_multi_turn(batch: Batch) -> Tensor:
    """Return the optimal token baseline's advantages over the sampled tokens alone, for rollouts with observations.

    Formula: as `optimal_token_baseline`, positions counted without observation tokens
    Paper: https://arxiv.org/abs/2602.07078
    Differs: as `optimal_token_baseline`

    Args:
        batch: as for ``optimal_token_baseline``.

    Returns:
        [T] float32 advantages, 0 at tokens that were not sampled.
    """
    counts = sampled(batch)
    before = counts.long().cumsum(0) - counts.long()
    starts = torch.cat([before, before.new_zeros(1)])[batch.offsets[:-1]]
    return _against_baseline(batch, counts, before - batch.to_tokens(starts))


def _against_baseline(batch: Batch, counts: Tensor, position: Tensor) -> Tensor:
    """Return rewards to go minus the weighted mean of the group at the same ``position`` [T]: advantages [T]."""
    chosen = counts.nonzero().squeeze(1)
    if len(chosen) == 0:
        return torch.zeros(batch.num_tokens)
    to_go = discounted(token_rewards(batch), counts, batch, 1.0)
    energy = 1 - 2 * batch["old_log_probs"].double().exp() + batch["sum_pi_squared"].double()
    weights = _running_sum(torch.where(counts, energy.clamp(min=0), 0.0), batch)[chosen]
    sequence, position, to_go = batch.sequence_index[chosen], position[chosen], to_go[chosen]
    _, group = torch.unique(batch["group_ids"], return_inverse=True)
    span = int(position.max()) + 1
    key = group[sequence] * span + position
    size = (int(group.max()) + 1) * span

    def over_group(values: Tensor) -> Tensor:
        """Return the sum of values [N] over tokens of the same group and position, at each token: [N]."""
        return torch.zeros(size, dtype=torch.float64).index_add(0, key, values)[key]

    plain = over_group(to_go) / over_group(torch.ones_like(to_go))
    total = over_group(weights)
    baseline = torch.where(total > 0, over_group(to_go * weights) / torch.where(total > 0, total, 1.0), plain)
    ends = torch.full((len(batch),), -1).scatter_reduce(0, sequence, position, "amax")
    second, members = _second_longest(ends, group)
    baseline = torch.where(position > second[sequence], 0.0, baseline)
    advantages = torch.where(members[sequence] > 1, to_go - baseline, 0.0)
    return torch.zeros(batch.num_tokens).index_put((chosen,), advantages.float())


def _running_sum(values: Tensor, batch: Batch) -> Tensor:
    """Return the sum [T] over each sequence up to and including the token."""
    total = values.cumsum(0)
    before = torch.cat([total.new_zeros(1), total])[batch.offsets[:-1]]
    return total - batch.to_tokens(before)


def _second_longest(ends: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each rollout [B] the second largest of its group's ``ends`` [B] and the number of ends.

    An end of -1 means a rollout without sampled tokens.
    """
    size = int(group.max()) + 1
    members = torch.zeros(size, dtype=torch.int64).index_add(0, group, (ends >= 0).long())
    longest = torch.full((size,), -1).scatter_reduce(0, group, ends, "amax")
    leads = ends == longest[group]
    ties = torch.zeros(size, dtype=torch.int64).index_add(0, group, leads.long())
    rest = torch.full((size,), -1).scatter_reduce(0, group, ends.masked_fill(leads, -1), "amax")
    return torch.where(ties > 1, longest, rest)[group], members[group]
