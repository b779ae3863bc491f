"""Advantage estimators besides the core's: of whole rollouts, and of tokens.

``engine_core.algorithms.advantages`` describes the properties that all estimators share, and the letters in the formulas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine_core.algorithms.advantages import EPSILON, group_statistics, on_tokens, standardized, whiten
from engine_core.algorithms.advantages_tokens import discounted, sampled, token_rewards

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.types import Batch


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
        values, here = standardized(term.nan_to_num(), batch, applies, divide=True)
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
    names, group = torch.unique(batch["group_ids"], return_inverse=True)
    lowest = rewards.new_full((len(names),), -torch.inf)
    candidates = torch.where(valid, rewards, -torch.inf)
    best = lowest.scatter_reduce(0, group, candidates, "amax")[group]
    leads = valid & (rewards == best)
    ties = torch.zeros(len(names), dtype=torch.int64).index_add(0, group, leads.long())[group]
    second = lowest.scatter_reduce(0, group, candidates.masked_fill(leads, -torch.inf), "amax")[group]
    ahead = leads & (ties == 1) & (count > 1)  # with two equal best rollouts the lead is 0
    values = torch.where(ahead, rewards - second, 0.0)
    return on_tokens(batch, values / (std + EPSILON) if normalize_by_std else values, ahead)


def opo(batch: Batch) -> Tensor:
    """The baseline of minimum variance if the squared norm of the gradient grows with the length.

    Formula: ``A = R - sum_i L_i R_i / sum_i L_i``, L the sampled tokens of a rollout
    Paper: https://arxiv.org/abs/2505.23585

    Args:
        batch: as for ``grpo``, and ``response_lengths`` [B].
    """
    rewards, valid = batch["rewards"].double(), batch["valid"]
    names, group = torch.unique(batch["group_ids"], return_inverse=True)
    lengths = torch.where(valid, batch["response_lengths"].double(), 0.0)
    total = rewards.new_zeros(len(names)).index_add(0, group, lengths)
    weighted = rewards.new_zeros(len(names)).index_add(0, group, lengths * torch.where(valid, rewards, 0.0))
    count = torch.zeros(len(names), dtype=torch.int64).index_add(0, group, valid.long())
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


def reinforce_plus_plus(batch: Batch, *, gamma: float = 1.0) -> Tensor:
    """The rewards of a token and of those after it, standardized over the whole batch.

    Formula: ``A_t = whiten(G_t)`` over the sampled tokens of the batch, ``G_t = r_t + gamma G_{t+1}``
    Paper: https://arxiv.org/abs/2501.03262
    Differs: a batch with one sampled token gives 0

    Args:
        batch: as for ``reinforce``.
        gamma: discount per token.

    Returns:
        [T] float32.
    """
    counts = sampled(batch)
    return whiten(discounted(token_rewards(batch), counts, batch, gamma), counts).float()


def remax(batch: Batch) -> Tensor:
    """The reward of the greedy response to the same prompt as baseline.

    Formula: ``A_t = sum_{s >= t} r_s - R(greedy)``
    Paper: https://arxiv.org/abs/2310.10505
    Differs: a prompt whose greedy response could not be scored gets 0

    Args:
        batch: as for ``reinforce``, and ``greedy_rewards`` [B]: rewards of the additional greedy response per prompt,
            which the core samples and scores (NaN where a reward failed). Stages do not see these responses.
    """
    counts = sampled(batch)
    baseline = batch.to_tokens(batch["greedy_rewards"].double())
    counts = counts & baseline.isfinite()
    to_go = discounted(token_rewards(batch), counts, batch, 1.0)
    return torch.where(counts, to_go - baseline, 0.0).float()


def distill(batch: Batch, *, gamma: float = 0.0) -> Tensor:
    """The teacher's log-prob of each token less the student's: on-policy distillation as a policy gradient.

    Formula: ``A_t = d_t + gamma A_{t+1}``, ``d_t = log p_teacher - log p_old``
    Paper: https://thinkingmachines.ai/blog/on-policy-distillation/, https://arxiv.org/abs/2306.08543
    Differs: no reward is read: with one, the teacher is ``[ref]`` and its KL is in the reward (``kl_in = "reward"``)

    On policy, the mean of ``-A_t grad log p_t`` with gamma = 0 is a one-sample estimate of the gradient of the reverse
    KL of each token's distribution to the teacher's; with gamma = 1, of the reverse KL of whole responses.

    Args:
        batch: ``old_log_probs`` [T], ``teacher_log_probs`` [T], both at the batch's temperature; ``valid`` [B],
            ``loss_mask`` [T].
        gamma: discount per token.
    """
    counts = sampled(batch)
    gap = torch.where(counts, batch["teacher_log_probs"].double() - batch["old_log_probs"].double(), 0.0)
    return discounted(gap, counts, batch, gamma).float()
