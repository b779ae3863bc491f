"""The skeleton of a model: names, shapes and code of the module before sharding, without weights.

A sampler uses it with whole weights put in for a while; exports use its names and config.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn


class Skeleton:
    """A copy of a module with parameters on ``meta``.

    Args:
        module: the module before it is sharded; its buffers are copied.
        device: device of the buffers.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        empty = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=False) for p in module.parameters()}
        self.module = copy.deepcopy(module, dict(empty)).eval()
        for part in self.module.modules():
            for name, buffer in part._buffers.items():
                part._buffers[name] = None if buffer is None else buffer.to(device)
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        for part in self.module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    self._places.setdefault(id(parameter), []).append((part, name))
        self._empty = {id(p): p for p in self.module.parameters()}

    @contextlib.contextmanager
    def filled(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[nn.Module]:
        """Yield the module with these weights ``[D0, ...]``, given by its own names, tied ones once."""
        own = dict(self.module.named_parameters())
        buffers = dict(self.module.named_buffers())
        try:
            for name, tensor in weights:
                if name in own:
                    self._put(own[name], nn.Parameter(tensor, requires_grad=False))
                else:
                    buffers[name].copy_(tensor)
            yield self.module
        finally:
            for parameter in self._empty.values():
                self._put(parameter, parameter)

    def _put(self, empty: nn.Parameter, parameter: nn.Parameter) -> None:
        for part, name in self._places[id(empty)]:
            part._parameters[name] = parameter
