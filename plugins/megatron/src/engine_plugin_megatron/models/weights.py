"""Weights of megatron-core's models by their names in a Hugging Face folder: loading, gathering, and slices.

Values are only copied, so weights that are loaded and gathered again are bitwise equal under any layout.

mbridge's map is not used. It reads files of whole models, expects Transformer Engine's parameters, and does not give
the slices of which checkpoints are made here. The first tied model also changes it for all models of the process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from engine_core.errors import PluginError
from engine_plugin_megatron.models.layers import padded_vocabulary
from engine_plugin_megatron.models.places import Joined, Piece, Slices, boxes, within

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Whole:
    """A whole parameter, and the ranks that hold it.

    Args:
        joined: the tensors that the parameter is made of.
        stage: rank along the pipeline.
        chunk: number of the chunk within the stage.
        parameter: its name in the chunk.
        holder: rank along ``ep``; None where it is not a weight of an expert.
        copy: the output layer of a tied model, on another stage than the embedding: a copy of that tensor.
    """

    joined: Joined
    stage: int
    chunk: int
    parameter: str
    holder: int | None = None
    copy: bool = False


@dataclass(frozen=True)
class Place:
    """A parameter of this rank.

    Args:
        chunk: number of the chunk that has it.
        parameter: its name in the chunk.
        tensor: the parameter itself.
        pieces: the parts of Hugging Face tensors that it holds.
        writes: this rank writes it to checkpoints: it is the first of the ranks that hold the same values.
    """

    chunk: int
    parameter: str
    tensor: torch.nn.Parameter
    pieces: tuple[Piece, ...]
    writes: bool


def plan(hf_config: PretrainedConfig, config: TransformerConfig, value_head: bool = False) -> Iterator[Whole]:
    """Yield all parameters of the model in the order of its layers, the same on every rank."""
    architecture = config.architecture
    padding = (
        padded_vocabulary(hf_config.vocab_size, config.tensor_model_parallel_size) - hf_config.vocab_size
    )
    pp, vp = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    embedding = architecture.embeds(hf_config, padding)
    yield Whole(embedding, 0, 0, embedding.name)
    in_chunk = config.num_layers // (pp * vp)
    experts = (config.num_moe_experts or 1) // config.expert_model_parallel_size
    for index in range(config.num_layers):
        turn, place = divmod(index, in_chunk)
        for joined in architecture.layer(hf_config, index):
            expert = joined.expert
            holder = None if expert is None else expert // experts
            name = joined.name if expert is None else joined.name.format(expert=expert % experts)
            yield Whole(joined, turn % pp, turn // pp, f"decoder.layers.{place}.{name}", holder)
    for joined in (architecture.ends(hf_config), *_heads(architecture, hf_config, pp, padding, value_head)):
        copy = joined.sections[0][0].name == architecture.embedding
        yield Whole(joined, pp - 1, vp - 1, joined.name, copy=copy)


def _heads(architecture: Any, hf: PretrainedConfig, pp: int, padding: int, value: bool) -> Iterator[Joined]:
    if value:
        yield architecture.scores(hf)
    elif pp > 1 or not hf.tie_word_embeddings:
        yield architecture.speaks(hf, padding)


def names(chunks: Sequence[GPTModel], hf_config: PretrainedConfig) -> list[Place]:
    """Return for each parameter of this rank the parts of Hugging Face tensors that it holds.

    Raises:
        PluginError: the architecture does not describe all parameters, or describes others.
    """
    models = [_unwrapped(chunk) for chunk in chunks]
    owned = [dict(model.named_parameters()) for model in models]
    stage = parallel_state.get_pipeline_model_parallel_rank()
    expert_rank = parallel_state.get_expert_model_parallel_rank()
    found = []
    for whole in plan(hf_config, models[0].config, models[0].value_head):
        if whole.stage != stage or whole.holder not in (None, expert_rank):
            continue
        group = _sharing(whole)
        rank = group.rank()
        tensor = owned[whole.chunk].pop(whole.parameter, None)
        shape = whole.joined.local_shape(group.size())
        if tensor is None or tuple(tensor.shape) != shape:
            has = "there is none" if tensor is None else f"it has {list(tensor.shape)}"
            raise PluginError(
                f"Architecture '{hf_config.model_type}' tells a parameter '{whole.parameter}' of shape {list(shape)}; {has}."
            )
        first = _copies(whole).rank() == 0 and (whole.joined.split is not None or rank == 0)
        pieces = whole.joined.pieces(group.size(), rank)
        found.append(Place(whole.chunk, whole.parameter, tensor, pieces, first and not whole.copy))
    if left := [name for parameters in owned for name in parameters]:
        raise PluginError(f"Architecture '{hf_config.model_type}' does not tell parameter '{left[0]}'.")
    return found


@torch.no_grad()
def load(
    chunks: Sequence[GPTModel],
    hf_config: PretrainedConfig,
    read: Callable[[str, Slices], Tensor],
    mix: float = 1.0,
) -> None:
    """Fill this rank's parameters. Padding rows become zero. Not collective.

    Args:
        chunks: this rank's chunks.
        hf_config: the model's config.
        read: returns a part of one tensor ``[D1, ..., Dn]`` of a Hugging Face state dict. It is called with a name once for each
            parameter that holds a part of the tensor.
        mix: share of the new values; the rest is kept of the old ones.

    Raises:
        DataError: a tensor has another shape; tensors before it were stored.
    """
    for place in names(chunks, hf_config):
        fill(place.tensor, place, read, mix)


def wanted(chunks: Sequence[GPTModel], hf_config: PretrainedConfig) -> Counter[str]:
    """Return how often ``load`` reads each Hugging Face tensor."""
    return Counter(name for place in names(chunks, hf_config) for name in boxes(place.pieces))


@torch.no_grad()
def fill(target: Tensor, place: Place, read: Callable[[str, Slices], Tensor], mix: float = 1.0) -> None:
    """Fill a tensor that is sharded like a parameter: the parameter itself, or optimizer state.

    Args:
        target: a tensor in this rank's shape of the parameter (e.g. [OUT / ranks, IN]).
        place: the parameter's place.
        read: as in ``load``.
        mix: as in ``load``.

    Raises:
        DataError: a tensor that was read has another shape.
    """
    if mix == 1.0:
        target.zero_()  # rows of padding
    for name, (box, pieces) in boxes(place.pieces).items():
        part = read(name, box).to(target)
        for piece in pieces:
            new = part[within(piece.at, box)]
            target[piece.here].copy_(new) if mix == 1.0 else target[piece.here].lerp_(new, mix)


def parts(
    place: Place, tensor: Tensor | None = None
) -> Iterator[tuple[str, tuple[int, ...], list[int], Tensor]]:
    """Yield the parts of Hugging Face tensors in a parameter, for a file of slices (``engine_plugin_torch.shards``).

    Args:
        place: the parameter's place.
        tensor: a tensor in this rank's shape of the parameter (e.g. [OUT / ranks, IN]), such as optimizer state; by
            default the parameter.

    Yields:
        Hugging Face name, shape of the whole tensor, where the part begins in it, the part (a copy).
    """
    tensor = place.tensor.detach() if tensor is None else tensor
    for name, (box, pieces) in boxes(place.pieces).items():
        part = tensor.new_empty([s.stop - s.start for s in box])
        for piece in pieces:
            part[within(piece.at, box)] = tensor[piece.here]
        yield name, pieces[0].shape, [s.start for s in box], part


@torch.no_grad()
def stream(
    chunks: Sequence[GPTModel],
    hf_config: PretrainedConfig,
    of: Callable[[torch.nn.Parameter], Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors by their Hugging Face names, on every rank; tied tensors once.

    Only one parameter's tensors are in memory at a time. Collective: every rank of the model must read it to its end.

    Args:
        chunks: this rank's chunks.
        hf_config: the model's config.
        of: returns the tensor to gather for a parameter, such as its gradient; by default its values.
        dtype: type of the gathered tensors; by default that of the parameters.

    Yields:
        Name, and the tensor in its whole shape (e.g. [OUT, IN]).
    """
    models = [_unwrapped(chunk) for chunk in chunks]
    config = models[0].config
    device = next(models[0].parameters()).device
    owned = [dict(model.named_parameters()) for model in models]
    for whole in plan(hf_config, config, models[0].value_head):
        if whole.copy:
            continue
        size = 1 if whole.joined.split is None else _sharing(whole).size()
        gathered = torch.empty(
            (size, *whole.joined.local_shape(size)), dtype=dtype or config.params_dtype, device=device
        )
        if _holds(whole):
            parameter = owned[whole.chunk][whole.parameter]
            local = parameter.detach() if of is None else of(parameter)
            _gather(gathered, local.contiguous(), whole)
        _spread(gathered, whole)
        yield from _assembled(gathered, whole.joined, size)


