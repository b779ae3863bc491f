"""One module for trainer and sampler on several ranks: lent to the samplers for as long as they sample.

An engine that shards gathers its module on all ranks at once; samplers each have batches of their own. So it is
gathered when the first of them is asked to sample, used without a word between ranks, and given back before any
other role of the processes works: ``SharedModule`` is the controller's side, ``SharedModuleHolder`` that of each process.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, cast

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from engine_core.errors import ConfigError
from engine_core.local.engine_host import EngineHost

if TYPE_CHECKING:
    from engine_core.contracts.engines import TrainEngine, WorkerContext

log = logging.getLogger("engine")

SAMPLES = frozenset({"generate", "advance", "step", "pause"})
"""Methods of a sampler that may run its model."""
GIB = 2**30


class SharedModule:
    """Whether the samplers of a pool have the actor's module now.

    Args:
        tell: sends ``lend`` or ``take_back`` to every rank of the pool.
    """

    def __init__(self, tell: Callable[[str], Future[Any]]) -> None:
        self._tell = tell
        self.lent = False

    def before(self, role: str, method: str) -> None:
        """Lend, or take back, before a role of the pool is asked for something."""
        if role != "rollout":
            self.end()
        elif method in SAMPLES and not self.lent:
            self.lent = True  # also where it fails half way: then there is something to take back
            self._tell("lend").result()

    def end(self) -> None:
        """Take it back, where it is lent."""
        if self.lent:
            self.lent = False
            self._tell("take_back").result()


class SharedModuleHolder:
    """Stands for a train engine towards the sampler that shares its module.

    Args:
        engine: whose ``generation_module`` is collective when it is entered and left, and not in between.
    """

    def __init__(self, engine: TrainEngine) -> None:
        self.engine = engine
        self._stack = contextlib.ExitStack()
        self._lent: nn.Module | None = None

    @property
    def module(self) -> nn.Module:
        """As it lies on this rank: for its config, not for sampling."""
        return self.engine.module

    @property
    def context(self) -> WorkerContext:
        """Of the engine."""
        return self.engine.context

    def lend(self) -> None:
        """Gather the module. Collective."""
        if self._lent is None:
            grad = torch.is_grad_enabled()
            self._lent = self._stack.enter_context(self.engine.generation_module())
            torch.set_grad_enabled(grad)  # only within ``generation_module`` is it off

    def take_back(self) -> None:
        """Free it. Collective; nothing where it is not lent."""
        self._lent = None
        self._stack.close()

    @contextlib.contextmanager
    def generation_module(self) -> Iterator[nn.Module]:
        """The module as it was lent; no other rank takes part."""
        if self._lent is None:
            raise RuntimeError(
                "The actor's module is not lent: the runtime lends it before a sampler is asked."
            )
        with torch.no_grad():
            yield self._lent


class SharingHost(EngineHost):
    """The engines of one rank of several, whose sampler may use the actor's module while it is gathered for a phase.

    Each rank samples other sequences, and a sharded module is gathered by all ranks at once: so it is gathered before the
    first sampler is asked, and freed before another role works.

    Attributes:
        lender: what the sampler takes the module from; None where it has weights of its own.
    """

    lender: SharedModuleHolder | None = None

    def lend(self) -> None:
        """Gather the actor's module for the sampler. Collective."""
        if self.lender is not None:
            self.lender.lend()

    def take_back(self) -> None:
        """Free what ``lend`` gathered. Collective."""
        if self.lender is not None:
            self.lender.take_back()

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
        self.lender = SharedModuleHolder(actor)
        self._stack.callback(self.lender.take_back)
        return cast("TrainEngine", self.lender)


def fits(engine: TrainEngine, device: torch.device) -> bool:
    """Whether every rank has room for the whole module beside what it holds; the same answer on all. Collective.

    The state of Adam, which is made in the first step, is counted too: two values a weight that lies here.
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
        else "the sampler has a copy of its own",
    )
    return found


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that lies on this rank, as a view without gradient."""
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor.detach()


def gathered_bytes(engine: TrainEngine) -> int:
    """Of the weights that are spread over ranks, whole and in the type of the forward pass where the engine tells it."""
    dtype = getattr(getattr(engine, "precision", None), "compute", None)
    spread = [p for p in engine.module.parameters() if isinstance(p, DTensor)]
    return sum(p.numel() * (dtype or p.dtype).itemsize for p in spread)


def free_bytes(device: torch.device) -> int:
    """Memory that this process may still take: of its accelerator, or its share of the host's."""
    if device.type != "cpu":
        free, _ = torch.accelerator.get_memory_info(device)
        cached = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
        return int(free + cached)
    processes = dist.get_world_size() if dist.is_initialized() else 1  # all of them here, at most
    return int(psutil.virtual_memory().available // processes)
