"""Outputs of a distribution whose logits lie on several ranks: each has those of its part of the vocabulary.

No rank ever holds a whole row of logits. What is read over all of it (the normaliser, sums, the likeliest tokens) goes
over the ranks as one number a row, or as a few candidates. Every rank gets the same outputs and computes the same loss, so
the gradient of a sum over ranks is, for each rank's own term, the gradient of the sum itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engine_plugin_torch.log_probs import Distribution
from engine_plugin_torch.rank_exchange import Together


@dataclass
class ShardedDistribution(Distribution):
    """``Distribution`` of logits [n, V / ranks].

    Rows of padding behind the vocabulary have logits so small that their probability is 0 (``models.vocabulary``).
    """

    group: dist.ProcessGroup
    size: int  # V, without padding

    @property
    def vocabulary(self) -> int:
        return self.size

    @property
    def _first(self) -> int:
        """The id of this rank's first token."""
        return self.group.rank() * self.logits.shape[-1]

    def _local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Which of ``ids`` are this rank's, and all of them counted from its first; 0 for those that are not."""
        local = ids - self._first
        mine = (local >= 0) & (local < self.logits.shape[-1])
        return mine, local.masked_fill(~mine, 0)

    def at(self, ids: Tensor) -> Tensor:
        mine, local = self._local(ids)
        return Together.apply(self.logits.gather(-1, local).masked_fill(~mine, 0.0), self.group)

    def sum_over(self, values: Tensor) -> Tensor:
        return Together.apply(values.sum(-1), self.group)

    def log_sum_of(self, values: Tensor) -> Tensor:
        largest = values.detach().amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return self.sum_over((values - largest[:, None]).exp()).log() + largest

    def likeliest(self, count: int) -> Tensor:
        with torch.no_grad():
            found = self.logits.topk(min(count, self.logits.shape[-1]), dim=-1)
            values, ids = (
                _gathered(part, self.group) for part in (found.values, found.indices + self._first)
            )
            return ids.gather(-1, values.topk(count, dim=-1).indices)

    def without(self, ids: Tensor) -> Tensor:
        mine, local = self._local(ids)
        # several ids of other ranks stand for token 0 here: what is taken away is summed, and never put back
        taken = torch.zeros_like(self.logits).scatter_add(-1, local, mine.to(self.logits.dtype))
        return self.logits.masked_fill(taken > 0, -torch.inf)

    @property
    def mean_logit(self) -> Tensor:
        # not the normaliser itself inside of the sum: each rank would have its own terms' part of its gradient alone
        shift = self.log_sum.detach()
        return (
            self.sum_over((self.logits - shift[:, None]).exp() * self.logits) * (shift - self.log_sum).exp()
        )


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[n, k] of every rank side by side."""
    every = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(every, tensor.contiguous(), group=group)
    return torch.cat(every, -1)
