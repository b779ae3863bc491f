"""The builder of an engine's model: the device it is read on, its type, its attention and its placement."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from engine_core.errors import ConfigError
from engine_core.model_config import VALUE_HEAD as HEAD
from engine_core.model_config import load_hf_config
from engine_plugin_torch.attention import choose_attention, with_attention
from engine_plugin_torch.model_loading import adopt_live, cast_parameters, load_model
from engine_plugin_torch.quantize_model import quantize
from engine_plugin_torch.value_models import VALUE_ROLES, load_value_model

if TYPE_CHECKING:
    from torch import nn

    from engine_core.config import ModelConfig
    from engine_plugin_torch.engine import TorchEngine

log = logging.getLogger("engine")


class ModelBuilder:
    """The part of an engine that builds its bare model. A backend overrides how the model is read and placed.

    Attributes:
        engine: the engine that this is a part of; a weak reference, so the engine is freed without a cycle.
    """

    engine: TorchEngine

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = weakref.proxy(engine)

    def build(self, model: ModelConfig, options: Any) -> nn.Module:
        """Return the model of ``[model]``: built by a plugin, given from Python, or read from its folder."""
        engine = self.engine
        # a plugin passes the attention's name to transformers, which has no "auto"; the model is not known yet
        asked = with_attention(model, None, engine.device)
        module: nn.Module | None = engine._steps.engine_build_model(
            role=engine.context.role, model_config=asked, options=options
        )
        live = (engine.context.live or {}).get("model") if engine.config.path is None else None
        return self.load(self._choose_attention(model, live), live) if module is None else module

    def _choose_attention(self, model: ModelConfig, live: nn.Module | None) -> ModelConfig:
        """Return ``[model]`` with the attention that this role gets."""
        if live is not None and not isinstance(live, PreTrainedModel):
            return model
        config: Any = None
        if live is not None or model.attention == "auto":
            config = load_hf_config(model) if live is None else live.config
        name, why = choose_attention(model.attention, config, self.engine.device)
        log.info("%s: attention '%s': %s.", self.engine.context.role, name, why)
        return model.model_copy(update={"attention": name})

    def load(self, model: ModelConfig, live: nn.Module | None) -> nn.Module:
        """Read the model of ``[model]``, or take the one given from Python, as this role needs it.

        Raises:
            ConfigError: an actor given from Python would be quantized.
        """
        engine, role = self.engine, self.engine.context.role
        device = self.load_device
        if role in VALUE_ROLES:
            return load_value_model(model, device, engine.precision.param, live)
        if live is not None:
            if engine.quantize and role == "actor":
                raise ConfigError(
                    f"{engine._table}.quantize: a model given from Python is the caller's, and would lose "
                    "its own weights. Save it and name the folder (model.path), or leave the key out."
                )
            return adopt_live(live, model, role, device)
        return load_model(model, device, engine.precision.param)

    @property
    def load_device(self) -> torch.device:
        """Device that a model is read to; the CPU before quantization, which moves one layer at a time."""
        return torch.device("cpu") if self.engine.quantize else self.engine.device

    def place(self, module: nn.Module) -> nn.Module:
        """Cast a model, move it to its device, and quantize its frozen layers if ``quantize`` is set."""
        engine = self.engine
        module = cast_parameters(module, engine.precision.param)
        if not engine.quantize:
            return module.to(engine.device)
        whole = [HEAD, *(engine.config.lora.modules_to_save if engine.config.lora else ())]
        engine.change = quantize(module.to("cpu"), engine.quantize, engine.device, engine._table, whole)
        log.info("%s: %s, %s", engine.context.role, engine.quantize, engine.change)
        return module
