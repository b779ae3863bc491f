"""A sampler's process: ``python -m engine_plugin_processes.sampler_process.child SOCKET MEMORY``, two inherited descriptors."""

from __future__ import annotations

import os
import signal
import socket
import sys

from engine_plugin_processes.child import print_stacks_on_request

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the owner is told, and tells us


def main() -> None:
    """Serve the owner until it is done, or gone."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    print_stacks_on_request()

    from engine_plugin_processes.channel import Channel
    from engine_plugin_processes.sampler_process.serve import Server

    Server(Channel(socket.socket(fileno=int(sys.argv[1]))), int(sys.argv[2])).run()
    os._exit(0)  # the engine is closed: nothing is left that the end of an interpreter would do


if __name__ == "__main__":
    main()
