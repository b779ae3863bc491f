"""A sampler's process: ``python -m engine_plugin_processes.sampler_process.child SOCKET LIFE MEMORY OWNER``.

The first three are numbers of inherited descriptors, OWNER is the process that started this one. Light until the
keeper is forked: it waits for the owner's end and then ends this whole session, also where the engine here holds
the interpreter or has started processes of its own. Besides, the kernel kills this process with its owner.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the owner is told, and tells us


def main() -> None:
    """Serve the owner until it is done, or gone."""
    line, life, memory, owner = map(int, sys.argv[1:5])
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    start_keeper(life)
    die_with(owner)
    os.dup2(2, 1)  # what engines print goes where their messages go
    faulthandler.enable()
    # where it hangs, also where it holds the interpreter
    faulthandler.register(signal.SIGUSR2, all_threads=True)

    from engine_plugin_processes.channel import Channel
    from engine_plugin_processes.sampler_process.serve import Server

    Server(Channel(socket.socket(fileno=line)), memory).run()
    os._exit(0)  # the engine is closed: nothing is left that the end of an interpreter would do


def start_keeper(life: int) -> None:
    """Fork the process that ends this session when the last writer of the pipe ``life`` is gone.

    It holds nothing but that pipe: no socket, so that the owner sees this process end, and no output.
    """
    if os.fork():
        os.close(life)
        return
    os.closerange(0, life)
    os.closerange(life + 1, os.sysconf("SC_OPEN_MAX"))
    os.read(life, 1)  # nothing is ever written: the end of the file
    os.killpg(0, signal.SIGKILL)


def die_with(owner: int) -> None:
    """Have the kernel kill this process when the thread that started it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:  # it ended before
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
