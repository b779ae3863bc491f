"""Cleans up after a private cluster: ``python -m engine_plugin_ray.keeper FD FOLDER``.

It reads a pipe whose other end only the controller holds. When the controller ends, however it ends, every process
that was started with ``ENGINE_RAY_FOLDER=FOLDER`` is killed and the folder removed. Imports neither Ray nor torch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time

import psutil

MARK = "ENGINE_RAY_FOLDER"
TRIES = 20


def clear(folder: str) -> None:
    """Kill the processes of a cluster and remove its folder."""
    for _ in range(TRIES):  # a process may start another while it ends
        found = _marked(folder)
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=1.0)
        if not found:
            break
    for _ in range(TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(0.1)


def _marked(folder: str) -> list[psutil.Process]:
    """Return the running processes of the cluster."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(MARK) == folder:
                found.append(process)
    return found


def main() -> None:
    """Wait for the controller's end, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(int(sys.argv[1]), 1):
        pass
    clear(sys.argv[2])


if __name__ == "__main__":
    main()
