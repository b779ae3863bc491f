"""A model split over the processes of a pool that also holds the trainer.

vLLM calls this the external launcher: every process has an engine with one part of the model, all engines of a group
receive the same requests in the same order, and each computes the same schedule and the same tokens. Engines exchange
only what the layers exchange. Each process has the trainer's whole tensors and copies its part of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.contracts.engines import Layout
from engine_core.errors import ConfigError

if TYPE_CHECKING:
    from engine_core.config import RolloutConfig


def layout_of(parts: int, rank: int, world_size: int) -> Layout:
    """Return the position of a process: neighboring ranks are the parts of one model, as vLLM numbers them.

    Args:
        parts: ``tensor_parallel_size``.
        rank: the process's rank in its pool.
        world_size: number of processes of the pool.
    """
    return Layout(rank // parts, world_size // parts, rank % parts == 0)


def check_ranks(config: RolloutConfig, parts: int, size: int, table: str = "rollout") -> None:
    """Check the pool before vLLM takes a minute to start.

    Args:
        config: of the sampler.
        parts: ``tensor_parallel_size``.
        size: number of processes of the pool.
        table: that chose the backend, ``rollout`` or ``reward.judge``.

    Raises:
        ConfigError: so many processes cannot have engines of so many parts.
    """
    key = f"{table}.vllm.tensor_parallel_size"
    pool = "the sampler's pool" if table == "rollout" else "its pool (placement.reward)"
    if parts == 1 and size > 1:
        alone = "Name a pool of one process there"
        if table == "rollout":
            alone = "Give it a dedicated process in each of them with a table [rollout.process]"
        raise ConfigError(
            f"{table}.backend = 'vllm' runs in one process, and {pool} has {size}. {alone}, or cut the model over them with "
            f"{key} = {size}."
        )
    if size % parts:
        raise ConfigError(
            f"{key} = {parts} does not divide the {size} processes of {pool}. Give the pool as many processes as parts, or a "
            "multiple ([placement] pools), or change the number of parts."
            + (" A sampler of [rollout.process] has one process." if table == "rollout" else "")
        )
    if parts > 1 and config.request_timeout_seconds:  # a judge's responses have none
        raise ConfigError(
            f"rollout.request_timeout_seconds = {config.request_timeout_seconds:g}: the {parts} processes that share a model would each "
            "stop a response by their own clocks, and wait for each other forever. Remove it; rollout.over_sampling "
            "ends a step without the slowest."
        )
