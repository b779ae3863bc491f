"""Option tables of runtimes whose workers are processes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from engine_core.specs import Options


class ProcessOptions(Options):
    """The common options of runtimes whose workers are processes."""

    processes: Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"
    """Number of worker processes; ``auto``: as many as `placement.pools` has, else one per accelerator, else 1."""
    device: Literal["auto", "cpu"] = "auto"
    """``auto``: an accelerator for each process if the machine has any; ``cpu``: no accelerators."""
    threads: int | None = Field(None, gt=0)
    """CPU threads of each process; default: ``OMP_NUM_THREADS``, else the cores shared evenly."""
    startup_timeout_minutes: float = Field(15.0, gt=0)
    """Time for all workers to connect and to build their models."""
    command_timeout_minutes: float = Field(60.0, gt=0)
    """A rank that takes longer for one command counts as stalled: the stacks of all ranks are logged, and the run ends (exit code 6)."""
    max_restarts: int = Field(0, ge=0)
    """How often a run that lost a worker continues by itself, from its newest checkpoint and with new workers."""
    max_replacements: int = Field(0, ge=0)
    """How many processes of the sampler's separate pool may be lost while the run continues. The others take over unfinished requests, and a new process joins at the next update of weights. 0: a loss ends the session. Above 0 each process holds a whole model, so the model cannot be cut over several."""
    offload_idle_roles: bool = False
    """As in ``[runtime.local]``, in each process."""


class TorchrunOptions(ProcessOptions):
    """Options of the runtime `torchrun`, ``[runtime.torchrun]``: every worker is a separate process, on this machine or, started by ``torchrun``, on several."""
