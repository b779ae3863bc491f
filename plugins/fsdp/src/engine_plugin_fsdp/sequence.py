"""Sequence parallelism: several ranks share the tokens of each micro-batch (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509).

Each rank runs the decoder on its stretch of the pack. In attention the stretches are exchanged for heads: a rank
sees all tokens with its share of the heads, and gives them back. The head runs on a rank's own rows; then outputs
are put together on all ranks, so that a loss sees whole sequences. A rank's loss is differentiated through its own
rows alone, and the sum of gradients over ranks is that of the whole.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from engine_core.engines.attention import packed, packed_arguments, varlen, varlen_mask
from engine_core.engines.log_probs import columns_at, gather_outputs, zero_outputs
from engine_core.engines.packed_forward import PackedForward
from engine_core.engines.value_models import VALUE_ROLES
from engine_core.errors import ConfigError

if TYPE_CHECKING:
    from engine_core.types import Batch


def share_sequences(module: nn.Module, group: dist.ProcessGroup, attention: str, role: str) -> None:
    """Have a model's attention exchange tokens for heads.

    Raises:
        ConfigError: the model cannot be split in this way.
    """
    size, key = group.size(), f"{role}.fsdp.sp"
    if role in VALUE_ROLES or not isinstance(module, PreTrainedModel):
        raise ConfigError(
            f"{key}: only language models of transformers are split over tokens. Leave it out for this role."
        )
    if attention != "varlen":
        raise ConfigError(f"{key} needs model.attention = 'varlen', got '{attention}'.")
    config: Any = module.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if heads % size:
        raise ConfigError(f"{key} is {size}, which does not divide the model's {heads} key-value heads.")
    name = f"varlen_over_{size}"  # the ranks of a process are the same for every model with that size
    AttentionInterface.register(name, functools.partial(_attention, group))
    AttentionMaskInterface.register(name, varlen_mask)
    module.set_attn_implementation(name)


class SequenceForward(PackedForward):
    """``PackedForward`` over the ranks of a group, which are all given the same pack.

    Args:
        group: those ranks.
    """

    def __init__(self, *arguments: Any, group: dist.ProcessGroup, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.group = group

    def __call__(
        self, pack: Batch, grad: Collection[str], watched: Collection[str] = ()
    ) -> dict[str, Tensor]:
        self.settle()
        if not (self.packs and self.head):
            raise ConfigError(
                "fsdp.sp: this model mixes packed sequences, or its head is not known. Leave sp out."
            )
        length = max(2, -(-pack.num_tokens // self.group.size()))  # tokens of each rank
        first = length * self.group.rank()
        hidden = self._stretch(pack, first, length)
        mask = pack["loss_mask"].clone()
        mask[pack.offsets[:-1][pack.lengths > 0]] = False
        targets = mask.nonzero().squeeze(1)
        targets = targets[(targets - 1 >= first) & (targets - 1 < first + length)]
        learns = len(targets) > 0
        if not learns:  # the head has a gradient on every rank, here of 0
            targets = torch.zeros(1, dtype=torch.int64, device=self.device)
        rows = hidden[targets - 1 - first] if learns else hidden[:1]
        gathered = gather_outputs(
            self._logits_of,
            rows,
            pack.token_ids[targets],
            temperature=pack.temperature,
            chunk=self.chunk,
            grad=grad,
            watched=watched,
            columns=columns_at(targets, (*grad, *watched), pack),
            top_k=pack.top_k,
            compile=self.compile,
            recompute=self.recompute,
        )
        zeros = zero_outputs(gathered, pack, self.device)
        found = {}
        for name, values in gathered.items():
            whole = zeros[name].index_put((targets,), values if learns else 0 * values)
            found[name] = _Together.apply(whole, self.group)
        return {name: v if name in (*grad, "log_probs") else v.detach() for name, v in found.items()}

    def _stretch(self, pack: Batch, first: int, length: int) -> Tensor:
        """[length, H] hidden states of this rank's tokens; the pack is filled up with one sequence of token 0."""
        missing = length * self.group.size() - pack.num_tokens
        lengths = torch.cat([pack.lengths.cpu(), torch.tensor([missing])])
        whole = dataclasses.replace(
            pack, lengths=lengths[lengths > 0], tokens={}, sequences={}, keep_together=None
        )
        ids = torch.cat([pack.token_ids, pack.token_ids.new_zeros(missing)])
        starts = whole.offsets[:-1][whole.sequence_index]
        positions = (torch.arange(len(ids)) - starts).to(self.device)
        mine = slice(first, first + length)
        with packed():
            decoder: Any = self.module.get_decoder()  # type: ignore[operator]
            output = decoder(
                input_ids=ids[None, mine],
                position_ids=positions[None, mine],
                use_cache=False,
                stretch=True,
                **packed_arguments(whole.lengths, self.device),
            )
        return output.last_hidden_state[0]


def _attention(
    group: dist.ProcessGroup,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """``varlen``; where the rank holds a stretch of the pack only, with all tokens and a share of the heads."""
    if not settings.pop("stretch", False):
        return varlen(module, query, key, value, attention_mask, **settings)
    query, key, value = (_Exchange.apply(part, group, 1, 2) for part in (query, key, value))
    out, _ = varlen(module, query, key, value, attention_mask, **settings)
    return _Exchange.apply(out, group, 1, 2), None


class _Exchange(torch.autograd.Function):
    """Give away parts along one dimension, receive the others' parts along another."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, given: int, taken: int) -> Tensor:
        ctx.group, ctx.given, ctx.taken = group, given, taken
        return _exchange(tensor, group, given, taken)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _exchange(gradients[0], ctx.group, ctx.taken, ctx.given), None, None, None


def _exchange(tensor: Tensor, group: dist.ProcessGroup, given: int, taken: int) -> Tensor:
    sent = torch.stack(tensor.chunk(group.size(), given)).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(list(received), dim=taken)


class _Together(torch.autograd.Function):
    """The sum over a group of tensors that are 0 but for each rank's own part. The gradient stays each rank's own."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = tensor.detach().clone()
        dist.all_reduce(total, group=group)
        if not tensor.is_floating_point():
            ctx.mark_non_differentiable(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None
