"""Temporary folders that go with their process, however that ends.

A process that is killed removes nothing. So a small one beside it reads a pipe whose other end the first holds: when that
has ended, it removes the folders that it was told of. ``python -I -S temporary_folder.py FD`` is that one, without any
import but of the standard library.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref

TRIES = 50
END_SECONDS = 10.0  # for the one beside, once nothing is left to look after


class TemporaryFolder:
    """A new folder that nobody else may enter, gone after ``remove``, with this object, or with this process.

    Args:
        prefix: of its name.
        dir: where it is made; None: the temporary folder.
    """

    def __init__(self, prefix: str, dir: str | os.PathLike[str] | None = None) -> None:
        self.path = os.path.abspath(tempfile.mkdtemp(prefix=prefix, dir=dir))
        self._end = weakref.finalize(self, _KEEPER.remove, self.path, os.getpid())
        _KEEPER.take(self.path)

    def remove(self) -> None:
        """Remove it with all that is in it; a second time does nothing."""
        self._end()


class Keeper:
    """The process beside this one, while there is a folder to look after."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._folders: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1

    def take(self, folder: str) -> None:
        """Look after a folder."""
        with self._lock:
            # first: the one beside goes with the last, and garbage collection may remove another within this
            self._folders.add(folder)
            with contextlib.suppress(OSError):  # without it the folder goes with an ordinary end alone
                if self._process is None:
                    self._start()
                os.write(self._pipe, os.fsencode(folder) + b"\0")

    def remove(self, folder: str, owner: int) -> None:
        """Remove a folder of this process."""
        if owner != os.getpid():
            return
        shutil.rmtree(folder, ignore_errors=True)
        with self._lock:
            self._folders.discard(folder)
            if not self._folders and self._process is not None:
                os.close(self._pipe)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(END_SECONDS)
                self._process = None

    def forget(self) -> None:
        """In a process that was forked: the folders are its parent's, and the pipe is to end with that."""
        if self._process is not None:
            os.close(self._pipe)
            self._process.returncode = 0  # a child of the parent's, so nothing to wait for
        self._lock, self._folders, self._process = threading.RLock(), set(), None

    def _start(self) -> None:
        reading, writing = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(reading)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[reading],
                start_new_session=True,  # what ends the process's group does not end it
            )
        except BaseException:
            os.close(writing)
            raise
        finally:
            os.close(reading)
        self._pipe = writing


_KEEPER = Keeper()
os.register_at_fork(after_in_child=_KEEPER.forget)


def main() -> None:
    """Wait for the end of the other process; then remove what it has left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    told = b""
    while part := os.read(int(sys.argv[1]), 1 << 16):
        told += part
    folders = [os.fsdecode(folder) for folder in told.split(b"\0") if folder]
    for _ in range(TRIES):  # others that end now may still write there
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        if not any(map(os.path.exists, folders)):
            return
        time.sleep(0.1)


if __name__ == "__main__":
    main()
