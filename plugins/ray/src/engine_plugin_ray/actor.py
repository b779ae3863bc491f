"""The actor: one rank of a run. Light to import: what it is told of its environment holds before torch is loaded."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray

ENDED = 71


class Seat:
    """A worker in a thread of its own; its mailbox are two methods.

    Args:
        env: environment variables.
        path: ``sys.path``; None: its own.
        folder: the working folder, where that exists here.
    """

    def __init__(self, env: Mapping[str, str], path: Sequence[str] | None, folder: str) -> None:
        os.environ.update(env)
        os.dup2(2, 1)  # what engines print goes where their messages go
        if path is not None:
            sys.path[:] = path
        if os.path.isdir(folder):
            os.chdir(folder)
        from engine_plugin_ray.mail import WorkerEnd

        self._mail = WorkerEnd()
        threading.Thread(target=self._serve, name="commands", daemon=True).start()

    def about(self) -> dict[str, Any]:
        """Where it runs."""
        context = ray.get_runtime_context()
        host, address = socket.gethostname(), ray.util.get_node_ip_address()
        return {"host": host, "address": address, "node": context.get_node_id(), "pid": os.getpid()}

    @ray.method(concurrency_group="inbox")
    def deliver(self, header: bytes, payload: Any) -> None:
        """A message of the controller."""
        self._mail.deliver(header, payload)

    @ray.method(concurrency_group="outbox")
    def answers(self) -> Iterator[Any]:
        """What this rank says, until it ends."""
        yield from self._mail.answers()

    def _serve(self) -> None:
        from engine_plugin_ray.worker import RayWorker

        try:
            RayWorker(self._mail).run()  # type: ignore[arg-type]
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
            os._exit(ENDED)
        self._mail.close()
