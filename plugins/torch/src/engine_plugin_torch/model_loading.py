"""The default model of a role: a Hugging Face folder or name, a config without weights, or a live object."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from engine_core.errors import ConfigError, DataError
from engine_core.model_config import has_no_weights, load_hf_config, unreadable
from engine_plugin_torch.attention import choose_attention, with_attention
from engine_plugin_torch.lora import base_copy

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

    from engine_core.config import ModelConfig
    from engine_core.contracts.engines import RolloutEngine

log = logging.getLogger("engine")
CPU = torch.device("cpu")
DRAWS = frozenset({"cuda", "xpu"})  # devices whose generators can be seeded and restored
transformers_logging.disable_progress_bar()  # its bars would break the display of this project


def load_model(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Load ``AutoModelForCausalLM`` from ``[model]`` to ``device``.

    A folder with a config and no weights gives random weights from `model.seed`, drawn on ``device``. They are the same
    for every type, but differ between kinds of devices, which have different generators.

    Args:
        model: the ``[model]`` table.
        device: the device of the model.
        dtype: type of the parameters.

    Raises:
        ConfigError: the path, an override, the attention or the folder's own code is refused.
        DataError: weights are missing, unknown or of another shape.
    """
    config = load_hf_config(model)
    model = with_attention(model, config, device)
    if has_no_weights(model.path):
        return cast_parameters(random_model(config, model, device), dtype).to(device)
    return load_weights(AutoModelForCausalLM, config, model, dtype)[0].to(device)  # type: ignore[arg-type]


