"""From the last stage's hidden states to the outputs of the contract.

The head runs on the rows that predict loss tokens only, a chunk at a time; a micro-batch without any sends one row through
it and takes it times 0, so that every weight has a gradient in every micro-batch, as gradients that are summed while the
backward pass goes on need.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from engine_core.engines.log_probs import OUTPUTS, Distribution, columns_at, gather_outputs, zero_outputs
from engine_core.engines.transfer import on_host, predicted, send
from engine_plugin_megatron.distribution import ShardedDistribution

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

    from engine_core.types import Batch


class Head:
    """What both heads need of a model: its hidden states whole, its output layer on rows.

    Args:
        chunk: the ``GPTModel`` of the last stage; None elsewhere. Its output layer no longer gathers tokens.
        device: of this rank.
        group: tensor-parallel ranks.
    """

    outputs: tuple[str, ...] = ()

    def __init__(self, chunk: Any, device: torch.device, group: dist.ProcessGroup) -> None:
        self.chunk, self.device, self.group = chunk, device, group
        self.scattered = False
        if chunk is not None:
            layer = chunk.output_layer
            self.scattered = bool(chunk.config.sequence_parallel)
            layer.sequence_parallel = False  # it is given rows of all ranks' tokens
            if hasattr(layer, "allreduce_dgrad"):
                layer.allreduce_dgrad = group.size() > 1

    def rows(self, hidden: Tensor) -> Tensor:
        """[T, 1, H], or this rank's share of the tokens, to [T, H]."""
        if self.scattered:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden[:, 0]

    def project(self, rows: Tensor) -> Tensor:
        """[n, H] -> [n, V / ranks], or [n, 1] of a value head; float32."""
        tied = self.chunk.shared_embedding_or_output_weight() if self._tied else None
        return self.chunk.output_layer(rows[:, None], weight=tied)[0][:, 0].float()

    @property
    def _tied(self) -> bool:
        return bool(self.chunk.share_embeddings_and_output_weights)

    def __call__(
        self, micro: Batch, hidden: Tensor, grad: Collection[str], watched: Collection[str] = ()
    ) -> dict[str, Tensor]:
        """Outputs of a micro-batch, [T] float32 each ([T, K] where there are several a position); see ``PackedForward``.

        Args:
            hidden: [T', 1, H]: at least the micro-batch's tokens.
            grad: outputs with gradient.
            watched: outputs without.
        """
        raise NotImplementedError


class TokenHead(Head):
    """Log-probs and their like.

    Args:
        vocabulary: tokens of the model, without padding.
        rows_at_once: rows whose logits exist at one time.
        recompute: logits are computed again in the backward pass.
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
        targets = send(predicted(micro), self.device)
        learns = len(targets) > 0
        if not learns:
            targets = torch.zeros(1, dtype=torch.int64, device=self.device)
        rows = self.rows(hidden)
        gathered = gather_outputs(
            self.project,
            rows[targets - 1] if learns else rows[:1],
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
            name: zeros[name].index_put((targets,), values if learns else 0 * values)
            for name, values in gathered.items()
        }
        return {name: v if name in (*grad, "log_probs") else v.detach() for name, v in found.items()}


class ValueHead(Head):
    """``values`` and ``scores``, as ``engine_core.engines.value_forward`` tells them."""

    outputs = ("values", "scores")

    def __call__(
        self, micro: Batch, hidden: Tensor, grad: Collection[str], watched: Collection[str] = ()
    ) -> dict[str, Tensor]:
        rows = self.rows(hidden)
        scored = on_host(micro["loss_mask"]).nonzero().squeeze(1)
        places = {"scores": send(scored, self.device), "values": send(predicted(micro), self.device)}
        nothing = 0 * self.project(rows[:1]).sum()  # the head has a gradient in every micro-batch
        found = {}
        for name in dict.fromkeys((*grad, *watched)):
            read = places[name] - 1 if name == "values" else places[name]
            values = torch.zeros(micro.num_tokens, dtype=torch.float32, device=self.device) + nothing
            if len(read):
                values = values.index_put((places[name],), self.project(rows[read])[:, 0])
            found[name] = values if name in grad else values.detach()
        return found
