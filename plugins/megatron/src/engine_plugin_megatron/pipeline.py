"""Micro-batches of packed sequences through megatron-core's schedules.

The core's loss is a sum that is already weighted for the global mini-batch, so nothing is averaged here.
megatron-core's config therefore has ``calculate_per_token_loss``, with no token count to divide by. Without it
megatron-core divides the loss tensor in place by the number of micro-batches, which also changes a metric that shares
its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from engine_plugin_megatron.models.layers import Stretch
from engine_plugin_megatron.ranks import token_group
from engine_plugin_torch.transfer import on_host, send

if TYPE_CHECKING:
    from engine_core.types import Batch

Micro = tuple[list[int], "Batch"]
"""Positions in the batch ([] of one that fills up), and the sequences on the device."""


class Pipeline:
    """A runner of planned micro-batches through the pipeline's stages.

    Args:
        models: this rank's chunks, wrapped where gradients are reduced.
        chunks: the ``GPTModel`` in each of ``models``.
        device: this rank's device.
    """

    def __init__(self, models: Sequence[Any], chunks: Sequence[Any], device: torch.device) -> None:
        self.models, self.device = list(models), device
        self.config = chunks[0].config
        self.sharers = token_group()
        sharing = 1 if self.sharers is None else self.sharers.size()
        self.multiple = sharing * (
            self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        )
        for chunk in chunks:
            if chunk.post_process:
                # return hidden states, not logits of all tokens: the head projects only the rows it needs
                chunk._postprocess = _hidden_states
            chunk.config.finalize_model_grads_func = _finalize

    def learn(self, plan: Sequence[Micro], loss: Callable[[list[int], Batch, Tensor], Tensor]) -> None:
        """Run forward and backward of every micro-batch, then reduce gradients over ranks.

        Args:
            plan: the micro-batches; their number is equal on every rank.
            loss: returns the scalar loss from positions, sequences and hidden states [T, 1, H]; called on the last
                stage.
        """

        def after(indices: list[int], micro: Batch, hidden: Tensor) -> Any:
            """Return loss, token count 0 and no metrics from hidden states [T, 1, H], as megatron-core expects."""
            return loss(indices, micro, hidden), torch.zeros((), dtype=torch.int, device=self.device), {}

        self._run(plan, after)

    @torch.no_grad()
    def compute(self, plan: Sequence[Micro], function: Callable[[list[int], Batch, Tensor], Any]) -> list:
        """Run the forward pass of every micro-batch.

        Args:
            plan: the micro-batches; their number is equal on every rank.
            function: called on the last stage with positions, sequences and hidden states [T, 1, H].

        Returns:
            On the last stage the results of ``function``, in the plan's order; on other stages an empty list.
        """
        return self._run(plan, function, forward_only=True, collect_non_loss_data=True)

    def _run(self, plan: Sequence[Micro], after: Callable[..., Any], **how: bool) -> list:
        if not plan:
            return []

        def forward_step(iterator: Iterator[Micro], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            """Return the next micro-batch's hidden states [T, 1, H] and the function that finishes it."""
            indices, micro = next(iterator)
            hidden = model(**self.inputs(micro))

            def finish(output: Tensor, non_loss_data: bool = False) -> Any:
                """Call ``after`` with the hidden states [T, 1, H]."""
                return after(indices, micro, output)

            return hidden, finish

        iterators = [iter(plan) for _ in self.models]
        alone = len(self.models) == 1
        found: list = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators[0] if alone else iterators,
            model=self.models,
            num_microbatches=len(plan),
            seq_length=plan[0][1].num_tokens,
            micro_batch_size=1,
            **{"forward_only": False, **how},
        )
        return found

    def inputs(self, micro: Batch) -> dict[str, Any]:
        """Return a model's arguments: one row of packed tokens, padded so that ranks can split it.

        With `cp` the row is this rank's part of the pack.
        """
        lengths = on_host(micro.lengths)
        lengths = lengths[lengths > 0]
        ids, missing = micro.token_ids, -micro.num_tokens % self.multiple
        if missing:
            ids = torch.cat([ids, ids.new_zeros(missing)])
            lengths = torch.cat([lengths, lengths.new_tensor([missing])])
        ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        positions = torch.arange(len(ids)) - torch.repeat_interleave(ends[:-1], lengths)
        positions = send(positions, self.device)
        longest, bounds = int(lengths.max()), ends.to(torch.int32)
        of_pack = {
            "qkv_format": "thd",
            "cu_seqlens_q": bounds,
            "cu_seqlens_kv": bounds,
            "max_seqlen_q": longest,
            "max_seqlen_kv": longest,
        }
        if self.sharers is None:
            packed = PackedSeqParams(**of_pack)
        else:
            ids, positions = (x.chunk(self.sharers.size())[self.sharers.rank()] for x in (ids, positions))
            whole = torch.tensor([0, len(ids)], dtype=torch.int32)
            packed = Stretch(
                **of_pack, cu_seqlens_q_padded=whole, cu_seqlens_kv_padded=whole, positions=positions
            )
        return {
            "input_ids": ids[None],
            "position_ids": positions[None],
            "attention_mask": None,
            "packed_seq_params": packed,
        }


def _hidden_states(*, hidden_states: Tensor, **_: Any) -> Tensor:
    return hidden_states


def _finalize(model: list, num_tokens: Tensor | None = None, **settings: Any) -> None:
    """Reduce gradients over ranks without dividing them by a number of tokens."""
    finalize_model_grads(model, None, **settings)


def synchronised(models: Sequence[Any], overlap: bool) -> None:
    """Set ``no_sync_func``, with which the schedule delays the overlapped reduction to the last micro-batch."""
    if not overlap:
        return
    waits = [model.no_sync for model in models]
    for model in models:
        model.config.no_sync_func = waits[0] if len(waits) == 1 else waits
