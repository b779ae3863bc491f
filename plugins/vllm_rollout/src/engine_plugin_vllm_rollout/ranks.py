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
    from engine_core.contracts.engines import WorkerContext


def layout_of(parts: int, rank: int, world_size: int) -> Layout:
    """Return the position of a process: neighboring ranks are the parts of one model, as vLLM numbers them.

    Args:
        parts: ``tensor_parallel_size``.
        rank: the process's rank in its pool.
        world_size: number of processes of the pool; 1: vLLM itself starts those of the other parts.
    """
    if world_size == 1:
        return Layout()
    return Layout(rank // parts, world_size // parts, rank % parts == 0)


def check_ranks(config: RolloutConfig, parts: int, context: WorkerContext, table: str = "rollout") -> None:
    """Look at the pool before vLLM takes a minute to start.

    Args:
        config: of the sampler.
        parts: ``tensor_parallel_size``.
        context: of the worker.
        table: that chose the backend, ``rollout`` or ``reward.judge``.

    Raises:
        ConfigError: so many processes cannot have engines of so many parts.
    """
    size, first = context.world_size, context.device.index or 0
    key, pool = f"{table}.vllm.tensor_parallel_size", "the sampler's pool"
    if table != "rollout":
        pool = "its pool (placement.reward)"
    if size == 1:
        if parts > 1 and first:
            raise ConfigError(
                f"{key} = {parts}: {pool} is one process with GPU {first}, and vLLM would "
                f"take GPUs 0 to {parts - 1}, which are others'. Give the pool {parts} processes ([placement] pools)."
            )
        return
    if parts == 1:
        if table != "rollout":
            raise ConfigError(
                f"{table}.backend = 'vllm' answers in one process, and {pool} has {size}. Name a pool of one process there, or "
                f"cut the model over them with {key} = {size}."
            )
        raise ConfigError(
            f"rollout.backend = 'vllm' samples in one process, and the pool has {size}. Give it a dedicated process in each of "
            f"them with a table [rollout.process], cut the model over them with {key} = {size}, or "
            "set runtime.torchrun.processes = 1."
        )
    if size % parts:
        raise ConfigError(
            f"{key} = {parts} does not divide the {size} processes of {pool}. Set it to "
            f"a divisor, such as {max(n for n in range(1, size + 1) if size % n == 0 and n <= max(parts, 1))}, or change the pool."
        )
    if config.request_timeout_seconds:  # a judge's responses have none
        raise ConfigError(
            f"rollout.request_timeout_seconds = {config.request_timeout_seconds:g}: the {parts} processes that share a model would each "
            "stop a response by their own clocks, and wait for each other for ever. Remove it; rollout.over_sampling "
            "ends a step without the slowest."
        )
