"""The default model of a role: a Hugging Face folder or name, a config alone, or a live object."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from engine_core.errors import ConfigError, DataError
from engine_core.model_config import has_no_weights, load_hf_config, unreadable
from engine_plugin_torch.attention_choice import choose_attention, with_attention
from engine_plugin_torch.lora import base_copy

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

    from engine_core.config import ModelConfig
    from engine_core.contracts.engines import RolloutEngine

log = logging.getLogger("engine")
CPU = torch.device("cpu")
DRAWS = frozenset({"cuda", "xpu"})  # devices whose generators can be set and put back
transformers_logging.disable_progress_bar()  # its bars would run through our own display


def load_model(
    model: ModelConfig, device: torch.device, dtype: torch.dtype, placing: Mapping[str, Any] | None = None
) -> nn.Module:
    """``AutoModelForCausalLM`` from ``[model]``, on ``device``, or where ``placing`` puts it.

    A folder with a config and no weights gives random weights from `model.seed`, drawn on ``device``: the same in every
    type and at every time, but other ones on another kind of device, whose generator is another.

    Args:
        placing: ``SpreadModel.arguments`` of a model over several devices.

    Raises:
        ConfigError: the path, an override, the attention or the folder's own code is refused.
        DataError: weights are missing, left over or of another shape.
    """
    config = load_hf_config(model)
    model = with_attention(model, config, device)
    if has_no_weights(model.path):
        refuse_to_place(model.path, placing)
        built = cast_parameters(random_model(config, model, device), dtype)
    else:
        built, _ = load_weights(AutoModelForCausalLM, config, model, dtype, placing=placing)
    return built if placing else built.to(device)


def sampler_module(sampler: RolloutEngine, device: torch.device, dtype: torch.dtype) -> nn.Module | None:
    """The actor's module as a plugin builds it for a sampler with weights of its own, ready to sample from.

    Returns:
        None where no plugin builds it: the model is that of ``[model]``.
    """
    built = sampler.custom_module(with_attention(sampler.model_config, None, device))
    return None if built is None else cast_parameters(built, dtype).to(device).eval()


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Give the parameters another type in place; buffers (RoPE frequencies) keep theirs."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return module


def random_model(config: PretrainedConfig, model: ModelConfig, device: torch.device = CPU) -> PreTrainedModel:
    """A model with weights from `model.seed`, float32, drawn on ``device``; torch's random state is left alone.

    Drawing 8 billion numbers takes minutes on a CPU and a second on an accelerator. Weights of one seed differ by kind
    of device.
    """
    where = device if device.type in DRAWS else CPU
    forked = torch.random.fork_rng(devices=[] if where is CPU else [where], device_type=where.type)
    with forked, where:
        torch.manual_seed(model.seed)
        return AutoModelForCausalLM.from_config(
            config,
            attn_implementation=model.attention,
            dtype=torch.float32,
            trust_remote_code=model.trust_remote_code,
        )


def adopt_live(module: nn.Module, model: ModelConfig, role: str, device: torch.device) -> nn.Module:
    """A model given from Python: the actor trains that object, other roles get a copy of it."""
    if isinstance(module, PreTrainedModel):
        module.set_attn_implementation(choose_attention(model.attention, module.config, device)[0])
    return module if role == "actor" else base_copy(module)


def refuse_to_place(path: str, placing: Mapping[str, Any] | None) -> None:
    """Refuse to spread over devices what no folder holds.

    Raises:
        ConfigError: it was asked for.
    """
    if placing:
        raise ConfigError(
            f"device_map: '{path}' holds a config and no weights, so there is nothing to place. Give a folder with "
            "weights, or leave the key out."
        )


def load_weights(
    kind: Any,
    config: PretrainedConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    absent: tuple[str, ...] = (),
    unused: tuple[str, ...] = (),
    placing: Mapping[str, Any] | None = None,
) -> tuple[PreTrainedModel, list[str]]:
    """A model with the weights of a folder.

    Args:
        kind: a class with ``from_pretrained``.
        config: with overrides applied.
        model: ``[model]``.
        dtype: of the parameters.
        absent: modules whose weights the folder need not have.
        unused: modules whose weights it may have and the model not.
        placing: as for ``load_model``.

    Returns:
        The model, and the names that were absent: their values are arbitrary.

    Raises:
        ConfigError: the folder cannot be read.
        DataError: weights are missing, left over or of another shape.
    """
    built: PreTrainedModel
    info: dict[str, Any]
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its report of what does not fit: ours is below
    try:
        built, info = kind.from_pretrained(
            model.path,
            config=config,
            attn_implementation=model.attention,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=model.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported below, by name
            **(placing or {}),
        )
    except (OSError, SafetensorError) as error:
        raise ConfigError(damaged_file(model.path) or unreadable(model.path, error)) from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    fresh = [str(name) for name in info["missing_keys"] if _module(name) in absent]
    free = {"missing_keys": absent, "unexpected_keys": unused, "mismatched_keys": ()}
    found = {
        key: sorted(str(name) for name in info[key] if _module(name) not in modules)
        for key, modules in free.items()
    }
    words = {
        "missing_keys": "not in the folder",
        "unexpected_keys": "not in the model",
        "mismatched_keys": "of another shape",
    }
    problems = [f"{words[key]}: {_some(names)}" for key, names in found.items() if names]
    if problems:
        raise DataError(
            f"The weights of '{model.path}' do not fit {type(built).__name__}: {'; '.join(problems)}. "
            "Is model.override right, or is it a folder of another model?"
        )
    return built, fresh


def damaged_file(path: str) -> str:
    """Return what is wrong with the first weight file of a folder that is no safetensors file; "" where all are."""
    for file in sorted(Path(path).glob("*.safetensors")):
        try:
            with safe_open(str(file), "pt"):
                pass
        except (OSError, SafetensorError) as error:
            return (
                f"model.path: {file} is no whole safetensors file ({error}). Take another copy of the model."
            )
    return ""


def _module(name: object) -> str:
    """The module of a weight at the top: ``score`` of ``score.weight``."""
    return str(name).partition(".")[0]


def _some(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
