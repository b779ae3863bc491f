"""The base of runtimes whose workers are processes; a subclass defines how the processes are started.

The workers of all pools form one ``WorkerPool``; each pool is a separate ``torch.distributed`` world.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import logging
import operator
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from engine_core.config.assemble import portable
from engine_core.config.choices import AUTO
from engine_core.contracts.runtime import Role, Runtime, WorkerGroup
from engine_core.contracts.weight_sync import SyncResult
from engine_core.data import tokenizer_hash
from engine_core.errors import ConfigError
from engine_core.local.engine_host import default_device
from engine_plugin_processes.channel import new_token
from engine_plugin_processes.links import Links, one_checksum
from engine_plugin_processes.placement import (
    Pool,
    Slice,
    check_replaceable,
    plan_pools,
    slices_of,
    wanted_processes,
)
from engine_plugin_processes.replacement import Replacements
from engine_plugin_processes.shared_module import SharedModule
from engine_plugin_processes.transports.choice import KIND, ProcessDevice, Topology, by_topology, choose, make
from engine_plugin_processes.worker_group import RemoteWorkerGroup
from engine_plugin_processes.worker_pool import WorkerPool

if TYPE_CHECKING:
    from pathlib import Path

    from engine_plugin_processes.options import ProcessOptions
    from engine_plugin_processes.split import Merge
    from engine_plugin_processes.worker_pool import Reply
    from engine_plugin_processes.worker_process import WorkerHandle

log = logging.getLogger("engine")

FIRST: Merge = operator.itemgetter(0)


class MultiProcessRuntime(Runtime):
    """A runtime whose workers are processes; subclasses define how they are started."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options: ProcessOptions = self.config.runtime.options  #: the option table of the runtime
        self.crew: WorkerPool | None = None
        self.pools: list[Pool] = []  #: the pools of ranks
        self.hosts: dict[int, str] = {}  #: rank -> address at which it is reached
        self.links: Links
        self.replacements: Replacements | None = None  # None: no sampler may be lost
        self._transport = ""  # that sends weights to the sampler
        self._devices: dict[int, ProcessDevice] = {}  # rank -> device, once the rank has started
        self._loan: SharedModule | None = None  # if samplers share the actor's module
        self._token = new_token()

    # -- defined by a subclass ----------------------------------------------

    @abc.abstractmethod
    def _processes(self, roles: Mapping[str, Role]) -> int:
        """Return the number of ranks of the run; called before anything is started.

        Raises:
            ConfigError: the run file asks for more than is available.
        """

    @abc.abstractmethod
    def _launch(self) -> list[WorkerHandle]:
        """Start the ranks of ``pools``, or accept externally started ones; return all of them in order, or raise."""

    @abc.abstractmethod
    def _seat(self, pool: Pool, rank: int) -> dict[str, Any]:
        """Return the fields of a rank's first command that describe its location.

        Returns:
            ``local_rank`` (index of its device), ``local_world_size``, ``path`` (``sys.path``; None: unchanged) and
            ``host`` (the address at which other ranks reach it).
        """

    @abc.abstractmethod
    def _meeting(self, name: str) -> dict[str, Any]:
        """Return the rendezvous with this name, a ``file`` or ``tcp`` place as ``starting.store_at`` takes it."""

    def _can_replace(self) -> bool:
        """Return whether ``_begin_again`` is supported; valid after ``_processes`` was called."""
        return False

    def _begin_again(self, rank: int) -> WorkerHandle:
        """Start a new process for a rank whose last process was lost; called in a separate thread."""
        raise NotImplementedError(f"{type(self).__name__} replaces no worker.")

    def _one_machine(self) -> bool:
        """Return whether all processes are on this machine; valid after ``_processes`` was called."""
        return False

    @property
    def _size(self) -> int:
        return sum(len(pool.ranks) for pool in self.pools)

    # -- the contract -------------------------------------------------------

    def start(self, roles: Mapping[str, Role], total_steps: int) -> dict[str, WorkerGroup]:
        """Start the processes and build the roles' engines; everything is closed if a part fails.

        Raises:
            ConfigError: the run file asks for what this runtime cannot do, or the model was given as a Python object.
        """
        if self.live.get("model") is not None:
            raise ConfigError(
                f"runtime.backend = '{self.config.runtime.backend}': a model given from Python does not reach other "
                'processes. Save it and name the folder in [model] path, or use backend = "local".'
            )
        torch.manual_seed(self.config.run.seed)  # user stages may draw random numbers in this process
        try:
            self.pools = plan_pools(self.config, roles, self._processes(roles))
            self._check_transport(roles)
            if self.options.max_replacements:
                check_replaceable(self.config, self.pools, self._can_replace())
            return self._start(roles, total_steps)
        except BaseException:
            self.close()
            raise

    def push_weights(self, source: str, target: str, version: int) -> SyncResult:
        """Send a trained role's weights to a sampler, in one pool or across pools; replaced samplers join first."""
        self._take_back()
        if self.replacements is not None:
            self.replacements.join()
        pool, other = self._pool(source), self._pool(target)
        if pool is not other:
            return self.links.push(pool, other, (source, target), version, None)
        merge = functools.partial(_one_sync, target)
        fields = {"source": source, "target": target, "version": version}
        return self._tell(pool, "push_weights", (target, "update_weights"), merge, **fields).result()

    def mix_weights(self, source: str, target: str, mix: float) -> None:
        """Mix a trained role's weights into an untrained one, in one pool or across pools."""
        self._take_back()
        what, pool, other = (target, "load_named_weights"), self._pool(source), self._pool(target)
        if pool is not other:
            self.links.push(pool, other, (source, target), 0, mix)
        else:
            self._tell(pool, "mix_weights", what, source=source, target=target, mix=mix).result()

    def loss_metrics(self) -> dict[str, float]:
        """Return counts of lost and replaced samplers since the last call; {} if none may be lost."""
        return {} if self.replacements is None else self.replacements.metrics()

    def memory_metrics(self) -> dict[str, float]:
        """Return the memory metrics of each role: the maximum over the ranks of its pool."""
        sent = [
            (pool, self._tell(pool, "memory_metrics", (pool.roles[0], "memory"), _most))
            for pool in self.pools
        ]
        found: dict[str, float] = {}
        for pool, future in sent:
            for name, value in future.result().items():
                found |= {name.replace("/", f"/{role}/", 1): value for role in pool.roles}
        return found

    def give_up(self) -> None:
        """Abandon this thread's in-flight commands that are safe to interrupt."""
        if self.crew is not None:
            self.crew.give_up()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Hand device memory over for a phase; a shared module is taken back unless the phase is ``generate``."""
        if name != "generate":
            self._take_back()
        self._trade(name)
        yield

    @contextmanager
    def profiled(self, folder: Path) -> Iterator[None]:
        """Profile all ranks during the context; after a stop they write their files when they end.

        Raises:
            Exception: the context's own error, after the ranks wrote their files.
        """
        self._profile(str(folder))
        try:
            yield
        except Exception:
            try:
                self._profile("")
            except Exception as error:
                log.warning("The profile of the failed step may lack files: %s", error)
            raise
        self._profile("")

    def close(self) -> None:
        """Stop replacing samplers and end all workers."""
        replacements, self.replacements = self.replacements, None
        if replacements is not None:
            replacements.close()
        try:
            if self.crew is not None:
                self.crew.close()
                self.crew = None
        finally:
            if replacements is not None:
                replacements.settle()

    # -- start --------------------------------------------------------------

    def _start(self, roles: Mapping[str, Role], total_steps: int) -> dict[str, WorkerGroup]:
        workers = self._launch()
        name = self.config.runtime.backend
        self.crew = WorkerPool(
            workers, self.options.command_timeout_minutes * 60, f"runtime.{name}.command_timeout_minutes"
        )
        common = self._order(total_steps)
        orders = {}
        for pool in self.pools:
            served = {name: dataclasses.asdict(roles[name]) for name in pool.roles}
            for rank in pool.ranks:
                self.crew.workers[rank].roles = pool.roles
                orders[rank] = {**common, **self._place(pool, rank), "roles": served}
        if self.options.max_replacements:
            self.replacements = self._replacing(common, roles["rollout"])
            self.crew.may_lose = self.replacements.lost
        ready = self.crew.send(
            orders,
            ("worker", "start"),
            leaders=list(orders),
            merge=lambda results: dict(zip(orders, results, strict=True)),
            deadline=self._start_limit,
        ).result()
        self._devices = {rank: ProcessDevice(**found["device"]) for rank, found in ready.items()}
        if {"actor", "rollout"} <= roles.keys():
            self._transport = choose(self.config, self._topology(self._pool("actor"), self._pool("rollout")))
        self.links = Links(
            self.crew, self._transport_to, self._ranks, self.hosts, self._meeting, self._token,
            self.replacements,
        )  # fmt: skip
        self.shared = any(found["shared"] for found in ready.values())
        if self.shared and len((lent := self._pool("rollout")).ranks) > 1:
            self._loan = SharedModule(lambda method: self._tell(lent, method, ("rollout", method)))
        log.info("Workers: %s.", ", ".join(map(str, self.pools)))
        groups: dict[str, WorkerGroup] = {}
        for pool in self.pools:
            made = {name: self._group(name, roles[name], pool, ready) for name in pool.roles}
            for group in made.values():
                group.repeatable = self._repeatable(pool)
            groups |= made
        self._trade("start")  # reward models sleep until they are called
        return groups

    @property
    def _start_limit(self) -> tuple[float, str]:
        """Timeout for the start of a worker in seconds, and the key that sets it."""
        minutes, name = self.options.startup_timeout_minutes, self.config.runtime.backend
        return minutes * 60, f"runtime.{name}.startup_timeout_minutes"

    def _check_transport(self, roles: Mapping[str, Role]) -> None:
        """Check the weight transport that the run file names, before anything is started.

        Raises:
            ConfigError: the transport does not fit this run.
        """
        name = self.config.rollout.transport
        if {"actor", "rollout"} <= roles.keys() and name != AUTO[KIND] and name != "same_process":
            kind, options = make(self.config, self.plugins, name)
            kind.check(options, self._one_machine())

    def _repeatable(self, pool: Pool) -> bool:
        """Return whether results of the pool are bitwise repeatable: on CPUs, or if the run is deterministic."""
        return self.config.run.deterministic or all(self._devices[rank].kind == "cpu" for rank in pool.ranks)

    def _topology(self, source: Pool, target: Pool) -> Topology:
        like = self._devices.get(target.ranks[0], ProcessDevice())  # the same for later ranks
        devices = tuple(self._devices.get(rank, like) for rank in (source.ranks[0], *target.ranks))
        may_leave = self.replacements is not None and "rollout" in target.roles
        return Topology(source is not target, devices, self._one_machine(), may_leave)

    def _transport_to(self, source: Pool, target: Pool) -> str:
        """Return the sampler's transport, or the one that ``auto`` means if that one does not connect pools.

        The latter sends weights to a reference in another pool while the sampler shares the actor's pool.
        """
        found = self._transport
        return found if found and found != "same_process" else by_topology(self._topology(source, target))[0]

    def _place(self, pool: Pool, rank: int, again: int = 0) -> dict[str, Any]:
        """Return the fields of a rank's first command that describe its location and its world.

        Args:
            pool: the rank's pool.
            rank: rank in the run.
            again: number of the replacement in the run; 0: the first process of the rank.
        """
        seat = self._seat(pool, rank)
        self.hosts[rank] = seat.pop("host")
        if self.options.max_replacements and "rollout" in pool.roles:
            world = {"rank": 0, "world_size": 1, "store": self._meeting(f"{pool.name}-{rank}-{again}")}
        else:
            place = pool.ranks.index(rank)
            world = {"rank": place, "world_size": len(pool.ranks), "store": self._meeting(pool.name)}
        return {**seat, **world, "kind": "start"}

    def _replacing(self, common: Mapping[str, Any], role: Role) -> Replacements:
        """Build the ``Replacements`` of the sampler's pool."""
        assert self.crew is not None
        pool = self._pool("rollout")
        served = {"rollout": dataclasses.asdict(role)}

        def begin(rank: int, again: int) -> tuple[WorkerHandle, Mapping[str, Any]]:
            """Start a process for a rank; return it and its first command. Raise after killing it if that fails."""
            worker = self._begin_again(rank)
            try:
                return worker, {**common, **self._place(pool, rank, again), "roles": served}
            except BaseException:  # for example, the run has ended
                worker.kill()
                raise

        return Replacements(
            self.crew,
            pool.ranks,
            self.options.max_replacements,
            f"runtime.{self.config.runtime.backend}.max_replacements",
            begin,
            self._start_limit,
        )

    def _ranks(self, pool: Pool) -> list[int]:
        """Return the ranks of a pool that are not being replaced."""
        away = self.replacements.away if self.replacements is not None else ()
        return [rank for rank in pool.ranks if rank not in away]

    def _here(self) -> int:
        """Return the number of processes to start on this machine.

        Raises:
            ConfigError: the machine has fewer accelerators.
        """
        wanted = wanted_processes(self.config)
        if self.options.device == "cpu" or default_device().type == "cpu":
            return wanted or 1
        there = torch.accelerator.device_count()
        if (wanted or 0) > there:
            name = self.config.runtime.backend
            key = "placement.pools" if self.config.placement.pools else f"runtime.{name}.processes"
            raise ConfigError(
                f"{key}: {wanted} processes need an accelerator each, and this machine shows "
                f'{there}. Lower it, look at CUDA_VISIBLE_DEVICES, or set runtime.{name}.device = "cpu".'
            )
        return wanted or there

    def _order(self, total_steps: int) -> dict[str, Any]:
        """Return the fields that the first command of every worker has."""
        return {
            "config": portable(self.config),
            "total_steps": total_steps,
            "tokenizer": tokenizer_hash(self.live["tokenizer"]) if "tokenizer" in self.live else None,
            "device": self.options.device,
            "log_level": log.getEffectiveLevel(),
            "stall_seconds": self.options.command_timeout_minutes * 60,
            "start_seconds": self.options.startup_timeout_minutes * 60,
            "token": self._token,
        }

    def _group(
        self, name: str, role: Role, pool: Pool, ready: Mapping[int, Mapping[str, Any]]
    ) -> RemoteWorkerGroup:
        assert self.crew is not None
        found = [ready[rank]["roles"][name] for rank in pool.ranks]
        ranks, attention = list(pool.ranks), found[0]["attention"]
        replacements = self.replacements if name == "rollout" else None
        if replacements is not None:
            slices = [Slice((rank,), rank) for rank in ranks]
        else:
            slices = slices_of(name, [each["layout"] for each in found], ranks)
        independent = len(ranks) == 1 or (role.kind == "rollout" and len(slices) == len(ranks))
        group = RemoteWorkerGroup(self.crew, name, slices, attention, independent, replacements=replacements)
        if self._loan is not None and pool is self._pool("rollout"):
            group.before = self._loan.before
        return group

    def _take_back(self) -> None:
        if self._loan is not None:
            self._loan.end()

    # -- commands -----------------------------------------------------------

    def _pool(self, role: str) -> Pool:
        return next(pool for pool in self.pools if role in pool.roles)

    def _tell(
        self, pool: Pool, method: str, what: tuple[str, str], merge: Merge = FIRST, **plain: Any
    ) -> Reply:
        """Call a method of the host of every rank of a pool; return the merged results, by default the first rank's."""
        assert self.crew is not None
        ranks, message = self._ranks(pool), {"kind": "host", "method": method, "plain": plain}
        return self.crew.send(dict.fromkeys(ranks, message), what, leaders=ranks, merge=merge)

    def _profile(self, folder: str) -> None:
        assert self.crew is not None
        messages = {
            rank: {"kind": "profile", "folder": folder, "name": f"rank_{rank}"}
            for pool in self.pools
            for rank in self._ranks(pool)
        }
        self.crew.send(messages, ("worker", "profile")).result()

    def _trade(self, phase: str) -> None:
        """Hand device memory over for a phase in every process, all pools at the same time."""
        if self.options.offload_idle_roles:
            start = time.perf_counter()
            sent = [self._tell(pool, "trade", (pool.roles[0], "sleep"), phase=phase) for pool in self.pools]
            for future in sent:
                future.result()
            self.traded_seconds += time.perf_counter() - start


def _most(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the maximum of each metric over ranks."""
    return {name: max(result[name] for result in results) for name in results[0]}


def _one_sync(target: str, results: Sequence[SyncResult]) -> SyncResult:
    """Return one result for the updates of all ranks; raise if the ranks received different weights."""
    first = results[0]
    checksum = one_checksum(target, [result.checksum for result in results])
    moved, seconds = sum(result.bytes for result in results), max(result.seconds for result in results)
    return SyncResult(first.version, moved, seconds, checksum)


def even_threads(processes: int) -> int | None:
    """Return the CPU threads of each process; None if ``OMP_NUM_THREADS`` is set or only one process runs."""
    if "OMP_NUM_THREADS" in os.environ or processes == 1:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // processes, 1)
