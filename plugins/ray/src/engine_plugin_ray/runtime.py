"""The ray runtime: every worker is an actor, in a placement group of its pool.

The controller is the driver of a Ray job. Ray places and starts workers, and reports why they ended. Each worker then
connects to the controller and proves the run's token, as under an external ``torchrun``: commands and answers are those
of the other runtimes of processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from ray.exceptions import GetTimeoutError, RayError

from engine_core.errors import EnvironmentProblem
from engine_core.local.engine_host import default_device
from engine_plugin_processes import elastic_launch as elastic
from engine_plugin_processes.channel import callers, listen
from engine_plugin_processes.placement import Pool, wanted_processes
from engine_plugin_processes.runtime import MultiProcessRuntime, even_threads
from engine_plugin_ray.cluster import Cluster, asks_for_token
from engine_plugin_ray.placing import (
    THIS_MACHINE,
    Node,
    check,
    nodes_of_cluster,
    release,
    reserve,
    resources,
)

if TYPE_CHECKING:
    from engine_core.contracts.runtime import Role
    from engine_plugin_processes.channel import Channel
    from engine_plugin_processes.worker_process import WorkerHandle
    from engine_plugin_ray.handle import ActorHandle
    from engine_plugin_ray.plugin import RayOptions

log = logging.getLogger("engine")

LOOK_SECONDS = 0.5  # between two checks of the actors while they connect
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
NOT_IMPORTED = re.compile(r"(?:ModuleNotFoundError|ImportError): (.{1,300}?)\.?(?= \^| File |$)")
NODE = re.compile(r"\bip=([^,)\s]+)")


class RayRuntime(MultiProcessRuntime):
    """A runtime whose workers are actors of a Ray cluster."""

    options: RayOptions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cluster = Cluster(self.options.address)
        self._gpu = False
        self._groups: list[Any] = []  # placement groups, one for each pool
        self._seats: dict[int, ActorHandle] = {}
        self._store: Any = None  # TCPStore for the rendezvous of ranks on several nodes

    def close(self) -> None:
        """Close the runtime and release what it holds in the cluster; a private cluster ends."""
        with contextlib.ExitStack() as stack:  # each runs even if the one before fails
            stack.callback(self.cluster.close)
            stack.callback(self._leave)
            super().close()

    def _leave(self) -> None:
        """Release what is held in the cluster; a private cluster ends with all of it."""
        self._store = None
        self._seats = {}
        groups, self._groups = self._groups, []
        if not self.cluster.own:
            release(groups)

    def _processes(self, roles: Mapping[str, Role]) -> int:
        import ray

        if not self.options.address and not ray.is_initialized():
            self._gpu = self.options.device != "cpu" and default_device().type != "cpu"
            return wanted_processes(self.config) or (torch.accelerator.device_count() if self._gpu else 1)
        self.cluster.join()
        gpus = int(sum(node.get("GPU", 0) for node in nodes_of_cluster().values()))
        self._gpu = self.options.device != "cpu" and gpus > 0
        return wanted_processes(self.config) or (gpus if self._gpu else 1)

    def _launch(self) -> list[WorkerHandle]:
        import ray

        size = self._size
        joined = ray.is_initialized()
        # a private cluster has as many CPUs as are requested, as with other launchers
        gpus = torch.accelerator.device_count() if self._gpu else 0
        own: Node = {"CPU": size * self.options.cpus_per_process, "GPU": gpus}
        nodes = nodes_of_cluster() if joined else {THIS_MACHINE: own}
        check(self.pools, self.options, self._gpu, nodes, self.cluster.shown)
        if not joined:
            self.cluster.start(own["CPU"], gpus)
        elif not asks_for_token():
            log.warning(
                "Ray: %s asks for no token: every client that reaches it can run programs on its nodes. Start it with "
                "RAY_AUTH_MODE=token.",
                self.cluster.shown,
            )
        self._groups = reserve(self.pools, self.options, self._gpu)
        self._seats = self._take_seats([rank for pool in self.pools for rank in pool.ranks])
        return list(self._seats.values())

    def _take_seats(self, ranks: Sequence[int]) -> dict[int, ActorHandle]:
        """Start an actor for each of these ranks, in order, in its own bundle.

        Raises:
            EnvironmentProblem: an actor does not start.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from engine_plugin_ray.actor import Seat
        from engine_plugin_ray.handle import ActorHandle

        made, each, given = ray.remote(Seat), resources(self.options, self._gpu), self._given(self._size)
        actors: list[Any] = []
        for pool, group in zip(self.pools, self._groups, strict=True):
            for rank in (rank for rank in pool.ranks if rank in ranks):
                chosen = made.options(
                    num_cpus=each["CPU"],
                    num_gpus=each.get("GPU", 0),
                    max_restarts=0,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, pool.ranks.index(rank)),
                )
                actors.append(chosen.remote(*given))
        try:
            about = ray.get(
                [actor.about.remote() for actor in actors], timeout=self.options.startup_timeout_minutes * 60
            )
            served, connections = self._connect(dict(zip(ranks, actors, strict=True)))
        except RayError as error:
            raise EnvironmentProblem(_no_seat(error)) from error
        here, logs = ray.get_runtime_context().get_node_id(), self.cluster.logs
        handles = {}
        for rank, actor, found in zip(ranks, actors, about, strict=True):
            channel, line = connections[rank]
            shown = logs if found["node"] == here else None
            handles[rank] = ActorHandle(rank, actor, channel, served[rank], found, shown)
            handles[rank].watch(line)
        return handles

    def _connect(self, actors: Mapping[int, Any]) -> tuple[dict[int, Any], dict[int, list[Channel]]]:
        """Have actors connect to this process and serve commands.

        Args:
            actors: the actors, by rank.

        Returns:
            By rank, the reference to the result of ``Seat.serve``; the connection for messages and an idle one.

        Raises:
            EnvironmentProblem: an actor does not connect in time.
            RayError: an actor has ended, or does not reach this process.
        """
        import ray

        deadline = time.monotonic() + self.options.startup_timeout_minutes * 60
        connections: dict[int, list[Channel]] = {rank: [] for rank in actors}
        with listen(ray.util.get_node_ip_address()) as listener:
            at = listener.getsockname()[:2]
            served = {rank: actor.serve.remote(at, self._token, rank) for rank, actor in actors.items()}
            with contextlib.closing(callers(listener, self._token, deadline, LOOK_SECONDS)) as coming:
                for caller in coming:
                    if caller is None:
                        ray.get(
                            ray.wait(list(served.values()), timeout=0)[0]
                        )  # raises the error of one that failed
                    elif caller[0] in actors:
                        connections[caller[0]].append(caller[1])
                    if all(len(found) == 2 for found in connections.values()):
                        return served, connections
        absent = sorted(rank for rank, found in connections.items() if len(found) < 2)
        raise EnvironmentProblem(
            f"Rank {', '.join(map(str, absent))} did not connect to the controller at {at[0]} within "
            "runtime.ray.startup_timeout_minutes. Let nodes reach each other on any port, as Ray asks."
        )

    def _can_replace(self) -> bool:
        return True

    def _begin_again(self, rank: int) -> ActorHandle:
        self._seats |= self._take_seats([rank])
        return self._seats[rank]

    def _given(self, size: int) -> tuple[dict[str, str], list[str] | None, str]:
        """Return what an actor gets before it imports anything: environment, path, working folder.

        Args:
            size: ranks of the run.
        """
        from engine_plugin_processes.starting import portable_path

        env: dict[str, str] = {}
        threads = self.options.threads
        if self.cluster.own:
            threads = (
                threads or int(os.environ.get("OMP_NUM_THREADS", 0)) or even_threads(size) or os.cpu_count()
            )
            loopback = elastic.loopback_interface()
            env |= {name: os.environ.get(name, loopback) for name in elastic.INTERFACE_VARIABLES if loopback}
        env |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
        path = portable_path() if self.cluster.own else None
        return env | self.options.env, path, os.getcwd()

    def _seat(self, pool: Pool, rank: int) -> dict[str, Any]:
        mine = self._seats[rank]
        near = sum(seat.node == mine.node for other, seat in list(self._seats.items()) if other in pool.ranks)
        # Ray makes one accelerator visible to each rank, as number 0
        return {"local_rank": 0, "local_world_size": near, "path": None, "host": mine.address}

    def _one_machine(self) -> bool:
        import ray

        return self.cluster.own or (not self.options.address and not ray.is_initialized())

    def _meeting(self, name: str) -> dict[str, Any]:
        """Return a rendezvous: a file of a private cluster, or a store of the controller if ranks may be on other nodes."""
        if self.cluster.folder is not None:
            return {"file": str(Path(self.cluster.folder) / f"meet-{name}"), "tcp": None}
        import ray
        import torch.distributed as dist

        host = ray.util.get_node_ip_address()
        if self._store is None:
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return {"file": None, "tcp": (host, self._store.port, f"engine/{name}")}


def _no_seat(error: Exception) -> str:
    """Return why an actor did not start, from Ray's error: a traceback of its node, in colors."""
    if isinstance(error, GetTimeoutError):
        return "Workers did not start within runtime.ray.startup_timeout_minutes. Raise it, or look at the logs of Ray on their nodes."
    text = " ".join(COLOUR.sub("", str(error)).split())
    if missing := NOT_IMPORTED.findall(text):
        node = NODE.search(text)
        where = f"The node {node[1]}" if node else "A node of the cluster"
        return (
            f"{where} cannot import what the run needs: {missing[-1]}. Install engine-plugin-ray and the run's "
            "other plugins in the environment of every node."
        )
    return f"A worker ended before it had started: {type(error).__name__}: {text:.500}"