def load_changed_model(
    model: ModelConfig,
    *changes: Callable[[Any], nn.Module | None],
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Load the ordinary model of ``[model]`` and change it, or load what ``engine export`` wrote of such a model.

    As with ``from_pretrained``, a weight whose name the folder has is loaded, also into a module that replaces another.

    Args:
        model: the ``[model]`` table. Its folder has the weights of the ordinary model, none, or those of the model after any
            of the changes: a critic around a changed actor can begin from the export of that actor.
        changes: in their order. Each adds or replaces modules in place, or returns a new module around the model's parts, such
            as a critic. New weights that they draw are those of `model.seed`.
        device: the device of the model.
        dtype: type of the parameters.

    Raises:
        ConfigError: as :func:`load_model`.
        DataError: the weights fit neither the ordinary model nor the model after a change.
    """
    files = sorted(Path(model.path).glob("*.safetensors"))
    if damaged := damaged_file(model.path):
        raise ConfigError(damaged)
    saved = {name: shape for file in files for name, shape in _shapes(file).items()}
    config = load_hf_config(model)
    with torch.device("meta"):
        ordinary = AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)
    complete = saved.items() <= _state_shapes(ordinary).items()  # the weights are in the model
    built: Any = (
        load_model(model, device, dtype)
        if complete
        else random_model(config, with_attention(model, config, device), device)
    )
    unfit: dict[str, set[str]] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(model.seed)
        for change in changes:
            loaded = built.state_dict()
            changed = change(built)
            built = built if changed is None else changed
            shapes = _state_shapes(built)
            if complete:
                same = {name: weight for name, weight in loaded.items() if shapes.get(name) == weight.shape}
                built.load_state_dict(same, strict=False)
                continue
            unfit = {
                "not in the folder": {name for name, _ in built.named_parameters()} - saved.keys(),
                "not in the model": saved.keys() - shapes.keys(),
                "of another shape": {n for n in saved.keys() & shapes.keys() if saved[n] != shapes[n]},
            }
            if complete := not any(unfit.values()):
                for file in files:
                    built.load_state_dict(load_file(file), strict=False)
    if not complete:
        _refuse_unfit(model.path, built, unfit)
    return cast_parameters(built, dtype).to(device)


def sampler_module(sampler: RolloutEngine, device: torch.device, dtype: torch.dtype) -> nn.Module | None:
    """Build the actor's module through a plugin, for a sampler that has separate weights.

    Returns:
        The module in eval mode; None where no plugin builds it, and the model is that of ``[model]``.
    """
    built = sampler.custom_module(with_attention(sampler.model_config, None, device))
    return None if built is None else cast_parameters(built, dtype).to(device).eval()


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast floating-point parameters in place and return the module; buffers (RoPE frequencies) keep their type."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return module


def accepts(module: nn.Module, argument: str) -> bool:
    """Return whether a module is a model of transformers whose ``forward`` names this argument.

    Subclasses of ``PreTrainedModel`` that do not are called as other modules: with ``input_ids`` and ``position_ids`` alone.
    """
    return (
        isinstance(module, PreTrainedModel) and argument in inspect.signature(type(module).forward).parameters
    )


def random_model(config: PretrainedConfig, model: ModelConfig, device: torch.device = CPU) -> PreTrainedModel:
    """Build a model with float32 weights from `model.seed`, drawn on ``device``; torch's random state does not change.

    Drawing 8 billion numbers takes minutes on a CPU and a second on an accelerator. Weights of one seed differ between
    kinds of devices.
    """
    where = device if device.type in DRAWS else CPU
    forked = torch.random.fork_rng(devices=[] if where is CPU else [where], device_type=where.type)
    with forked, where:
        torch.manual_seed(model.seed)
        module: PreTrainedModel = AutoModelForCausalLM.from_config(
            config,
            attn_implementation=model.attention,
            dtype=torch.float32,
            trust_remote_code=model.trust_remote_code,
        )
    read_generation_config(module, model.path)
    return module


def read_generation_config(module: Any, path: str) -> None:
    """Give a new model that generates the ``generation_config.json`` of a folder or hub name, if it has that file."""
    if module.can_generate():
        with contextlib.suppress(OSError):
            module.generation_config = GenerationConfig.from_pretrained(path)


def adopt_live(module: nn.Module, model: ModelConfig, role: str, device: torch.device) -> nn.Module:
    """Return the module for a role of a model given from Python: the actor trains it, other roles get a copy."""
    if accepts(module, "use_cache"):
        assert isinstance(module, PreTrainedModel)
        module.set_attn_implementation(choose_attention(model.attention, module.config, device)[0])
    return module if role == "actor" else base_copy(module)


def load_weights(
    kind: Any,
    config: PretrainedConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    absent: tuple[str, ...] = (),
    unused: tuple[str, ...] = (),
) -> tuple[PreTrainedModel, list[str]]:
    """Load a model with the weights of a folder.

    Args:
        kind: a class with ``from_pretrained``.
        config: the config with overrides applied.
        model: the ``[model]`` table.
        dtype: type of the parameters.
        absent: modules whose weights the folder may lack.
        unused: modules whose weights the folder may have and the model lacks.

    Returns:
        The model, and the names of the weights that the folder lacks; their values are arbitrary.

    Raises:
        ConfigError: the folder cannot be read.
        DataError: weights are missing, unknown or of another shape.
    """
    built: PreTrainedModel
    info: dict[str, Any]
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # hide its report of unfit weights; the one below replaces it
    try:
        with torch.random.fork_rng(devices=[]):  # transformers draws weights that the folder lacks
            built, info = kind.from_pretrained(
                model.path,
                config=config,
                attn_implementation=model.attention,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=model.trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are reported below, by name
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
    _refuse_unfit(model.path, built, {words[key]: names for key, names in found.items()})
    return built, fresh


def damaged_file(path: str) -> str:
    """Return a message about the first weight file of a folder that is no safetensors file; "" if all are."""
    for file in sorted(Path(path).glob("*.safetensors")):
        try:
            with safe_open(str(file), "pt"):
                pass
        except (OSError, SafetensorError) as error:
            return (
                f"model.path: {file} is no whole safetensors file ({error}). Take another copy of the model."
            )
    return ""


def _refuse_unfit(path: str, built: nn.Module, found: Mapping[str, Collection[str]]) -> None:
    """Raise DataError with the names of the weights that do not fit, by what is wrong with them, if any."""
    if problems := [f"{wrong}: {_some(sorted(names))}" for wrong, names in found.items() if names]:
        raise DataError(
            f"The weights of '{path}' do not fit {type(built).__name__}: {'; '.join(problems)}. "
            "Is model.override right, is it a folder of another model, or does a plugin build the model (plugins = [...])?"
        )


def _shapes(file: Path) -> dict[str, torch.Size]:
    with safe_open(str(file), "pt") as opened:
        return {name: torch.Size(opened.get_slice(name).get_shape()) for name in list(opened.keys())}


def _state_shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in module.state_dict().items()}


def _module(name: object) -> str:
    """Return the top-level module of a weight: ``score`` for ``score.weight``."""
    return str(name).partition(".")[0]


def _some(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
