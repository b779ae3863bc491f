"""The choice of a run's transport: named by the run file, or for ``auto`` by the devices of actor and sampler.

Devices are values that can be compared between processes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from engine_core.config.choices import AUTO
from engine_plugin_processes.transports.table import TRANSPORTS

if TYPE_CHECKING:
    from engine_core.config import EngineConfig
    from engine_core.contracts.weight_transport import WeightTransport
    from engine_core.plugins.plugin_set import PluginSet
    from engine_core.specs import Options

log = logging.getLogger("engine")

KIND = "weight_transports"


@dataclass(frozen=True, slots=True)
class ProcessDevice:
    """The device of one process."""

    kind: str = "cpu"  # as ``torch.device.type``
    gpu: str = ""  # ``gpu_uuid``


@dataclass(frozen=True, slots=True)
class Topology:
    """The pools and devices between which weights are sent."""

    apart: bool  # sender and receivers are in different pools
    devices: tuple[ProcessDevice, ...] = (ProcessDevice(), ProcessDevice())  # of the sender and the receivers
    one_machine: bool = False  # the run starts all processes itself, on one machine
    may_leave: bool = False  # receivers may be lost one by one, or join and leave


def choose(config: EngineConfig, topology: Topology) -> str:
    """Return the name of the transport; log it with the reason."""
    name = config.rollout.transport
    if name == AUTO[KIND]:
        name, why = by_topology(topology)
        log.info("rollout.transport = 'auto': '%s', because %s.", name, why)
    else:
        log.info("rollout.transport = '%s'.", name)
    return name


def make(config: EngineConfig, plugins: PluginSet, name: str) -> tuple[type[WeightTransport], Options]:
    """Return the class behind a transport's name, and its options."""
    found: Any
    if name == config.rollout.transport:
        found = plugins.resolve(KIND, name)
        return found, config.rollout.transport_options
    spec = TRANSPORTS[name]
    found = spec.resolve()
    return found, cast("Options", spec.config())


def by_topology(topology: Topology) -> tuple[str, str]:
    """Return the name that ``auto`` means here, and the reason."""
    receivers, gpus = len(topology.devices) - 1, [device.gpu for device in topology.devices]
    kinds = sorted({device.kind for device in topology.devices})
    if not topology.apart:
        return "same_process", "the sampler is in the actor's processes"
    if kinds == ["cpu"] and receivers > 1:
        return "broadcast", f"the sampler has {receivers} separate processes, which all receive the same data"
    if kinds == ["cpu"]:
        return "tcp", "the sampler has one separate process"
    if not all(gpus):
        there = ", ".join(kinds)
        return (
            "tcp",
            f"not every end is on a CUDA device (there are {there}), so weights go through host memory",
        )
    if topology.may_leave:
        return "tcp", (
            "samplers may be lost one by one (max_replacements), and a group of NCCL would wait for one that is; "
            "'broadcast' is faster where none is lost"
        )
    if len(set(gpus)) == len(gpus):
        return "broadcast", f"each of the {len(gpus)} ends has its own GPU, and NCCL connects them"
    why = "ends share a GPU, which NCCL refuses"
    if topology.one_machine:
        return "ipc", f"{why}; all ends are on one machine and see the sender's memory"
    return "tcp", f"{why}, and the ends need not be on one machine, so weights go through host memory"


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of a CUDA GPU, which is the same in every process; "" for another device."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def visible_gpus() -> list[str]:
    """Return the UUIDs of the GPUs that this process sees, by index."""
    return [gpu_uuid(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