def _assembled(gathered: Tensor, joined: Joined, size: int) -> Iterator[tuple[str, Tensor]]:
    found: dict[str, Tensor] = {}
    for rank in range(size):
        for piece in joined.pieces(size, rank):
            if piece.name not in found:
                found[piece.name] = gathered.new_empty(piece.shape)
            found[piece.name][piece.at] = gathered[rank][piece.here]
    yield from found.items()


def _gather(gathered: Tensor, local: Tensor, whole: Whole) -> None:
    if len(gathered) == 1:
        gathered[0] = local
    else:
        dist.all_gather_into_tensor(gathered.flatten(0, 1), local, group=_sharing(whole))  # a view


def _spread(gathered: Tensor, whole: Whole) -> None:
    """Broadcast a parameter to ranks that hold no part of it: to those of other experts, then to other stages."""
    stage = parallel_state.get_pipeline_model_parallel_group()
    experts = parallel_state.get_expert_model_parallel_group()
    if whole.holder is not None and experts.size() > 1 and stage.rank() == whole.stage:
        dist.broadcast(gathered, dist.get_global_rank(experts, whole.holder), group=experts)
    if stage.size() > 1:
        dist.broadcast(gathered, dist.get_global_rank(stage, whole.stage), group=stage)


def _holds(whole: Whole) -> bool:
    mine = parallel_state.get_pipeline_model_parallel_rank() == whole.stage
    return mine and whole.holder in (None, parallel_state.get_expert_model_parallel_rank())


def _sharing(whole: Whole) -> Any:
    """Return the group over which the parameter is cut."""
    if whole.holder is None:
        return parallel_state.get_tensor_model_parallel_group()
    return parallel_state.get_expert_tensor_parallel_group()


def _copies(whole: Whole) -> Any:
    """Return the group of ranks that hold the same part."""
    if whole.holder is None:
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_expert_data_parallel_group()


def _unwrapped(chunk: Any) -> Any:
    """Return the model inside wrappers of data parallelism and 16-bit types."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk
