"""The table of the transports of this distribution: option tables, and the class behind each name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, ValidationInfo, field_validator

from engine_core.specs import Options, TransportSpec


class TransportOptions(Options):
    """Options that all these transports have."""

    timeout_seconds: float = Field(600.0, gt=0)
    """Time in which the next part of an update must come, or be taken; then the update fails, and both sides are named."""


class TCPOptions(TransportOptions):
    """``[rollout.tcp]``: the trainer's first rank sends a copy to each of the sampler's processes."""


class BroadcastOptions(TransportOptions):
    """``[rollout.broadcast]``: a process group over the trainer's first rank and the sampler's processes; gloo, or NCCL if each has a separate GPU."""


class IPCOptions(TransportOptions):
    """``[rollout.ipc]``: memory that both sides see, of a GPU or of the machine, for processes of one machine."""


class FolderOptions(TransportOptions):
    """``[rollout.folder]``: files in a folder that both sides see."""

    path: str = ""
    """The folder, relative to the run file's; empty: a private one of this machine, where the run has started all processes itself."""

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: str, info: ValidationInfo) -> str:
        root = (info.context or {}).get("folder")
        return str((Path(root) / Path(path).expanduser()).resolve()) if path and root is not None else path


_PACKAGE = "engine_plugin_processes.transports."
TRANSPORTS: Mapping[str, TransportSpec] = {
    "broadcast": TransportSpec(load=_PACKAGE + "broadcast:Broadcast", config=BroadcastOptions),
    "folder": TransportSpec(load=_PACKAGE + "folder:Folder", config=FolderOptions),
    "ipc": TransportSpec(load=_PACKAGE + "ipc:IPC", config=IPCOptions),
    "tcp": TransportSpec(load=_PACKAGE + "tcp:TCP", config=TCPOptions),
}
