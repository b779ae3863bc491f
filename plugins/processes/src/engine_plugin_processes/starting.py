"""The start of a worker: module path, process group, plugins, engines."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from engine_core.config.assemble import rebuild
from engine_core.contracts.engines import Layout, RolloutEngine, TrainEngine
from engine_core.contracts.runtime import Role
from engine_core.data import load_tokenizer, tokenizer_hash
from engine_core.errors import ConfigError
from engine_core.local.engine_host import Engine, RankPlacement, default_device
from engine_plugin_processes.balance import attention_share
from engine_plugin_processes.shared_module import SharingHost

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from engine_core.config import ModelConfig

GROUP_MARGIN = 1.5  # times the stall deadline: the controller reports a hanging rank before torch does


def join_pool(order: Mapping[str, Any]) -> torch.device:
    """Join the process group of the pool; return this rank's device.

    ``torch.distributed`` is initialized for the pool alone: an engine's collectives over all ranks stay in the pool.
    """
    if order["path"] is not None:
        sys.path[:] = order["path"]
    rank, size = order["rank"], order["world_size"]
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(order["local_rank"]),
        "LOCAL_WORLD_SIZE": str(order["local_world_size"]),
    }
    device = torch.device("cpu") if order["device"] == "cpu" else default_device(order["local_rank"])
    backend = "gloo"
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
        backend = f"{device.type}:{dist.get_default_backend_for_device(device)},cpu:gloo"
    timeout = datetime.timedelta(seconds=max(order["stall_seconds"], order["start_seconds"]) * GROUP_MARGIN)
    store = store_at(order["store"], size, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return device


def store_at(place: Mapping[str, Any], size: int, timeout: datetime.timedelta) -> Any:
    """Return a ``torch.distributed`` store for the rendezvous of some processes.

    Args:
        place: ``file``, a shared path; or ``tcp``, host, port and prefix of a running store.
        size: number of processes.
        timeout: timeout of the store's operations.
    """
    if place["file"] is not None:
        store = dist.FileStore(place["file"], size)
        store.set_timeout(timeout)
        return store
    host, port, prefix = place["tcp"]
    return dist.PrefixStore(prefix, dist.TCPStore(host, port, is_master=False, timeout=timeout))


def leave_pool() -> None:
    """Destroy the process group of ``join_pool``, if it exists."""
    if dist.is_initialized():
        dist.destroy_process_group()


def make_host(order: Mapping[str, Any], device: torch.device) -> SharingHost:
    """Load the run's plugins and build the engines of this rank.

    Raises:
        ConfigError: the controller's tokenizer is not the one that the config names.
    """
    config, plugins = rebuild(order["config"])
    live: dict[str, Any] = {}
    if order["tokenizer"] is not None:
        problem = (
            "the controller's tokenizer is another one than the file names; an object given from Python does not reach "
            "workers. Save it with save_pretrained and name the folder."
        )
        live["tokenizer"] = same_tokenizer(config.model, order["tokenizer"], problem)
    place = RankPlacement(device, order["rank"], order["world_size"])
    host = SharingHost(config, plugins, live, place)
    roles = {name: Role(**fields) for name, fields in order["roles"].items()}
    host.build(roles, order["total_steps"])
    return host


def same_tokenizer(model: ModelConfig, expected: str, problem: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    Args:
        model: the ``[model]`` table.
        expected: hash of the controller's tokenizer.
        problem: message if this process loads another one.

    Raises:
        ConfigError: as above.
    """
    tokenizer = load_tokenizer(model)
    if tokenizer_hash(tokenizer) != expected:
        raise ConfigError(f"model.tokenizer: {problem}")
    return tokenizer


def describe(engine: Engine, place: RankPlacement) -> dict[str, Any]:
    """Return the engine's layout among the ranks of its role, and its attention share."""
    layout = engine.layout
    if isinstance(engine, RolloutEngine):
        if type(engine).layout is RolloutEngine.layout:  # no layout defined: every rank samples independently
            layout = Layout(place.rank, place.world_size)
        return {"layout": layout, "attention": 0.0}
    return {"layout": layout, "attention": _attention(engine)}


def _attention(engine: TrainEngine) -> float:
    """Return the attention share by the shape of the engine's model; 0.0 if its config is not accessible."""
    config: Any = getattr(
        getattr(engine, "module", None), "config", None
    )  # an engine of frozen models may have none
    if not hasattr(config, "get_text_config"):
        return 0.0
    text: Any = config.get_text_config()
    layers, heads = getattr(text, "num_hidden_layers", 0), getattr(text, "num_attention_heads", 0)
    if not (layers and heads):
        return 0.0
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return attention_share(layers, heads * size, sum(p.numel() for p in engine.module.parameters()))


def portable_path() -> list[str]:
    """Return ``sys.path`` as absolute paths, for another process of this machine."""
    return [str(Path(entry or ".").absolute()) for entry in sys.path]
