"""The actor: one rank of a run. Imports nothing heavy, so that its environment is set before torch is loaded."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ray

ENDED = 71
CONNECT_SECONDS = 30.0
GRACE_SECONDS = 10.0  # for the end of a worker after the idle connection to the controller has ended


class Seat:
    """An actor that runs a worker of ``engine_plugin_processes.worker``, whose channel is a socket to the controller.

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

    def about(self) -> dict[str, Any]:
        """Return where the actor runs."""
        context = ray.get_runtime_context()
        host, address = socket.gethostname(), ray.util.get_node_ip_address()
        return {"host": host, "address": address, "node": context.get_node_id(), "pid": os.getpid()}

    def serve(self, listener: tuple[str, int], token: str, rank: int) -> None:
        """Run commands of the controller until it closes this worker, in the main thread, which receives signals.

        Args:
            listener: address of the controller's listening socket.
            token: the run's token, which both sides prove to know.
            rank: the actor's rank in the run.
        """
        from engine_plugin_processes.channel import connect, end_with
        from engine_plugin_processes.worker import Worker

        channel, line = (connect(listener, token, rank, CONNECT_SECONDS) for _ in range(2))
        over = threading.Event()
        end_with(line, lambda _: over.wait(GRACE_SECONDS) or os._exit(ENDED))
        try:
            Worker(channel).run()
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
            os._exit(ENDED)
        over.set()
        channel.close()
        line.close()
