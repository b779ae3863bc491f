"""The heads: from the last stage's hidden states to the outputs of the contract.

The head runs only on rows that predict loss tokens, a chunk at a time. A micro-batch without such rows runs one row and
multiplies its result by 0. So every weight has a gradient in every micro-batch, which the overlapped reduction of
gradients needs.

With `tp` each rank has the logits of its part of the vocabulary, and no rank ever holds a whole row. Reductions over
the vocabulary (the normalizer, sums, the most likely tokens) exchange one number per row, or a few candidates. Every
rank gets the same outputs and computes the same loss, so the gradient of a sum over ranks is, for each rank's own term,
the gradient of the sum itself.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from engine_plugin_torch.log_probs import OUTPUTS, Distribution, columns_at, gather_outputs, zero_outputs
from engine_plugin_torch.rank_group import Together, gather_last
from engine_plugin_torch.transfer import on_host, predicted, send

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine_core.types import Batch


class Head:
    """The base class of both heads: it gathers hidden states and runs the output layer on rows.

    Args:
        chunk: the ``GPTModel`` of the last stage, None elsewhere. The gather of tokens in its output layer is disabled.
        device: this rank's device.
        group: the tensor-parallel ranks.
        sharers: the ranks that share the tokens of a micro-batch (`cp`); each runs the head on rows of its part.
    """

    outputs: tuple[str, ...] = ()

    def __init__(
        self, chunk: Any, device: torch.device, group: dist.ProcessGroup, sharers: dist.ProcessGroup | None
    ) -> None:
        self.chunk, self.device, self.group, self.sharers = chunk, device, group, sharers
        self.scattered = False
        if chunk is not None:
            layer = chunk.output_layer
            self.scattered = bool(chunk.config.sequence_parallel)
            layer.sequence_parallel = False  # its input rows are gathered already
            if hasattr(layer, "allreduce_dgrad"):
                layer.allreduce_dgrad = group.size() > 1

    def rows(self, hidden: Tensor) -> Tensor:
        """Return hidden states [T, H] from [T, 1, H]; with sequence parallelism, gather them from [T / ranks, 1, H]."""
        if self.scattered:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden[:, 0]

    def own(self, read: Tensor, count: int) -> tuple[Tensor, int]:
        """Return which of some tokens are in this rank's part of the pack.

        Args:
            read: [N] positions in the pack whose hidden states are needed, in host memory.
            count: tokens in each rank's part.

        Returns:
            Indices into ``read``, and the position of the part's first token.
        """
        first = 0 if self.sharers is None else count * self.sharers.rank()
        return ((read >= first) & (read < first + count)).nonzero().squeeze(1), first

    def together(self, outputs: Tensor) -> Tensor:
        """Return outputs of the whole pack ([T] or [T, K]) on every rank, for losses over whole sequences.

        Each rank's ``outputs`` are 0 outside its part, and are summed over the ranks of `cp`.
        """
        if self.sharers is None:
            return outputs
        total: Tensor = Together.apply(outputs, self.sharers)
        return total

    def project(self, rows: Tensor) -> Tensor:
        """Project rows [n, H] to float32 logits [n, V / ranks], or to [n, 1] with a value head."""
        tied = self.chunk.shared_embedding_or_output_weight() if self._tied else None
        return self.chunk.output_layer(rows[:, None], weight=tied)[0][:, 0].float()

    @property
    def _tied(self) -> bool:
        return bool(self.chunk.share_embeddings_and_output_weights)

    def __call__(
        self, micro: Batch, hidden: Tensor, grad: Collection[str], watched: Collection[str] = ()
    ) -> dict[str, Tensor]:
        """Return a micro-batch's outputs, float32: [T], or [T, K] with several values per position.

        Args:
            micro: the sequences, on the device.
            hidden: [T', 1, H]: at least the micro-batch's tokens.
            grad: names of the outputs with gradient.
            watched: names of the outputs without gradient.
        """
        raise NotImplementedError


class TokenHead(Head):
    """The head of language models: log-probs and other outputs of the distribution.

    Args:
        vocabulary: tokens of the model, without padding.
        rows_at_once: maximum rows whose logits exist at one time.
        recompute: logits are recomputed in the backward pass.
    """

    outputs = OUTPUTS

    def __init__(self, *place: Any, vocabulary: int, rows_at_once: int, recompute: bool) -> None:
        super().__init__(*place)
        self.rows_at_once, self.recompute = rows_at_once, recompute
        self.kind: Callable[..., Distribution] = Distribution
        if self.group.size() > 1:
            self.kind = functools.partial(ShardedDistribution, group=self.group, size=vocabulary)

    def __call__(
        self, micro: Batch, hidden: Tensor, grad: Collection[str], watched: Collection[str] = ()
    ) -> dict[str, Tensor]:
        rows, targets = self.rows(hidden), predicted(micro)
        own, first = self.own(targets - 1, len(rows))
        learns = len(own) > 0
        targets = send(targets[own] if learns else torch.zeros(1, dtype=torch.int64), self.device)
        gathered = gather_outputs(
            self.project,
            rows[targets - 1 - first] if learns else rows[:1],
            micro.token_ids[targets],
            temperature=micro.temperature,
            chunk=self.rows_at_once,
            grad=grad,
            watched=watched,
            columns=columns_at(targets, (*grad, *watched), micro),
            top_k=micro.top_k,
            recompute=self.recompute,
            kind=self.kind,
        )
        zeros = zero_outputs(gathered, micro, self.device)
        found = {
            name: self.together(zeros[name].index_put((targets,), values if learns else 0 * values))
            for name, values in gathered.items()
        }
        return {name: v.detach() if name in watched and name not in grad else v for name, v in found.items()}


class ValueHead(Head):
    """The head of value models: ``values`` and ``scores``, as defined in ``engine_plugin_torch.packed_forward``."""

    outputs = ("values", "scores")

    def __call__(
        self, micro: Batch, hidden: Tensor, grad: Collection[str], watched: Collection[str] = ()
    ) -> dict[str, Tensor]:
        rows = self.rows(hidden)
        places = {
            "scores": on_host(micro["loss_mask"]).nonzero().squeeze(1),
            "values": predicted(micro),
        }
        nothing = 0 * self.project(rows[:1]).sum()  # the head has a gradient in every micro-batch
        found = {}
        for name in dict.fromkeys((*grad, *watched)):
            before = int(name == "values")  # read from the token before
            own, first = self.own(places[name] - before, len(rows))
            values = torch.zeros(micro.num_tokens, dtype=torch.float32, device=self.device) + nothing
            if len(own):
                at = send(places[name][own], self.device)
                values = values.index_put((at,), self.project(rows[at - before - first])[:, 0])
            whole = self.together(values)
            found[name] = whole if name in grad else whole.detach()
        return found


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
                gather_last(part, self.group) for part in (found.values, found.indices + self._first)
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
