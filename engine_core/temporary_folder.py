"""Temporary folders that are removed at the end of their process, or by the next process that creates one.

The owner holds a file lock on its folder. The system releases the lock when the owner ends, also when it is killed.
A folder without a lock was left by a killed process.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
import time
import weakref

NAME = "engine-tmp-"  # prefix of folders that may be removed
YOUNG_SECONDS = 60.0  # a younger folder may not be locked yet


class TemporaryFolder:
    """A new private folder, removed by ``remove``, with this object, or at the end of this process.

    Folders that killed processes left in ``dir`` are removed first.

    Args:
        prefix: start of the folder's name, after ``NAME``.
        dir: parent folder; None: the system's temporary folder.
    """

    def __init__(self, prefix: str, dir: str | os.PathLike[str] | None = None) -> None:
        remove_abandoned(dir or tempfile.gettempdir())
        self.path = os.path.abspath(tempfile.mkdtemp(prefix=NAME + prefix, dir=dir))  #: the folder
        lock = os.open(self.path, os.O_RDONLY)
        # on a file system without locks folders are never considered abandoned
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._end = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def remove(self) -> None:
        """Remove the folder and its content; a second call does nothing."""
        self._end()


def remove_abandoned(dir: str | os.PathLike[str]) -> None:
    """Remove the temporary folders in ``dir`` whose process has ended without removing them."""
    for path in glob.iglob(os.path.join(glob.escape(os.fspath(dir)), NAME + "*")):
        with contextlib.suppress(OSError):  # another user's, locked by its owner, or gone
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if time.time() - os.fstat(lock).st_mtime > YOUNG_SECONDS:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _remove(path: str, lock: int, owner: int) -> None:
    if owner == os.getpid():  # a forked process must not remove its parent's folders
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
