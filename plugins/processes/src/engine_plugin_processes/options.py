"""Option tables of runtimes whose workers are processes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from engine_core.specs import Options


class ProcessOptions(Options):
    """What runtimes have in common whose workers are processes."""

    renamed = {
        "stall_minutes": "command_timeout_minutes",
        "start_minutes": "startup_timeout_minutes",
        "trade_memory": "offload_idle_roles",
    }

    processes: Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"
    """Worker processes; ``auto``: as many as `placement.pools` has, else one for each accelerator, else 1."""
    device: Literal["auto", "cpu"] = "auto"
    """``auto``: an accelerator for each process where there are some; ``cpu``: none of them."""
    threads: int | None = Field(None, gt=0)
    """CPU threads of each process; default: ``OMP_NUM_THREADS``, else the cores shared evenly."""
    startup_timeout_minutes: float = Field(15.0, gt=0)
    """Time for all workers to come and to build their models."""
    command_timeout_minutes: float = Field(60.0, gt=0)
    """A rank that takes longer for one command counts as hanging: where every rank is is told, and the run ends (exit code 6)."""
    max_restarts: int = Field(0, ge=0)
    """That many times a run that lost a worker goes on by itself, from its newest checkpoint and with new workers."""
    max_replacements: int = Field(0, ge=0)
    """That many processes of the sampler's own pool may be lost while the run goes on: the others take over what was not finished, and a new process takes part from the next update of weights on. 0: a loss ends the session. Above 0 each of the pool's processes is a world of its own for ``torch.distributed``."""
    offload_idle_roles: bool = False
    """As in ``[runtime.local]``, in each process."""


class TorchrunOptions(ProcessOptions):
    """``[runtime.torchrun]``: every worker a process of its own, on this machine or, started by ``torchrun``, on many."""
