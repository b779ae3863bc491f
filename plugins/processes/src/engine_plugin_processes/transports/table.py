"""The table of the transports of this distribution: option tables, and the class behind each name."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from engine_core.specs import Options, TransportSpec


class TransportOptions(Options):
    """Options that all these transports have."""

    timeout_seconds: float = Field(600.0, gt=0)
    """Maximum time to send or receive the next part of an update. After this time the update fails, and the error names both sides."""


class TCPOptions(TransportOptions):
    """``[rollout.tcp]``: the trainer's first rank sends a copy to each of the sampler's processes."""


class BroadcastOptions(TransportOptions):
    """``[rollout.broadcast]``: a process group over the trainer's first rank and the sampler's processes; gloo, or NCCL if each has a separate GPU."""


class IPCOptions(TransportOptions):
    """``[rollout.ipc]``: memory of a GPU that both sides see, for processes of one machine. On CPUs the transport works like `tcp`."""


_PACKAGE = "engine_plugin_processes.transports."
TRANSPORTS: Mapping[str, TransportSpec] = {
    "broadcast": TransportSpec(load=_PACKAGE + "broadcast:Broadcast", config=BroadcastOptions),
    "ipc": TransportSpec(load=_PACKAGE + "ipc:IPC", config=IPCOptions),
    "tcp": TransportSpec(load=_PACKAGE + "tcp:TCP", config=TCPOptions),
}
