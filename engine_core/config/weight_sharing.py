"""How a sampler comes by its weights: what a run file asks for and its plugins cannot do, found without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from engine_core.config.choices import AUTO

if TYPE_CHECKING:
    from engine_core.config.models import EngineConfig
    from engine_core.plugins.plugin_set import PluginSet


def sharing_problems(config: EngineConfig, plugins: PluginSet) -> Iterator[str]:
    """Why a sampler that is to use the actor's module cannot."""
    trainer: Any = plugins.spec("train_engines", config.actor.backend)
    sampler: Any = plugins.spec("rollout_engines", config.rollout.backend)
    remedy = 'Set rollout.weights = "own" or "auto".'
    if config.rollout.process is not None:
        yield f"rollout.weights = 'shared': with [rollout.process] the sampler is in a process of its own. {remedy}"
        return
    if "share_module" not in sampler.capabilities:
        yield (
            f"rollout.weights = 'shared': backend '{config.rollout.backend}' has weights of its own (no capability "
            f"'share_module'). {remedy}"
        )
    if "generation_module" not in trainer.capabilities:
        yield (
            f"rollout.weights = 'shared': actor.backend '{config.actor.backend}' does not give its module to samplers (no "
            f"capability 'generation_module'). {remedy}"
        )
    placement = config.placement
    if len(placement.pools) > 1 and placement.actor != placement.rollout:
        yield (
            f"rollout.weights = 'shared': the sampler is in pool '{placement.rollout}' and the actor in "
            f"'{placement.actor}'. Place them together, or {remedy[0].lower()}{remedy[1:]}"
        )


def transport_problem(config: EngineConfig, plugins: PluginSet, apart: bool) -> str | None:
    """Why the transport of weights that the file names cannot be.

    Args:
        config: whose `rollout.transport` is asked.
        plugins: that offer it.
        apart: the sampler is in processes of another pool than the actor.
    """
    wanted = config.rollout.transport
    if wanted == AUTO["weight_transports"]:
        return None
    spec: Any = plugins.spec("weight_transports", wanted)
    if ("apart" if apart else "together") in spec.serves:
        return None
    if apart:
        placement = config.placement
        return (
            f"rollout.transport: got '{wanted}', but the sampler is in pool '{placement.pool_of('rollout')}' and the actor in "
            f"'{placement.pool_of('actor')}'. Use 'tcp', 'broadcast', 'ipc', 'folder' or 'auto', or place them together ([placement])."
        )
    return (
        f"rollout.transport: got '{wanted}', which carries weights to processes of another pool, but the sampler is in the "
        "actor's processes. Use 'same_process' or 'auto', or give the sampler a pool of its own ([placement], in a runtime "
        "that has pools)."
    )


def in_separate_pools(config: EngineConfig, plugins: PluginSet) -> bool:
    """Whether actor and sampler are in different pools, as far as the file says."""
    runtime: Any = plugins.spec("runtimes", config.runtime.backend)
    placement = config.placement
    return not runtime.in_process and placement.pool_of("rollout") != placement.pool_of("actor")
