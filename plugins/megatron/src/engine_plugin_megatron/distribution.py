"""Outputs of a distribution whose vocabulary is sharded: each rank has the logits of its part of the vocabulary.

No rank ever holds a whole row of logits. Reductions over the vocabulary (the normalizer, sums, the most likely tokens)
exchange one number per row, or a few candidates. Every rank gets the same outputs and computes the same loss, so the
gradient of a sum over ranks is, for each rank's own term, the gradient of the sum itself.
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
    """A ``Distribution`` over sharded logits [n, V / ranks].

    Padding tokens behind the vocabulary have logits so small that their probability is 0 (``models.vocabulary``).
    """

    group: dist.ProcessGroup
    size: int  # V, without padding

    @property
    def vocabulary(self) -> int:
        """V: the whole vocabulary's size, without padding."""
        return self.size

    @property
    def _first(self) -> int:
        """The id of this rank's first token."""
        return self.group.rank() * self.logits.shape[-1]

    def _local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return a mask of the ``ids`` on this rank, and local ids from the rank's first; 0 for ids of other ranks."""
        local = ids - self._first
        mine = (local >= 0) & (local < self.logits.shape[-1])
        return mine, local.masked_fill(~mine, 0)

    def at(self, ids: Tensor) -> Tensor:
        """Return the logits [n, K] of ``ids`` [n, K], on every rank."""
        mine, local = self._local(ids)
        return Together.apply(self.logits.gather(-1, local).masked_fill(~mine, 0.0), self.group)

    def sum_over(self, values: Tensor) -> Tensor:
        """Sum ``values`` [n, V / ranks] over the whole vocabulary: [n]."""
        return Together.apply(values.sum(-1), self.group)

    def log_sum_of(self, values: Tensor) -> Tensor:
        """Return ``log sum_v exp(values_v)`` [n] of ``values`` [n, V / ranks], shifted by the largest of all ranks."""
        largest = values.detach().amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return self.sum_over((values - largest[:, None]).exp()).log() + largest

    def likeliest(self, count: int) -> Tensor:
        """Return the ids [N, count] of the most likely tokens, chosen from the candidates of all ranks."""
        with torch.no_grad():
            found = self.logits.topk(min(count, self.logits.shape[-1]), dim=-1)
            values, ids = (
                _gathered(part, self.group) for part in (found.values, found.indices + self._first)
            )
            return ids.gather(-1, values.topk(count, dim=-1).indices)

    def without(self, ids: Tensor) -> Tensor:
        """Return this rank's logits [n, V / ranks] with minus infinity at ``ids`` [n, K]."""
        mine, local = self._local(ids)
        # ids of other ranks map to local token 0 with mask 0: add masks, since a scatter could overwrite a 1 with a 0
        taken = torch.zeros_like(self.logits).scatter_add(-1, local, mine.to(self.logits.dtype))
        return self.logits.masked_fill(taken > 0, -torch.inf)

    @property
    def mean_logit(self) -> Tensor:
        """The sum ``sum_v p_v logit_v`` over the whole vocabulary [V]: [n]."""
        # keep the normalizer out of the sum: inside, each rank would get only its own terms' part of its gradient
        shift = self.log_sum.detach()
        return (
            self.sum_over((self.logits - shift[:, None]).exp() * self.logits) * (shift - self.log_sum).exp()
        )


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather [n, k] of every rank into [n, ranks * k]."""
    every = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(every, tensor.contiguous(), group=group)
    return torch.cat(every, -1)
