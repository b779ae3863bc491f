"""The Hugging Face config of a model folder or hub name, with the changes of ``[model] override``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig

from engine_core.errors import NO_HUB, ConfigError, did_you_mean

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from engine_core.config import ModelConfig

log = logging.getLogger("engine")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""The fields of configs that have the number of experts."""
VALUE_HEAD = "score"
"""The attribute name of the head for values and scores in transformers models."""


def load_hf_config(model: ModelConfig) -> PretrainedConfig:
    """Return the model's config with ``[model] override`` applied.

    Raises:
        ConfigError: the path, the config or ``override`` cannot be used.
    """
    if not model.path:
        raise ConfigError(
            "model.path is empty. Give a folder in the layout of save_pretrained, or a hub name."
        )
    looks_local = model.path.startswith((".", "/", "~")) or model.path.count("/") > 1
    if looks_local and not Path(model.path).is_dir():
        raise ConfigError(
            f"model.path '{model.path}' is not a folder. Expected one with a config.json, or a hub name."
        )
    if model.trust_remote_code:
        log.warning("model.trust_remote_code: Python code of '%s' is executed with your rights.", model.path)
    try:
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except OSError as error:
        raise ConfigError(unreadable(model.path, error)) from error
    except Exception as error:  # the config classes validate with several exception types
        if "trust_remote_code" not in str(error):
            raise ConfigError(
                f"model.path '{model.path}' has a config that fails: {first_line(error)}"
            ) from error
        raise ConfigError(
            f"model.path '{model.path}' needs custom Python code. "
            "Read that code, then set model.trust_remote_code = true."
        ) from error
    return _overridden(config, model.override)


def is_dense(config: Mapping[str, Any]) -> bool:
    """Return whether each layer of a decoder is attention and a feed-forward, without experts, by its text config."""
    sparse = any(config.get(name) for name in EXPERTS)
    return not sparse and {*(config.get("layer_types") or ())} <= {"full_attention", "sliding_attention"}


def has_no_weights(path: str) -> bool:
    """Return whether a model folder has a config and no weights; False for a hub name.

    Raises:
        ConfigError: the only weights are a pickle.
    """
    folder = Path(path)
    if not folder.is_dir():
        return False
    if any(folder.glob("*.safetensors")):
        return False
    pickled = next((p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern)), None)
    if pickled:
        raise ConfigError(
            f"model.path '{path}' has weights as a pickle ({pickled}) only, which is not opened. "
            "Convert them to safetensors (save_pretrained writes that)."
        )
    return True


def unreadable(path: str, error: Exception) -> str:
    """Return the message for a model that cannot be read."""
    hint = "" if Path(path).is_dir() else NO_HUB
    return f"model.path '{path}' cannot be read: {first_line(error)}{hint}"


def _overridden(config: PretrainedConfig, override: Mapping[str, Any]) -> PretrainedConfig:
    if not override:
        return config
    values = _merged(config.to_dict(), override, "model.override")
    layers, count = values.get("layer_types"), values.get("num_hidden_layers")
    if layers and count and "layer_types" not in override and len(layers) > count:
        values["layer_types"] = layers[:count]
    try:
        return type(config).from_dict(values)
    except Exception as error:  # the config classes validate with several exception types
        reason = " ".join(str(error).split())
        raise ConfigError(f"model.override is refused by {type(config).__name__}: {reason}") from error


def _merged(values: dict[str, Any], changes: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return ``values`` updated with ``changes``; tables are merged, RoPE keys go to ``rope_parameters``."""
    merged = dict(values)
    rope = values.get("rope_parameters")
    for name, value in changes.items():
        if name in values and isinstance(value, Mapping) and isinstance(values[name], dict):
            merged[name] = _merged(values[name], value, f"{key}.{name}")
        elif name in values:
            merged[name] = value
        elif isinstance(rope, dict) and name in rope:
            merged["rope_parameters"] = {**merged["rope_parameters"], name: value}
        else:
            known = {*values, *(rope if isinstance(rope, dict) else ())}
            raise ConfigError(f"Unknown key in {key}: '{name}'." + did_you_mean(name, known))
    return merged


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, and the second line if the first ends with a colon."""
    lines = str(error).splitlines() or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])
