"""The actor: one rank of a run. Light to import: what it is told of its environment holds before torch is loaded."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray

if TYPE_CHECKING:
    from engine_plugin_processes.channel import Channel
    from engine_plugin_ray.mail import WorkerEnd

ENDED = 71
CONNECT_SECONDS = 30.0


class Seat:
    """A worker in a thread of its own; its mailbox is a socket, or two methods.

    consumes: commands; waits for: the next one; unblocked by: ``deliver`` or the socket; produces: answers, for ``answers`` or
    the socket. See ``engine_plugin_processes.worker``.

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
        self._over = threading.Event()

    def about(self) -> dict[str, Any]:
        """Where it runs."""
        context = ray.get_runtime_context()
        host, address = socket.gethostname(), ray.util.get_node_ip_address()
        return {"host": host, "address": address, "node": context.get_node_id(), "pid": os.getpid()}

    def serve(self, listener: tuple[str, int] | None, token: str, rank: int) -> None:
        """Begin to carry out commands.

        Args:
            listener: of the controller, which sends over a socket; None: it sends by ``deliver``.
            token: that both sides of the socket know.
            rank: of the run.
        """
        mailbox: Channel | WorkerEnd = self._mail
        if listener is not None:
            from engine_plugin_processes.channel import connect

            mailbox = connect(listener, token, rank, CONNECT_SECONDS)
        threading.Thread(target=self._serve, args=(mailbox,), name="commands", daemon=True).start()

    def hold(self, listener: tuple[str, int], token: str, rank: int) -> None:
        """End with the controller's node, also where that is gone without a word; see ``lifeline``.

        Args:
            listener: of the controller.
            token: that both sides know.
            rank: of the run.
        """
        from engine_plugin_processes.channel import connect
        from engine_plugin_ray.lifeline import end_with

        end_with(connect(listener, token, rank, CONNECT_SECONDS), lambda: os._exit(ENDED))

    @ray.method(concurrency_group="inbox")
    def deliver(self, header: bytes, payload: Any) -> None:
        """A message of the controller."""
        self._mail.deliver(header, payload)

    @ray.method(concurrency_group="outbox")
    def answers(self) -> Iterator[Any]:
        """What this rank says, until it ends."""
        yield from self._mail.answers()

    @ray.method(concurrency_group="outbox")
    def served(self) -> None:
        """Until the last command was carried out."""
        self._over.wait()

    def _serve(self, mailbox: Channel | WorkerEnd) -> None:
        from engine_plugin_ray.worker import RayWorker

        try:
            RayWorker(mailbox).run()  # type: ignore[arg-type]
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
            os._exit(ENDED)
        self._over.set()
        mailbox.close()
