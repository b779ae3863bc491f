"""Units of a module: the submodules that are sharded, recomputed or compiled as one."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import nn
from torch.utils.checkpoint import checkpoint

from engine_core.engines.weights import near
from engine_core.errors import PluginError


def decoder_layers(module: nn.Module) -> list[str]:
    """Names of the members of the longest ``ModuleList``: the default units."""
    lists = [(name, child) for name, child in module.named_modules() if isinstance(child, nn.ModuleList)]
    if not lists:
        return []
    name, layers = max(lists, key=lambda pair: len(pair[1]))
    return [f"{name}.{index}" for index in range(len(layers))]


def checkpoint_units(module: nn.Module, units: Sequence[str]) -> None:
    """Recompute each unit in the backward pass. Parameter names stay as they are."""
    for name in units:
        unit = module.get_submodule(name)
        unit.forward = functools.partial(
            checkpoint, unit.forward, use_reentrant=False, preserve_rng_state=False
        )


def check_units(units: Sequence[str], module: nn.Module) -> None:
    """Refuse a name of ``engine_wrap_policy`` that the module does not have."""
    known = {name for name, _ in module.named_modules() if name}
    for name in units:
        if name not in known:
            raise PluginError(
                f"engine_wrap_policy named '{name}', which is no submodule of {type(module).__name__}."
                + near(name, known)
            )
