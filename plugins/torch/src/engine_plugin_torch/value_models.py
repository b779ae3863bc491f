"""Models with a value head: the critic, which predicts returns, and the reward model, which scores.

The head is one linear layer without bias on the last hidden states, called ``score`` as in transformers'
``...ForSequenceClassification``. A folder of such a model (one label) is loaded with its head. A folder of a
language model gets a fresh head, and its ``lm_head`` is not loaded. Where transformers has no such class for a
family, this module builds it from the family's parts.

Not supported: families that transformers does not know. A plugin builds those (``engine_build_model``).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification

from engine_core.errors import ConfigError
from engine_core.model_config import VALUE_HEAD as HEAD
from engine_core.model_config import load_hf_config as load_config
from engine_plugin_torch.attention import with_attention
from engine_plugin_torch.lora import base_copy
from engine_plugin_torch.model_loading import (
    cast_parameters,
    has_no_weights,
    load_weights,
    random_model,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from engine_core.config import ModelConfig

log = logging.getLogger("engine")

VALUE_ROLES = frozenset({"critic", "reward_model"})
"""Roles whose model has a value head and no use for a language-model head."""

LANGUAGE_HEADS = ("lm_head", "embed_out")


def load_value_model(
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    live: nn.Module | None = None,
) -> nn.Module:
    """Load the model of a value role to ``device``.

    Args:
        model: ``[model]``, with the role's path.
        device: the device of the model.
        dtype: type of the parameters, including the head's.
        live: a model given from Python; its decoder is copied.

    Raises:
        ConfigError: transformers knows no decoder of the family.
        DataError: as for ``load_model``.
    """
    if live is not None:
        if not isinstance(live, PreTrainedModel):
            raise ConfigError(
                f"A value head cannot be put on {type(live).__name__}, which is no transformers model. "
                "Give the role a separate path, or build it in a plugin (engine_build_model)."
            )
        return with_value_head(base_copy(live), model.seed).to(device)  # type: ignore[arg-type]
    config = load_config(model)
    model = with_attention(model, config, device)
    if has_no_weights(model.path):
        built = with_value_head(random_model(config, model, device), model.seed)
        return cast_parameters(built, dtype).to(device)
    config.num_labels = 1
    kind = value_class(config)
    built, fresh = load_weights(kind, config, model, dtype, absent=(HEAD,), unused=LANGUAGE_HEADS)
    if fresh:
        log.info("%s has no value head: a fresh one from model.seed %d.", model.path, model.seed)
        reset_head(getattr(built, HEAD), model.seed)
    return built.to(device)  # type: ignore[arg-type]


def with_value_head(module: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Build a model from the decoder of ``module`` (not a copy) and a fresh head."""
    module.config.num_labels = 1
    kind = value_class(module.config)
    with torch.device("meta"):
        built = kind(module.config)
    setattr(built, built.base_model_prefix, module.base_model)
    weight = next(module.parameters())
    head = nn.Linear(getattr(built, HEAD).in_features, 1, bias=False, dtype=weight.dtype)
    reset_head(head, seed)
    setattr(built, HEAD, head.to(weight.device))
    return built


def value_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class of a family's models with a head called ``score``.

    Raises:
        ConfigError: transformers knows no decoder of the family.
    """
    known: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if known is not None and issubclass(known, GenericForSequenceClassification):
        return cast("type[PreTrainedModel]", known)
    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if causal is None:
        raise ConfigError(
            f"{type(config).__name__} is of no family whose decoder transformers knows, so it gets no value head. "
            "Build the role in a plugin (engine_build_model)."
        )
    family = next(cls for cls in causal.__mro__ if cls.__name__.endswith("PreTrainedModel"))
    name = causal.__name__.replace("ForCausalLM", "").replace("LMHeadModel", "") + "ForSequenceClassification"
    own = {"base_model_prefix": family.base_model_prefix, "__module__": family.__module__}
    return type(name, (GenericForSequenceClassification, family), own)


def reset_head(head: nn.Linear, seed: int) -> None:
    """Draw the head from N(0, 1 / (H + 1)^2); https://arxiv.org/abs/2009.01325 has the larger variance 1 / (H + 1)."""
    generator = torch.Generator().manual_seed(seed)
    fresh = torch.empty(head.weight.shape).normal_(0.0, 1 / (head.in_features + 1), generator=generator)
    with torch.no_grad():
        head.weight.copy_(fresh)
