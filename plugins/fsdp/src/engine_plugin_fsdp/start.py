"""What is looked at before training: that all ranks have one model, and what became of it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from engine_core.engines.sharded import here
from engine_core.engines.weights import identity, own_weights
from engine_core.errors import PluginError
from engine_plugin_fsdp.sharding import sharded_modules, sum_gradients

if TYPE_CHECKING:
    from engine_plugin_fsdp.options import FSDPOptions
    from engine_plugin_fsdp.ranks import Ranks

log = logging.getLogger("engine")

MIB = 2**20


def check_same(module: nn.Module, ranks: Ranks, values: bool, role: str) -> None:
    """Refuse a model that is not the same on all ranks: their shards would be a mixture of models.

    Args:
        module: not sharded yet.
        values: compare weights too, not names and shapes alone (which is all that ``meta`` has).

    Raises:
        PluginError: it differs; every rank raises.
    """
    own = own_weights(module)
    if values:
        mine = identity(own)
    else:
        shapes = "".join(f"{name}{list(tensor.shape)}" for name, tensor in own.items())
        mine = hashlib.blake2b(shapes.encode(), digest_size=16).hexdigest()
    told = ranks.texts(mine)
    other = next((rank for rank, text in enumerate(told) if text != told[0]), None)
    if other is not None:
        what = "weights" if values else "names or shapes of weights"
        raise PluginError(
            f"The model of role '{role}' has other {what} on rank {other} than on rank 0. What builds it must give the "
            "same on every rank: draw first weights from model.seed, not from the process's own generator."
        )


def check_distributed(root: nn.Module, ranks: Ranks, trainable: bool, role: str) -> None:
    """Refuse a trained model that a plugin brought in a state in which its gradients would not be summed over ranks.

    Raises:
        PluginError: nothing of it is sharded with FSDP2, and there are several ranks.
    """
    if trainable and ranks.size > 1 and not sharded_modules(root):
        raise PluginError(
            f"The model of role '{role}' comes from a plugin with its own optimizer, or sharded by engine_shard_model, and "
            f"no part of it is sharded with fully_shard: its gradients would not be summed over the {ranks.size} ranks. "
            "Return the module alone from _build_model_optimizer, and this engine shards it."
        )
    for holder in sharded_modules(root):
        sum_gradients(holder)


def tell(
    module: nn.Module,
    units: Sequence[str],
    recomputed: Sequence[str],
    options: FSDPOptions,
    ranks: Ranks,
    role: str,
) -> None:
    """Say, once, how the model lies on the ranks."""
    kinds = sorted({type(module.get_submodule(name)).__name__.removeprefix("FSDP") for name in units})
    parameters = list(module.parameters())
    bytes_here = sum(here(p).numel() * p.element_size() for p in parameters)
    bytes_whole = sum(p.numel() * p.element_size() for p in parameters)
    most = float(ranks.largest(torch.tensor(bytes_here)))
    if ranks.rank:
        return
    log.info(
        "%s: sharding '%s' over %d ranks (mesh %s); %d units of %s, and the rest; %d recomputed; weights %.1f MiB, "
        "at most %.1f MiB on a rank.",
        role,
        options.sharding,
        ranks.size,
        "x".join(str(size) for size in ranks.mesh.shape),
        len(units),
        ", ".join(kinds) or "nothing",
        len(recomputed),
        bytes_whole / MIB,
        most / MIB,
    )
