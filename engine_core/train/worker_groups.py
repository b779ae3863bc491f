"""The reference model where the actor has a LoRA adapter: the actor itself, without it. Nothing is built."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from engine_core.contracts.runtime import Role, Runtime, WorkerGroup
from engine_core.errors import ConfigError

if TYPE_CHECKING:
    from engine_core.config import EngineConfig
    from engine_core.types import Batch

log = logging.getLogger("engine")


class WithoutAdapter(WorkerGroup):
    """The workers of a role with an adapter, as the base model below it.

    Args:
        group: of the role; its ``infer`` is what a reference model is asked for.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group

    def call(self, method: str, batch: Batch | None = None, split: str = "dp", **plain: Any) -> Future[Any]:
        if method != "infer":
            raise RuntimeError(f"The reference is the actor without its adapter: it can infer, not {method}.")
        return self.group.call(method, batch, split, adapter=False, **plain)


def start_groups(
    runtime: Runtime, config: EngineConfig, roles: Mapping[str, Role], total_steps: int
) -> dict[str, WorkerGroup]:
    """Start the workers of these roles; a reference that is the actor's base gets none of its own.

    Raises:
        ConfigError: such a reference was to follow the actor.
    """
    if "ref" not in roles or not config.ref_is_base:
        return runtime.start(roles, total_steps)
    if roles["ref"].refreshed:
        raise ConfigError(
            "The reference is the actor without its adapter ([actor.lora]), and the weights below an adapter never "
            "change, so it cannot follow the actor. Give it a model of its own: [ref] path."
        )
    groups = runtime.start({name: role for name, role in roles.items() if name != "ref"}, total_steps)
    log.info("The reference is the actor without its adapter: no second model is built.")
    return {**groups, "ref": WithoutAdapter(groups["actor"])}
