"""Matrix products of linear layers in 8 bits (`fp8`), through torchao (https://arxiv.org/abs/2209.05433).

Weights, optimizer and communication keep their types. A layer rounds its input, its weight and its gradient to 8 bits,
each with a scale from its current largest value, and multiplies those. Not supported: gathering weights in 8 bits,
which would make every weight a tensor subclass of torchao; adapters, whose products are small.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from typing import Any

import torch
from torch import nn

from engine_core.errors import ConfigError
from engine_core.model_config import VALUE_HEAD as HEAD
from engine_plugin_torch.value_models import LANGUAGE_HEADS

log = logging.getLogger("engine")

MULTIPLE = 16  # the hardware's products need multiples of it as rows and columns
LEAST = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0)}
"""CUDA capability from which the products exist: Ada, Hopper."""


def check_fp8(
    key: str, recipe: str, device: torch.device, compute: torch.dtype, emulated: bool = False
) -> None:
    """Refuse 8-bit products where they cannot be computed.

    Args:
        key: the key, for messages: ``actor.fsdp.fp8``.
        recipe: value of the key.
        device: the role's device.
        compute: type of the forward pass.
        emulated: compute products of the rounded values in float32, on any device, for tests.

    Raises:
        ConfigError: the device or the type does not fit, or the package is missing.
    """
    least = LEAST[recipe]
    if not emulated and (device.type != "cuda" or torch.cuda.get_device_capability(device) < least):
        found = device.type if device.type != "cuda" else f"{torch.cuda.get_device_name(device)} ({device})"
        raise ConfigError(
            f"{key}: '{recipe}' needs a GPU with products in 8 bits (CUDA capability {least[0]}.{least[1]} or higher: "
            f"{'Ada' if least < (9, 0) else 'Hopper'}), but this role runs on {found}. Leave it out."
        )
    if compute != torch.bfloat16:
        raise ConfigError(
            f"{key}: '{recipe}' rounds what is computed in bfloat16, but the forward pass is in {compute}. "
            "Set mixed_precision = { param_dtype = 'bf16' }."
        )
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f"{key} needs the package torchao, which is not installed: pip install 'engine-plugin-fsdp[fp8]'"
        )


def use_fp8(module: nn.Module, recipe: str, key: str, emulated: bool = False) -> list[str]:
    """Make the large linear layers, except the head, multiply in 8 bits. Parameters and their names stay the same.

    Args:
        module: the model before it is sharded; changed in place.
        recipe: recipe of torchao.
        key: the key, for messages.
        emulated: compute in float32, see ``check_fp8``.

    Returns:
        Names of the layers.

    Raises:
        ConfigError: no layer is large enough.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    heads = {id(find()) for find in [getattr(module, "get_output_embeddings", None)] if find}
    chosen = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear)
        and id(part) not in heads
        and name.rpartition(".")[2] not in (HEAD, *LANGUAGE_HEADS)
        and is_worth(recipe, *part.weight.shape)
    ]
    if not chosen:
        raise ConfigError(
            f"{key}: '{recipe}': no linear layer of {type(module).__name__} is large enough to be faster in 8 bits "
            "(sizes that 16 divides, of some thousands). Leave it out."
        )
    names = set(chosen)
    config: Any = Float8LinearConfig.from_recipe_name(recipe)
    # the gradient of a weight sums over the tokens, whose number is arbitrary in packed micro-batches: pad it
    config = dataclasses.replace(config, pad_inner_dim=True, emulate=emulated)
    convert_to_float8_training(module, config=config, module_filter_fn=lambda part, name: name in names)
    log.info("%s: %d linear layers multiply in 8 bits (%s).", key, len(chosen), recipe)
    return chosen


def is_worth(recipe: str, rows: int, columns: int) -> bool:
    """Return whether 8 bits are faster for a weight of [rows, columns], as torchao's authors measured on an H100.

    Below these sizes rounding takes longer than the faster product saves
    (https://github.com/pytorch/ao/tree/main/torchao/float8#performance).
    """
    if rows % MULTIPLE or columns % MULTIPLE:
        return False
    if recipe == "tensorwise":
        return not (columns <= 4096 and rows <= 1024)
    return rows > 2048 and columns > 1024 and not (rows <= 4096 and columns <= 2048)
