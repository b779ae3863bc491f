"""Which transport a run uses: the one that the file names, where it can, or one chosen by where actor and sampler are."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from engine_core.config.choices import AUTO
from engine_core.errors import ConfigError
from engine_core.runtime.transports.options import TRANSPORTS
from engine_core.weight_paths import misplaced

if TYPE_CHECKING:
    from engine_core.config import EngineConfig
    from engine_core.plugins import PluginSet
    from engine_core.runtime.transports.base import Transport
    from engine_core.specs import Options

log = logging.getLogger("engine")

KIND = "weight_transports"


@dataclass(frozen=True, slots=True)
class Topology:
    """Where weights go."""

    apart: bool  # to processes of another pool
    takers: int = 1  # processes
    device: str = "cpu"  # kind of the accelerator of these processes


def choose(config: EngineConfig, plugins: PluginSet, topology: Topology) -> str:
    """The transport's name; the log says what and why.

    Raises:
        ConfigError: the one that the file names does not serve this topology.
    """
    wanted = config.rollout.transport
    if wanted == AUTO[KIND]:
        name, why = by_topology(topology)
        log.info("rollout.transport = 'auto': '%s', because %s.", name, why)
        return name
    if problem := misplaced(config, plugins, topology.apart):
        raise ConfigError(problem)
    log.info("rollout.transport = '%s'.", wanted)
    return wanted


def make(config: EngineConfig, plugins: PluginSet, name: str) -> tuple[type[Transport], Options]:
    """The class behind a name that ``choose`` gave, and its options."""
    found: Any
    if name == config.rollout.transport:
        found = plugins.resolve(KIND, name)
        return found, config.rollout.transport_options
    spec = TRANSPORTS[name]
    found = spec.resolve()
    return found, cast("Options", spec.config())


def by_topology(topology: Topology) -> tuple[str, str]:
    """What ``auto`` means, and why."""
    if not topology.apart:
        return "same_process", "the sampler is in the actor's processes"
    if topology.device != "cpu":
        return (
            "tcp",
            "the sampler is in a pool of its own ('broadcast' has not been run on accelerators by us)",
        )
    if topology.takers > 1:
        return "broadcast", f"the sampler has {topology.takers} processes of its own, which all take the same"
    return "tcp", "the sampler has one process of its own"
