"""Forward passes in which several ranks get the same sequences and share tokens (``sp``), layers (``tp``), or both.

These ranks form a slice. The head runs on each rank's own rows: the rows of its chunk of the pack, divided among the
ranks that share layers. Then the outputs are combined on all ranks, so that a loss sees whole sequences. Each rank
differentiates the loss through its own rows only, and the sum of the gradients over ranks is the whole gradient.

Sequence parallelism is DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509). Each rank runs the decoder on its
contiguous chunk of the pack. Attention exchanges tokens for heads: a rank gets all tokens with its share of the heads,
and afterwards its own tokens with all heads. If there are fewer key-value heads than ranks, several ranks get the same one.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine_core.errors import ConfigError
from engine_plugin_fsdp.ranks import nearest_fit
from engine_plugin_fsdp.tensor_parallel import SumGradient
from engine_plugin_torch.attention import packed, packed_arguments, register, varlen
from engine_plugin_torch.log_probs import zero_outputs
from engine_plugin_torch.packed_forward import PackedForward, ValueForward
from engine_plugin_torch.rank_group import Exchange, Together
from engine_plugin_torch.transfer import on_host, predicted, send

if TYPE_CHECKING:
    from engine_core.types import Batch
    from engine_plugin_fsdp.ranks import Ranks


class Slice:
    """The ranks that get the same pack, and the division of its tokens and rows among them.

    Args:
        ranks: the engine's ranks; ``ranks.slice`` is set.
    """

    def __init__(self, ranks: Ranks) -> None:
        assert ranks.slice is not None
        self.group = ranks.slice
        self.tokens = ranks.sequence
        self.layers = None if ranks.tp is None else ranks.tp.get_group()

    def check(self, forward: PackedForward, table: str) -> None:
        """Refuse a model whose tokens or rows of logits cannot be shared. Call ``forward.settle`` first.

        Args:
            forward: the forward pass of the model.
            table: name of the table, for messages: ``actor.fsdp``.

        Raises:
            ConfigError: the model runs one sequence at a time, or its head is not known.
        """
        key = f"{table}.{'tp' if self.tokens is None else 'sp'}"
        kind = type(forward.module).__name__
        if forward.head is None:
            raise ConfigError(
                f"{key}: the head of {kind} is not known from its config, so that ranks cannot share its rows. Leave it out."
            )
        if self.tokens is not None and not forward.packs:
            raise ConfigError(
                f"{key}: {kind} runs one sequence at a time, so that ranks cannot share tokens of a pack. Leave it out."
            )

    def hidden(self, forward: PackedForward, pack: Batch) -> tuple[Tensor, int]:
        """Compute this rank's hidden states [n, H]; return them with the position of their first token in the pack."""
        if self.tokens is None:
            rows, first = forward._rows(pack.token_ids, on_host(pack.lengths)), 0
        else:
            rows, first = _stretch(forward.module, pack, self.tokens)
        return rows if self.layers is None else SumGradient.apply(rows, self.layers), first

    def own(self, read: Tensor, first: int, count: int) -> Tensor:
        """Return the indices into ``read`` of the tokens that this rank computes.

        Args:
            read: [N] positions of the needed hidden states, in host memory.
            first: position of this rank's first hidden state.
            count: number of this rank's hidden states.
        """
        here = ((read >= first) & (read < first + count)).nonzero().squeeze(1)
        return here if self.layers is None else here.tensor_split(self.layers.size())[self.layers.rank()]

    def together(self, tensor: Tensor) -> Tensor:
        """Sum outputs ``[T]`` or ``[T, K]`` over the slice; each rank's tensor is 0 outside its own tokens."""
        total: Tensor = Together.apply(tensor, self.group)
        return total


