"""Checks and log lines about types and the sharded model before training."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine_core.errors import ConfigError, PluginError
from engine_plugin_fsdp.sharding import sharded_modules, sum_gradients
from engine_plugin_torch.precision import NAMED, has_bf16, has_fp16
from engine_plugin_torch.sharded import here

if TYPE_CHECKING:
    from torch import nn

    from engine_plugin_fsdp.options import FSDPOptions
    from engine_plugin_fsdp.ranks import Ranks

log = logging.getLogger("engine")

MIB = 2**20


def check_distributed(root: nn.Module, ranks: Ranks, trainable: bool, role: str) -> None:
    """Refuse a trained model of a plugin whose gradients would not be summed over ranks; make FSDP sum the others.

    Raises:
        PluginError: there are several ranks, and no part of the model is sharded with FSDP2.
    """
    if trainable and ranks.size > 1 and not sharded_modules(root):
        raise PluginError(
            f"The model of role '{role}' comes from a plugin with its own optimizer, or sharded by engine_shard_model, and "
            f"no part of it is sharded with fully_shard: its gradients would not be summed over the {ranks.size} ranks. "
            "Return the module alone from _build_model_optimizer, and this engine shards it."
        )
    for holder in sharded_modules(root):
        sum_gradients(holder)


def tell_of_no_units(module: nn.Module, role: str, refused: bool) -> None:
    """Warn that every rank gathers the whole model at once because it has no units.

    Args:
        module: the model.
        role: the role's name, for messages.
        refused: a plugin named no units; else the model has no list of layers for the default.

    Raises:
        ConfigError: ``refused`` is true.
    """
    if refused:
        raise ConfigError(
            f"{role}.fsdp.wrap: a plugin's engine_wrap_policy named no submodule of {type(module).__name__}, so that every rank "
            "would gather the whole model at once. Name submodules there, or return None and choose classes in "
            f"{role}.fsdp.wrap.layer_classes; {role}.fsdp.sharding = 'none' keeps the model whole."
        )
    log.warning(
        "%s.fsdp.wrap: there are no units, so that the whole model is gathered at once on every rank. Name "
        "classes in wrap.layer_classes, or submodules in a plugin's engine_wrap_policy.",
        role,
    )


def tell(
    module: nn.Module,
    units: Sequence[str],
    options: FSDPOptions,
    ranks: Ranks,
    role: str,
    num_split: int = 0,
) -> None:
    """Log on rank 0 how the model is sharded. Collective.

    Args:
        module: the sharded model.
        units: names of the units.
        options: the role's table.
        ranks: the role's ranks.
        role: the role's name.
        num_split: number of layers that ranks of ``tp`` share.
    """
    kinds = sorted({type(module.get_submodule(name)).__name__.removeprefix("FSDP") for name in units})
    parameters = list(module.parameters())
    bytes_here = sum(here(p).numel() * p.element_size() for p in parameters)
    bytes_whole = sum(p.numel() * p.element_size() for p in parameters)
    each = ranks.texts(bytes_here)
    if ranks.rank:
        return
    axes = zip(ranks.split_mesh.mesh_dim_names or (), ranks.split_mesh.shape, strict=True)
    mesh = [f"{name} {size}" for name, size in axes] + ([f"tp {options.tp}"] if options.tp > 1 else [])
    shared = f", ranks of sp {options.sp} share tokens" if options.sp > 1 else ""
    split = f"; {num_split} linear layers are shared by ranks of tp" if num_split else ""
    log.info(
        "%s: sharding '%s' over %d ranks (mesh %s%s); %d units of %s, and the rest; activation checkpointing %s%s; weights %.1f MiB, "
        "%.1f to %.1f MiB on a rank.",
        role,
        options.sharding,
        ranks.size,
        " x ".join(mesh),
        shared,
        len(units),
        ", ".join(kinds) or "nothing",
        options.activation_checkpointing,
        split,
        bytes_whole / MIB,
        min(each) / MIB,
        max(each) / MIB,
    )


def check_dtype(key: str, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a type that the device does not support.

    Raises:
        ConfigError: the device does not support ``dtype``.
    """
    if dtype == torch.bfloat16 and not has_bf16(device):
        raise ConfigError(f"{key}: 'bf16', but {device} has no bfloat16. Set it to 'fp16' or 'fp32'.")
    if dtype == torch.float16 and not has_fp16(device):
        raise ConfigError(f"{key}: 'fp16', but {device} has no float16. Set it to 'fp32'.")


def check_types(table: str, options: FSDPOptions, compute: torch.dtype, device: torch.device) -> None:
    """Refuse types of `mixed_precision` that the device does not support.

    Args:
        table: name of the table, for messages: ``actor.fsdp``.
        options: the role's table.
        compute: type of the forward pass, with ``auto`` resolved.
        device: the role's device.

    Raises:
        ConfigError: the device does not support a type.
    """
    check_dtype(f"{table}.mixed_precision.param_dtype", compute, device)
    reduced = NAMED[options.mixed_precision.reduce_dtype]
    check_dtype(f"{table}.mixed_precision.reduce_dtype", reduced, device)
