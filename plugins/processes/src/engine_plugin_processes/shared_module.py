"""A module shared by trainer and sampler on several ranks: gathered while the samplers use it.

A sharding engine gathers its module on all ranks at once, but each sampler has a different batch. The module is
therefore gathered before the first sampler is called, used without communication between ranks, and freed before
another role of the processes runs. ``SharedModule`` is the controller's side, ``SharedModuleHolder`` that of each
process.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import psutil
import torch
import torch.distributed as dist
from torch import nn

from engine_core.errors import ConfigError
from engine_core.local.engine_host import EngineHost
from engine_core.runs.machine import memory_metrics

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from engine_core.contracts.engines import TrainEngine, WorkerContext

log = logging.getLogger("engine")

SAMPLES = frozenset({"generate", "advance", "step", "pause"})
"""Methods of a sampler that may run its model."""
GIB = 2**30


class SharedModule:
    """The controller's record of whether the samplers of a pool hold the gathered module.

    Args:
        tell: sends ``lend`` or ``take_back`` to every rank of the pool.
    """

    def __init__(self, tell: Callable[[str], Future[Any]]) -> None:
        self._tell = tell
        self.lent = False

    def before(self, role: str, method: str) -> None:
        """Gather or free the module before a method of a role of the pool is called."""
        if role != "rollout":
            self.end()
        elif method in SAMPLES and not self.lent:
            self.lent = True  # set first: after a partial failure ``end`` must free the module
            self._tell("lend").result()

    def end(self) -> None:
        """Free the module if the samplers hold it."""
        if self.lent:
            self.lent = False
            self._tell("take_back").result()


class SharedModuleHolder:
    """A stand-in for a train engine, from which a sampler takes the shared module.

    Args:
        engine: its ``generation_module`` is collective on entry and exit only.
    """

    def __init__(self, engine: TrainEngine) -> None:
        self.engine = engine
        self._stack = contextlib.ExitStack()
        self._lent: nn.Module | None = None

    @property
    def module(self) -> nn.Module:
        """The module as sharded on this rank: for its config, not for sampling."""
        return self.engine.module

    @property
    def context(self) -> WorkerContext:
        """The engine's context."""
        return self.engine.context

    def lend(self) -> None:
        """Gather the module. Collective."""
        if self._lent is None:
            grad = torch.is_grad_enabled()
            self._lent = self._stack.enter_context(self.engine.generation_module())
            torch.set_grad_enabled(grad)  # gradients are disabled only within ``generation_module``

    def take_back(self) -> None:
        """Free the gathered module. Collective; does nothing if it is not gathered."""
        self._lent = None
        self._stack.close()

    @contextlib.contextmanager
    def generation_module(self) -> Iterator[nn.Module]:
        """Yield the gathered module, without communication between ranks.

        Raises:
            RuntimeError: the module is not gathered.
        """
        if self._lent is None:
            raise RuntimeError(
                "The actor's module is not lent: the runtime lends it before a sampler is asked."
            )
        with torch.no_grad():
            yield self._lent


class SharingHost(EngineHost):
    """An ``EngineHost`` of one of several ranks, whose sampler may use the actor's module while it is gathered.

    Attributes:
        lend: gathers the actor's module for the sampler. Collective.
        take_back: frees the gathered module. Collective.
    """

    lend: Callable[[], None]
    take_back: Callable[[], None]
    memory_metrics = staticmethod(memory_metrics)

    def _can_hold(self, actor: TrainEngine, wanted: str) -> bool:
        if self.place.world_size == 1:
            return True
        if not actor.lends_whole:
            if wanted == "shared":
                raise ConfigError(
                    f"rollout.weights = 'shared': the actor's module on {self.place.world_size} ranks, as a plugin has "
                    "distributed it, answers only where all of them call it. Set rollout.weights = 'own'."
                )
            return False
        return wanted == "shared" or fits(actor, self.place.device)

    def _module_holder(self, actor: TrainEngine) -> TrainEngine:
        if self.place.world_size == 1:
            return actor
        holder = SharedModuleHolder(actor)
        self.lend, self.take_back = holder.lend, holder.take_back
        self._stack.callback(holder.take_back)
        return cast("TrainEngine", holder)


def fits(engine: TrainEngine, device: torch.device) -> bool:
    """Return whether every rank has memory for the whole module and its shard. Collective; equal on all ranks.

    Adam's state, which the first step allocates, is included: two values for each trained weight of this rank.
    """
    need, room = gathered_bytes(engine), free_bytes(device)
    if need and engine.optimizer is not None and not engine.optimizer.state:
        trained = [local_part(p) for p in engine.module.parameters() if p.requires_grad]
        need += sum(2 * part.numel() * part.element_size() for part in trained)
    gap = torch.tensor([room - need], dtype=torch.int64)
    if dist.is_initialized():
        dist.all_reduce(gap, dist.ReduceOp.MIN)
    found = bool(gap >= 0)
    log.info(
        "rollout.weights = 'auto': the whole model takes %.2f GiB on each rank while it samples, %.2f GiB are free: %s.",
        need / GIB,
        room / GIB,
        "the sampler uses the actor's, gathered for the phase"
        if found
        else "the sampler has a separate copy",
    )
    return found


def _is_sharded(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor [D_1, D_2, ...] has parts on several ranks."""
    from torch.distributed.tensor import DTensor  # half a second, which few workers need to spend

    return isinstance(tensor, DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor [D_1, D_2, ...], as a view without gradient."""
    return tensor._local_tensor.detach() if _is_sharded(tensor) else tensor.detach()


def gathered_bytes(engine: TrainEngine) -> int:
    """Return the bytes of the sharded weights once gathered, in the engine's compute type if it has one."""
    dtype = getattr(getattr(engine, "precision", None), "compute", None)
    spread = [p for p in engine.module.parameters() if _is_sharded(p)]
    return sum(p.numel() * (dtype or p.dtype).itemsize for p in spread)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still allocate: on its accelerator, or its share of host memory."""
    if device.type != "cpu":
        free, _ = torch.accelerator.get_memory_info(device)
        cached = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
        return int(free + cached)
    processes = dist.get_world_size() if dist.is_initialized() else 1  # at most all of them are on this host
    return int(psutil.virtual_memory().available // processes)
