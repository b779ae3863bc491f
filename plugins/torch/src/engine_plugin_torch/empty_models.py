"""The model of a role without its weights, so that it can be sharded before anything is read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from engine_core.model_config import load_hf_config
from engine_plugin_torch.value_models import VALUE_ROLES, value_class

if TYPE_CHECKING:
    from engine_core.config import ModelConfig


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
    return AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code, **settings)


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
