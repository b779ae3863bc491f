"""The actor: one rank of a run. Imports nothing heavy, so that its environment is set before torch is loaded."""

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
    """An actor with a worker in a separate thread; its mailbox is a socket, or two methods.

    consumes: commands; waits for: the next one; unblocked by: ``deliver`` or the socket; produces: answers, for
    ``answers`` or the socket. ``engine_plugin_processes.worker`` has the protocol.

    Args:
        env: environment variables.
        path: ``sys.path``; None: unchanged.
        folder: the working folder, if it exists on this node.
    """

    def __init__(self, env: Mapping[str, str], path: Sequence[str] | None, folder: str) -> None:
        os.environ.update(env)
        os.dup2(2, 1)  # stdout of engines goes to stderr
        if path is not None:
            sys.path[:] = path
        if os.path.isdir(folder):
            os.chdir(folder)
        from engine_plugin_ray.mail import WorkerEnd

        self._mail = WorkerEnd()
        self._over = threading.Event()

    def about(self) -> dict[str, Any]:
        """Return where the actor runs."""
        context = ray.get_runtime_context()
        host, address = socket.gethostname(), ray.util.get_node_ip_address()
        return {"host": host, "address": address, "node": context.get_node_id(), "pid": os.getpid()}

    def serve(self, listener: tuple[str, int] | None, token: str, rank: int) -> None:
        """Start to run commands.

        Args:
            listener: address of the controller's listening socket; None: the controller sends by ``deliver``.
            token: the token that both sides of the socket know.
            rank: the actor's rank in the run.
        """
        mailbox: Channel | WorkerEnd = self._mail
        if listener is not None:
            from engine_plugin_processes.channel import connect

            mailbox = connect(listener, token, rank, CONNECT_SECONDS)
        threading.Thread(target=self._serve, args=(mailbox,), name="commands", daemon=True).start()

    def hold(self, listener: tuple[str, int], token: str, rank: int) -> None:
        """End this process with the controller's node, even if that is lost without notice (``lifeline``).

        Args:
            listener: address of the controller's listening socket.
            token: the token that both sides know.
            rank: the actor's rank in the run.
        """
        from engine_plugin_processes.channel import connect, end_with

        end_with(connect(listener, token, rank, CONNECT_SECONDS), lambda _: os._exit(ENDED))

    @ray.method(concurrency_group="inbox")
    def deliver(self, header: bytes, payload: Any) -> None:
        """Accept a message of the controller."""
        self._mail.deliver(header, payload)

    @ray.method(concurrency_group="outbox")
    def answers(self) -> Iterator[Any]:
        """Yield this rank's messages until it ends."""
        yield from self._mail.answers()

    @ray.method(concurrency_group="outbox")
    def served(self) -> None:
        """Wait until the last command was run."""
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
