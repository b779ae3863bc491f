"""Option tables of runtimes whose workers are processes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from engine_core.specs import Options


class ProcessOptions(Options):
    """The common options of runtimes whose workers are processes."""

    processes: Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"
    """Number of worker processes. ``auto``: the sum of `placement.pools` if set, else one process per accelerator, else 1."""
    device: Literal["auto", "cpu"] = "auto"
    """``auto``: each process gets an accelerator if the machine has any. ``cpu``: no accelerators."""
    threads: int | None = Field(None, gt=0)
    """Number of CPU threads of each process. Default: ``OMP_NUM_THREADS`` if set; otherwise the processes share the cores evenly."""
    startup_timeout_minutes: float = Field(15.0, gt=0)
    """Maximum time in which all workers must connect and build their models."""
    command_timeout_minutes: float = Field(60.0, gt=0)
    """Maximum time of one command on a rank. A slower rank counts as stalled: the stacks of all ranks are logged, and the run ends (exit code 6)."""
    max_restarts: int = Field(0, ge=0)
    """Maximum number of automatic restarts after the loss of a worker. Each restart continues the run from its newest checkpoint, with new workers."""
    max_replacements: int = Field(0, ge=0)
    """Maximum number of processes that the sampler's separate pool may lose while the run continues. The other processes take over unfinished requests. A new process joins at the next weight update. 0: a loss ends the session. Above 0 each process holds a whole model; tensor parallelism is then not possible."""
    offload_idle_roles: bool = False
    """Same as in ``[runtime.local]``, in each process."""


class TorchrunOptions(ProcessOptions):
    """``[runtime.torchrun]``: every worker is a separate process. The processes run on this machine or, started by ``torchrun``, on several machines."""
