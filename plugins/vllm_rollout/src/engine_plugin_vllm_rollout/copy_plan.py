"""The copies by which vLLM loads weights: recorded once, then done in one call.

``load_weights`` of a model finds for each name its part of a fused parameter, in Python, a layer at a time; for small
models that takes longer than the copy itself. Where kernels read weights as they come, all it does with a tensor is
``parameter_slice.copy_(tensor_slice)``. A dispatch mode of torch records these pairs of slices as a plan; a later
bucket is then one ``torch._foreach_copy_``.

A weight that is transformed before it is copied (transposed into new memory, quantized, interleaved) has no plan and
goes through ``load_weights`` every time.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Named = Sequence[tuple[str, Tensor]]
Layout = tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, size, stride; in values


@dataclass
class Placed:
    """One weight: slices of parameters, and the slices of the weight that they are copies of."""

    shape: torch.Size
    pairs: list[tuple[Tensor, Layout]] = field(default_factory=list)


class CopyPlan:
    """The copy plan of one model.

    Args:
        module: the vLLM model, with ``load_weights``.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._placed: dict[str, Placed] = {}
        self._seen: set[str] = set()  # names that were watched
        self._addresses = self._now()

    @property
    def names(self) -> set[str]:
        """Weights that are copied without ``load_weights``."""
        return set(self._placed)

    @torch.no_grad()
    def load(self, bucket: Named) -> None:
        """Put these weights into the model, as ``load_weights`` does."""
        if self._now() != self._addresses:  # parameters were replaced: what was seen is of the old ones
            self._placed.clear()
            self._seen.clear()
            self._addresses = self._now()
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        others: list[tuple[str, Tensor]] = []
        for name, tensor in bucket:
            placed = self._placed.get(name)
            if placed is None or placed.shape != tensor.shape or not tensor.is_contiguous():
                others.append((name, tensor))
                continue
            for target, (offset, size, stride) in placed.pairs:
                targets.append(target)
                sources.append(tensor.as_strided(size, stride, tensor.storage_offset() + offset))
        if targets:
            torch._foreach_copy_(targets, sources)
        if others:
            self._load_and_watch(others)

    def _load_and_watch(self, weights: Named) -> None:
        new = [(name, tensor.contiguous()) for name, tensor in weights if name not in self._seen]
        known = [(name, tensor) for name, tensor in weights if name in self._seen]
        loader: Any = self._module
        if known:
            loader.load_weights(iter(known))
        if not new:
            return
        watch = _Watch(self._module, new)
        with watch:
            loader.load_weights(iter(new))
        self._seen |= {name for name, _ in new}
        self._placed |= watch.plan()

    def _now(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in _tensors(self._module)}


class _Watch(TorchDispatchMode):
    """A dispatch mode that records every copy between weights and parameters, and all other operations on either.

    Weights are identified by their addresses, since those of a bucket may be views of one memory.

    Args:
        module: the module whose parameters are written.
        weights: contiguous tensors, by name.
    """

    def __init__(self, module: nn.Module, weights: Named) -> None:
        super().__init__()
        self._parameters = {_memory(tensor) for _, tensor in _tensors(module)}
        self._weights = sorted((t.data_ptr(), name, t) for name, t in weights if t.numel())
        self._starts = [start for start, _, _ in self._weights]
        self._placed = {name: Placed(tensor.shape) for name, tensor in weights}
        self._strange: set[int] = set()  # memory of parameters that were written in another way too

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._copied(args[0], args[1])
            return found
        tensors = [tensor for tensor in _in([*args, *(kwargs or {}).values()]) if tensor.numel()]
        if func._schema.is_mutable:
            self._strange |= {_memory(tensor) for tensor in tensors} & self._parameters
        made = {_memory(tensor) for tensor in _in([found])}
        for tensor in tensors:  # what is no view makes something new of the weight
            if made and _memory(tensor) not in made and (at := self._weight_at(tensor)) is not None:
                self._placed.pop(at[0], None)
        return found

    def _copied(self, target: Tensor, source: Tensor) -> None:
        at = self._weight_at(source)
        if at is None or at[0] not in self._placed:
            return
        name, weight = at
        if _memory(target) not in self._parameters:
            del self._placed[name]
            return
        offset = (source.data_ptr() - weight.data_ptr()) // weight.element_size()
        whole = source.expand(target.shape)
        layout = offset, tuple(whole.shape), tuple(whole.stride())
        self._placed[name].pairs.append((target.detach(), layout))

    def _weight_at(self, tensor: Tensor) -> tuple[str, Tensor] | None:
        """The weight that this is a part of."""
        number = bisect.bisect_right(self._starts, tensor.data_ptr()) - 1
        if number < 0 or not tensor.numel():
            return None
        start, name, weight = self._weights[number]
        inside = tensor.data_ptr() < start + weight.numel() * weight.element_size()
        return (name, weight) if inside and tensor.device == weight.device else None

    def plan(self) -> dict[str, Placed]:
        """Weights of which nothing else was seen than copies of slices into parameters that nothing else wrote."""
        return {
            name: placed
            for name, placed in self._placed.items()
            if placed.pairs and not self._strange.intersection(_memory(target) for target, _ in placed.pairs)
        }


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _memory(tensor: Tensor) -> int:
    """The same for all views of one memory."""
    return tensor.untyped_storage().data_ptr()


def _in(values: Any) -> Iterator[Tensor]:
    """Tensors among arguments, lists of them included."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _in(value)
