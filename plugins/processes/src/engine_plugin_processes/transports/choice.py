"""Which transport a run uses: the one that the file names, where it can, or one chosen by where actor and sampler are."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from engine_core.config.choices import AUTO
from engine_core.config.weight_sharing import transport_problem
from engine_core.errors import ConfigError
from engine_plugin_processes.transports.table import TRANSPORTS

if TYPE_CHECKING:
    import torch

    from engine_core.config import EngineConfig
    from engine_core.plugins.plugin_set import PluginSet
    from engine_core.specs import Options
    from engine_plugin_processes.transports.bucketing import Transport

log = logging.getLogger("engine")

KIND = "weight_transports"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What a process can be reached by."""

    device: str = "cpu"  # its kind
    gpu: str = ""  # its identity, the same in every process that sees it; "" of another device
    nccl: bool = False  # torch is built with it

    @classmethod
    def of(cls, device: torch.device) -> Endpoint:
        """Of this process."""
        import torch.distributed as dist

        from engine_plugin_processes.transports.bucketing import gpu_of

        return cls(device.type, gpu_of(device), dist.is_nccl_available())


@dataclass(frozen=True, slots=True)
class Topology:
    """Where weights go."""

    apart: bool  # to processes of another pool
    seats: tuple[Endpoint, ...] = (Endpoint(), Endpoint())  # of the one that sends, and of those that take
    one_machine: bool = False  # the run has started all processes itself, on one machine
    may_leave: bool = False  # those that take may be lost one by one, or come and go


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
    if problem := transport_problem(config, plugins, topology.apart):
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
    takers = len(topology.seats) - 1
    if not topology.apart:
        return "same_process", "the sampler is in the actor's processes"
    if any(seat.device != "cpu" for seat in topology.seats):
        return _between_accelerators(topology)
    if takers > 1:
        return "broadcast", f"the sampler has {takers} processes of its own, which all take the same"
    return "tcp", "the sampler has one process of its own"


def _between_accelerators(topology: Topology) -> tuple[str, str]:
    """NCCL where it can, a GPU's memory where that is seen, and else what always works."""
    gpus = [seat.gpu for seat in topology.seats]
    if not all(gpus):
        kinds = ", ".join(sorted({seat.device for seat in topology.seats}))
        return (
            "tcp",
            f"not every end is on a CUDA device (there are {kinds}), so weights go through host memory",
        )
    if topology.may_leave:
        return "tcp", (
            "samplers may be lost one by one (max_replacements, placement.most), and a group of NCCL would wait for one that is; "
            "'broadcast' is faster where none is lost"
        )
    shared, nccl = len(set(gpus)) < len(gpus), all(seat.nccl for seat in topology.seats)
    if nccl and not shared:
        return (
            "broadcast",
            f"each of the {len(gpus)} ends has a GPU of its own, and NCCL carries between them",
        )
    why = "ends share a GPU, which NCCL refuses" if shared else "torch is built without NCCL"
    if topology.one_machine:
        return "ipc", f"{why}; all ends are on one machine and see the sender's memory"
    return "tcp", f"{why}, and the ends need not be on one machine, so weights go through host memory"
