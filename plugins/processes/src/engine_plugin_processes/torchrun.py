"""The torchrun runtime: workers are processes on one or many machines; the controller is another, next to rank 0.

``engine train`` starts the workers of one machine itself, over socket pairs and a rendezvous in a private folder, so
that no port is used and two runs never interfere. Under an external ``torchrun``, on one or many nodes, the process of
rank 0 is the controller and the other processes become workers (``elastic_launch``).

torch's own ``elastic_launch`` is not used as a library: it blocks its caller, handles the signals that save a run, and
has no channel to the processes that it started.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.errors import ConfigError
from engine_core.temporary_folder import TemporaryFolder
from engine_plugin_processes import elastic_launch as elastic
from engine_plugin_processes.placement import Pool, wanted_processes
from engine_plugin_processes.runtime import MultiProcessRuntime, even_threads
from engine_plugin_processes.worker_process import WorkerHandle

if TYPE_CHECKING:
    from engine_core.contracts.runtime import Role


class TorchrunRuntime(MultiProcessRuntime):
    """A runtime whose workers are processes, started by the controller or by an external torchrun."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._folder: TemporaryFolder | None = None
        self._torchrun: elastic.Launch | None = None
        self._gathered: list[WorkerHandle] = []  # workers of an external torchrun

    def close(self) -> None:
        """Close the workers and remove the private folder."""
        super().close()
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    def _processes(self, roles: Mapping[str, Role]) -> int:
        self._torchrun = elastic.launched()
        if self._torchrun is None:
            return self._here()
        wanted, processes = wanted_processes(self.config), self._torchrun.world_size
        if wanted not in (None, processes):
            raise ConfigError(
                f"runtime.torchrun.processes: the file asks for {wanted}, and torchrun has started {processes}."
            )
        return processes

    def _launch(self) -> list[WorkerHandle]:
        if self._torchrun is not None:
            self._gathered = self._torchrun.gather(self.options.startup_timeout_minutes * 60)
            return self._gathered
        self._folder = TemporaryFolder("torchrun-")
        env, workers = self._environment(), list[WorkerHandle]()
        try:
            for rank in range(self._size):
                workers.append(WorkerHandle.start(rank, env))
        except BaseException:
            for worker in workers:
                worker.kill()
            raise
        return workers

    def _environment(self) -> dict[str, str]:
        """Return the variables of each worker, in addition to the controller's."""
        threads = self.options.threads or even_threads(self._size)
        env = {"OMP_NUM_THREADS": str(threads)} if threads else {}
        loopback = elastic.loopback_interface()
        return env | {
            name: os.environ.get(name, loopback) for name in elastic.INTERFACE_VARIABLES if loopback
        }

    def _can_replace(self) -> bool:
        return self._torchrun is None

    def _begin_again(self, rank: int) -> WorkerHandle:
        return WorkerHandle.start(rank, self._environment())

    def _seat(self, pool: Pool, rank: int) -> dict[str, Any]:
        from engine_plugin_processes.starting import portable_path

        launch = self._torchrun
        if launch is None:
            here, size = "127.0.0.1", self._size
            return {"local_rank": rank, "local_world_size": size, "path": portable_path(), "host": here}
        size, mine = launch.local_world_size, self._gathered[rank]
        # the address that the rank connects from; the controller's address is right for its own node alone
        host = launch.host if mine.process is not None else mine.host
        return {"local_rank": rank % size, "local_world_size": size, "path": None, "host": host}

    def _meeting(self, name: str) -> dict[str, Any]:
        if self._torchrun is not None:
            return {"file": None, "tcp": self._torchrun.store_of(name)}
        assert self._folder is not None
        return {"file": str(Path(self._folder.path) / name), "tcp": None}

    def _one_machine(self) -> bool:
        return self._torchrun is None
