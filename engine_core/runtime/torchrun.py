"""The torchrun runtime: workers are processes, on this machine or on many; the controller is one more, beside rank 0.

``engine train`` starts the workers of one machine itself, over socket pairs and a rendezvous in a private folder,
so that no port is taken and two runs never meet. Started by an external ``torchrun``, on one or many nodes, the
process of rank 0 is the controller and the others become workers (``elastic``).

Why not torch's own ``elastic_launch`` as a library: it blocks its caller, takes the signals that save a run, and has
no channel to what it started.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine_core.assemble import portable
from engine_core.data import tokenizer_hash
from engine_core.errors import ConfigError, TrainingFailed
from engine_core.runtime import elastic
from engine_core.runtime.base import Role, Runtime, WorkerGroup
from engine_core.runtime.channel import new_token
from engine_core.runtime.crew import Crew, message_to
from engine_core.runtime.host import default_device
from engine_core.runtime.placement import Pool, Slice, plan_pools, slices_of, wanted_processes
from engine_core.runtime.split import Merge, Running, merge_plain, split_batch, split_requests
from engine_core.runtime.worker_process import WorkerHandle
from engine_core.weight_sync import SyncResult

if TYPE_CHECKING:
    from engine_core.runtime.codec import Encoded
    from engine_core.runtime.options import TorchrunOptions
    from engine_core.types import Batch

log = logging.getLogger("engine")

LEFT_AT_ONCE = frozenset({"generate", "advance", "step", "infer", "forward_backward"})
"""Methods that a stop may leave at any point, where no rank waits for another in them."""
ONE_BY_ONE = frozenset({"add", "advance", "step", "abort"})
"""Methods of a sampler whose requests come and go."""


class CrewGroup(WorkerGroup):
    """The ranks of one role.

    Args:
        crew: all workers.
        role: of the group.
        slices: of its ranks, by data-parallel rank.
        attention: of ``packing.sequence_cost``, for its model.
        independent: no rank waits for another in a call.
    """

    def __init__(
        self, crew: Crew, role: str, slices: Sequence[Slice], attention: float, independent: bool
    ) -> None:
        self.crew, self.role, self.slices, self.attention = crew, role, slices, attention
        self.independent = independent
        self.running = Running(len(slices))

    def call(self, method: str, batch: Batch | None = None, split: str = "dp", **plain: Any) -> Future[Any]:
        if split not in ("dp", "all"):
            raise ValueError(f"split is '{split}'; expected 'dp' or 'all'.")
        count = len(self.slices)
        merge: Merge = merge_plain
        batches: Sequence[Batch | None] = [batch] * count
        arguments = [plain] * count
        if batch is not None and split == "dp":
            batches, merge = split_batch(batch, count, self.attention)
        elif method == "generate":
            shares, merge = split_requests(plain["requests"], count)
            arguments = [{**plain, "requests": share} for share in shares]
        elif method in ONE_BY_ONE:
            self.running.forget(plain.get("dropped", ()))
            shares, merge = self.running.share(plain.get("requests", ())), self.running.merge
            if "requests" in plain:
                arguments = [{**plain, "requests": share} for share in shares]
        number = self.crew.next_number()
        messages: dict[int, Encoded] = {}
        encoded: dict[tuple[int, int], Encoded] = {}  # once for all ranks that are given the same
        for at, rows, given in zip(self.slices, batches, arguments, strict=True):
            same = id(rows), id(given)
            if same not in encoded:
                encoded[same] = message_to(
                    number, "call", role=self.role, method=method, batch=rows, plain=given
                )
            messages |= dict.fromkeys(at.ranks, encoded[same])
        return self.crew.send(
            messages,
            (self.role, method),
            number,
            leaders=[at.leader for at in self.slices],
            merge=merge,
            interruptible=self.independent and method in LEFT_AT_ONCE,
        )


class TorchrunRuntime(Runtime):
    """See the module and ``Runtime``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options: TorchrunOptions = self.config.runtime.options
        self.crew: Crew | None = None
        self.pools: list[Pool] = []
        self.addresses: dict[int, tuple[str, int]] = {}  # where ranks take weights of another pool
        self._folder: Path | None = None
        self._token = new_token()

    def start(self, roles: Mapping[str, Role], total_steps: int) -> dict[str, WorkerGroup]:
        if self.live.get("model") is not None:
            raise ConfigError(
                "runtime.backend = 'torchrun': a model given from Python does not reach other processes. Save it and "
                'name the folder in [model] path, or use backend = "local".'
            )
        launch = elastic.launched()
        processes = launch.world_size if launch else self._processes()
        wanted = wanted_processes(self.config)
        if launch and wanted not in (None, processes):
            raise ConfigError(
                f"runtime.torchrun.processes: the file asks for {wanted}, and torchrun has started {processes}."
            )
        self.pools = plan_pools(self.config, roles, processes)
        torch.manual_seed(self.config.run.seed)  # for what draws from it here: stages of a user
        try:
            return self._start(roles, total_steps, processes, launch)
        except BaseException:
            self.close()
            raise

    def push_weights(self, source: str, target: str, version: int) -> SyncResult:
        if self._pool(source) is not self._pool(target):
            return self._across(source, target, version)
        pool = self._pool(source)
        return self._tell(
            pool, "push", (target, "update_weights"), list(pool.ranks), functools.partial(_one_sync, target),
            source=source, target=target, version=version,
        ).result()  # fmt: skip

    def mix_weights(self, source: str, target: str, mix: float) -> None:
        if self._pool(source) is not self._pool(target):
            self._across(source, target, 0, mix)
            return
        what = target, "load_named_weights"
        self._tell(self._pool(source), "mix", what, source=source, target=target, mix=mix).result()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._trade(name)
        yield

    def close(self) -> None:
        if self.crew is not None:
            self.crew.close()
            self.crew = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    # -- start --------------------------------------------------------------

    def _processes(self) -> int:
        """On this machine.

        Raises:
            ConfigError: more than it has accelerators.
        """
        wanted = wanted_processes(self.config)
        if self.options.device == "cpu" or default_device().type == "cpu":
            return wanted or 1
        there = torch.accelerator.device_count()
        if (wanted or 0) > there:
            key = "placement.pools" if self.config.placement.pools else "runtime.torchrun.processes"
            raise ConfigError(
                f"{key}: {wanted} processes need an accelerator each, and this machine shows {there}. Lower it, look "
                'at CUDA_VISIBLE_DEVICES, or set runtime.torchrun.device = "cpu".'
            )
        return wanted or there

    def _start(
        self, roles: Mapping[str, Role], total_steps: int, processes: int, launch: elastic.Launch | None
    ) -> dict[str, WorkerGroup]:
        workers = launch.gather(self.options.start_minutes * 60) if launch else self._spawn(processes)
        self.crew = Crew(workers, self.options.stall_minutes * 60)
        self._folder = None if launch else Path(tempfile.mkdtemp(prefix="engine-torchrun-"))
        common = self._order(total_steps, processes, launch)
        number, orders = self.crew.next_number(), {}
        for pool in self.pools:
            served = {name: dataclasses.asdict(roles[name]) for name in pool.roles}
            for place, rank in enumerate(pool.ranks):
                workers[rank].roles = pool.roles
                mine = {"rank": place, "world_size": len(pool.ranks), "roles": served}
                local = launch.local_rank(rank) if launch else rank
                orders[rank] = {
                    **common, **mine, "kind": "start", "id": number, "local_rank": local,
                    "store": self._store(pool, launch),
                }  # fmt: skip
        ready = self.crew.send(
            orders,
            ("worker", "start"),
            number,
            leaders=list(orders),
            merge=lambda results: dict(zip(orders, results, strict=True)),
            deadline=self.options.start_minutes * 60,
        ).result()
        self.addresses = {rank: tuple(found["address"]) for rank, found in ready.items() if found["address"]}
        self.shared = any(found["shared"] for found in ready.values())
        shown = ", ".join(
            f"{pool.name}: {len(pool.ranks)} x ({', '.join(pool.roles)})" for pool in self.pools
        )
        log.info("Workers: %s.", shown)
        groups: dict[str, WorkerGroup] = {}
        for pool in self.pools:
            groups |= {name: self._group(name, roles[name], pool, ready) for name in pool.roles}
        self._trade("start")  # a reward's model sleeps until it is asked
        return groups

    def _spawn(self, processes: int) -> list[WorkerHandle]:
        threads = self.options.threads or _even_threads(processes)
        env = {"OMP_NUM_THREADS": str(threads)} if threads else {}
        loopback = elastic.loopback_interface()
        env |= {name: os.environ.get(name, loopback) for name in elastic.INTERFACE_VARIABLES if loopback}
        workers: list[WorkerHandle] = []
        try:
            for rank in range(processes):
                workers.append(WorkerHandle.start(rank, env))
        except BaseException:
            for worker in workers:
                worker.kill()
            raise
        return workers

    def _order(self, total_steps: int, processes: int, launch: elastic.Launch | None) -> dict[str, Any]:
        """What every worker is told."""
        from engine_core.runtime.starting import portable_path

        return {
            "config": portable(self.config),
            "total_steps": total_steps,
            "tokenizer": tokenizer_hash(self.live["tokenizer"]),
            "device": self.options.device,
            "local_world_size": launch.local_world_size if launch else processes,
            "path": None if launch else portable_path(),
            "log_level": log.getEffectiveLevel(),
            "stall_seconds": self.options.stall_minutes * 60,
            "start_seconds": self.options.start_minutes * 60,
            "token": self._token,
            "listen": (launch.host if launch else "127.0.0.1") if len(self.pools) > 1 else None,
        }

    def _store(self, pool: Pool, launch: elastic.Launch | None) -> dict[str, Any]:
        """Where the ranks of a pool meet: a file of our own, or what torchrun brings."""
        if launch is None:
            return {"file": str(self._folder / pool.name), "tcp": None}  # type: ignore[operator]
        return {"file": None, "tcp": launch.store_of(pool.name)}

    def _group(self, name: str, role: Role, pool: Pool, ready: Mapping[int, Mapping[str, Any]]) -> CrewGroup:
        assert self.crew is not None
        found = [ready[rank]["roles"][name] for rank in pool.ranks]
        slices = slices_of(name, [each["layout"] for each in found], list(pool.ranks))
        alone = len(pool.ranks) == 1
        independent = alone or (role.kind == "rollout" and len(slices) == len(pool.ranks))
        return CrewGroup(self.crew, name, slices, found[0]["attention"], independent)

    # -- commands -----------------------------------------------------------

    def _pool(self, role: str) -> Pool:
        return next(pool for pool in self.pools if role in pool.roles)

    def _tell(
        self,
        pool: Pool,
        kind: str,
        what: tuple[str, str],
        leaders: Sequence[int] = (),
        merge: Any = None,
        **fields: Any,
    ) -> Future[Any]:
        """One command to all ranks of a pool."""
        assert self.crew is not None
        number = self.crew.next_number()
        messages = dict.fromkeys(pool.ranks, message_to(number, kind, **fields))
        return self.crew.send(
            messages, what, number, leaders=leaders, merge=merge or (lambda results: results[0])
        )

    def _trade(self, phase: str) -> None:
        """Each process for itself; all pools at the same time."""
        if self.options.trade_memory:
            told = [self._tell(pool, "phase", (pool.roles[0], "sleep"), name=phase) for pool in self.pools]
            for future in told:
                future.result()

    def _across(self, source: str, target: str, version: int, mix: float | None = None) -> SyncResult:
        """Weights from one pool to another: its first rank streams to all ranks of the other."""
        assert self.crew is not None
        start, givers, takers = time.perf_counter(), self._pool(source), self._pool(target)
        taken = self._tell(
            takers, "receive", (target, "update_weights"), list(takers.ranks), functools.partial(_one_checksum, target),
            role=target, version=version, mix=mix,
        )  # fmt: skip
        number = self.crew.next_number()
        to = [list(self.addresses[rank]) for rank in takers.ranks]
        messages = {
            rank: message_to(number, "send", role=source, addresses=to if rank == givers.ranks[0] else [])
            for rank in givers.ranks
        }
        sent = self.crew.send(messages, (source, "named_weights"), number).result()
        return SyncResult(version, sent * len(takers.ranks), time.perf_counter() - start, taken.result())


def _one_sync(target: str, results: Sequence[SyncResult]) -> SyncResult:
    """The ranks' updates as one; every rank must have received the same."""
    first = results[0]
    checksum = _one_checksum(target, [result.checksum for result in results])
    moved, seconds = sum(result.bytes for result in results), max(result.seconds for result in results)
    return SyncResult(first.version, moved, seconds, checksum)


def _one_checksum(target: str, checksums: Sequence[str]) -> str:
    if len(set(checksums)) > 1:
        listed = ", ".join(f"rank {rank}: {text}" for rank, text in enumerate(checksums))
        raise TrainingFailed(
            f"The ranks of '{target}' have received different weights ({listed}). The train engine must stream the "
            "same tensors on every rank."
        )
    return checksums[0]


def _even_threads(processes: int) -> int | None:
    """Cores of each process; None where the environment says, or one process has them all."""
    if "OMP_NUM_THREADS" in os.environ or processes == 1:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // processes, 1)