class SliceForward(PackedForward):
    """The ``PackedForward`` of a slice.

    Args:
        arguments: as for ``PackedForward``.
        ranks: the engine's ranks.
        settings: as for ``PackedForward``.
    """

    def __init__(self, *arguments: Any, ranks: Ranks, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.slice = Slice(ranks)

    def __call__(
        self, pack: Batch, grad: Collection[str], watched: Collection[str] = ()
    ) -> dict[str, Tensor]:
        hidden, first = self.slice.hidden(self, pack)
        targets = predicted(pack)
        targets = targets[self.slice.own(targets - 1, first, len(hidden))]
        learns = len(targets) > 0
        if not learns:  # the head has a gradient on every rank, here of 0
            targets = torch.zeros(1, dtype=torch.int64)
        targets = send(targets, self.device)
        rows = hidden[targets - 1 - first] if learns else hidden[:1]
        gathered = self._gather(pack, rows, targets, grad, watched)
        zeros = zero_outputs(gathered, pack, self.device)
        found = {}
        for name, values in gathered.items():
            whole = zeros[name].index_put((targets,), values if learns else 0 * values)
            found[name] = self.slice.together(whole)
        return {name: v if name in (*grad, "log_probs") else v.detach() for name, v in found.items()}


class SliceValueForward(ValueForward):
    """The ``ValueForward`` of a slice.

    Args:
        arguments: as for ``ValueForward``.
        ranks: the engine's ranks.
    """

    def __init__(self, *arguments: Any, ranks: Ranks) -> None:
        super().__init__(*arguments)
        self.slice = Slice(ranks)

    def __call__(
        self, pack: Batch, grad: Collection[str], watched: Collection[str] = ()
    ) -> dict[str, Tensor]:
        hidden, first = self.slice.hidden(self, pack)
        zeros = torch.zeros(pack.num_tokens, dtype=torch.float32, device=self.device)
        found = {}
        for name in dict.fromkeys((*grad, *watched)):
            before = int(name == "values")  # values are read from the token before
            places = predicted(pack) if before else on_host(pack["loss_mask"]).nonzero().squeeze(1)
            own = send(places[self.slice.own(places - before, first, len(hidden))], self.device)
            with torch.set_grad_enabled(torch.is_grad_enabled() and name in grad):
                if len(own):
                    whole = zeros.index_put((own,), self._numbers(hidden[own - before - first]))
                else:  # the head has a gradient on every rank, here of 0
                    whole = zeros + 0 * self._numbers(hidden[:1]).sum()
                found[name] = self.slice.together(whole)
        return found


def _stretch(module: nn.Module, pack: Batch, group: dist.ProcessGroup) -> tuple[Tensor, int]:
    """Compute hidden states [length, H] of this rank's tokens; the pack is padded with one sequence of token 0."""
    length = max(2, -(-pack.num_tokens // group.size()))  # tokens of each rank
    missing = length * group.size() - pack.num_tokens
    lengths = torch.cat([on_host(pack.lengths), torch.tensor([missing])])
    lengths = lengths[lengths > 0]
    ids = torch.cat([pack.token_ids, pack.token_ids.new_zeros(missing)])
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    device = pack.token_ids.device
    positions = send(torch.arange(len(ids)) - starts, device)
    first = length * group.rank()
    mine = slice(first, first + length)
    with packed():
        decoder: Any = module.get_decoder()  # type: ignore[operator]
        output = decoder(
            input_ids=ids[None, mine],
            position_ids=positions[None, mine],
            use_cache=False,
            stretch=True,
            **packed_arguments(lengths, device, name=decoder.config._attn_implementation),
        )
    return output.last_hidden_state[0], first


def share_sequences(module: nn.Module, group: dist.ProcessGroup, role: str, tp: int = 1) -> None:
    """Make a model's attention exchange tokens for heads.

    Args:
        module: the model; its attention implementation is changed.
        group: the ranks that share tokens.
        role: the role's name, for messages.
        tp: number of ranks that share the heads already.

    Raises:
        ConfigError: the model or its attention cannot share tokens.
    """
    size, key = group.size(), f"{role}.fsdp.sp"
    if not isinstance(module, PreTrainedModel):
        raise ConfigError(
            f"{key}: only models of transformers are split over tokens, and {type(module).__name__} is none. "
            "Leave it out for this role."
        )
    attention = module.config._attn_implementation
    if attention != "varlen":
        raise ConfigError(f"{key} needs model.attention = 'varlen', got '{attention}'.")
    check_heads(module.config, size, tp, role)
    name = f"varlen_over_{size}"  # the ranks of a process are the same for every model with that size
    register(name, functools.partial(_attention, group))
    module.set_attn_implementation(name)


def check_heads(config: Any, size: int, tp: int, role: str) -> None:
    """Refuse a model whose heads cannot be shared by ``size`` ranks, for each of ``tp`` ranks that share layers.

    ``size`` must divide the query heads, and divide the key-value heads or be a multiple of them.

    Raises:
        ConfigError: the heads cannot be shared.
    """
    text, key = config.get_text_config(decoder=True), f"{role}.fsdp.sp"
    heads = text.num_attention_heads
    shared = getattr(text, "num_key_value_heads", None) or heads
    queries, pairs = heads // tp, max(1, shared // tp)
    fits = [n for n in range(1, queries + 1) if queries % n == 0 and (pairs % n == 0 or n % pairs == 0)]
    if size not in fits:
        over = f", of which {role}.fsdp.tp leaves {queries} and {pairs} to each rank" if tp > 1 else ""
        raise ConfigError(
            f"{key} is {size}, which must divide the model's {heads} query heads, and divide its {shared} key-value "
            f"heads or be a multiple of them{over}. {nearest_fit(size, fits)}"
        )


def _attention(
    group: dist.ProcessGroup,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Call ``varlen``; with ``stretch``, exchange this rank's tokens for all tokens with a share of the heads."""
    if not settings.pop("stretch", False):
        return varlen(module, query, key, value, attention_mask, **settings)
    copies = max(1, group.size() // key.shape[1])  # ranks that need the same key-value head
    if copies > 1:
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    query, key, value = (Exchange.apply(part, group, 1, 2) for part in (query, key, value))
    out, _ = varlen(module, query, key, value, attention_mask, **settings)
    return Exchange.apply(out, group, 1, 2), None
