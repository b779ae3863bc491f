"""Models without weights: the model of a role before it is read, and the skeleton of a module before sharding.

A sampler uses a skeleton (names, shapes and code) with whole weights put in for a while; exports use its names and
config. A model that is built without weights can be sharded before anything is read.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from engine_core.model_config import load_hf_config
from engine_plugin_torch.model_loading import read_generation_config
from engine_plugin_torch.value_models import VALUE_ROLES, value_class

if TYPE_CHECKING:
    from engine_core.config import ModelConfig


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


def blank_model(model: ModelConfig, role: str, dtype: torch.dtype) -> nn.Module:
    """Build the module of ``[model]`` for a role with parameters on ``meta`` and real buffers."""
    with empty_parameters():
        return fresh_model(model, role, dtype)


def fresh_model(model: ModelConfig, role: str, dtype: torch.dtype) -> nn.Module:
    """Build the module of ``[model]`` for a role with the initial weights of its code."""
    config: Any = load_hf_config(model)
    settings = {"attn_implementation": model.attention, "dtype": dtype}
    if role in VALUE_ROLES:
        config.num_labels = 1
        kind: Any = value_class(config)
        return kind._from_config(config, **settings)
    module = AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code, **settings)
    read_generation_config(module, model.path)
    return module


@contextlib.contextmanager
def empty_parameters() -> Iterator[None]:
    """Put every parameter that a module registers within the context on ``meta``; buffers stay real."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """Register the parameter on ``meta``."""
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
