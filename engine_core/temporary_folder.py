"""Temporary folders that are removed with their process, or by the next process that makes one.

The owner holds a lock on its folder, which ends with the owner, however that ends. A folder without a lock was left by a
killed process.
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

NAME = "engine-tmp-"  # of folders that may be removed
YOUNG_SECONDS = 60.0  # a younger folder may be without its lock yet


class TemporaryFolder:
    """A new folder that no other user may enter, removed by ``remove``, with this object, or with this process.

    What killed processes have left at the same place is removed first.

    Args:
        prefix: of its name, after ``NAME``.
        dir: the folder that it is made in; None: the temporary folder.
    """

    def __init__(self, prefix: str, dir: str | os.PathLike[str] | None = None) -> None:
        remove_abandoned(dir or tempfile.gettempdir())
        self.path = os.path.abspath(tempfile.mkdtemp(prefix=NAME + prefix, dir=dir))
        lock = os.open(self.path, os.O_RDONLY)
        with contextlib.suppress(
            OSError
        ):  # a file system without locks: nothing is ever taken for abandoned there
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._end = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def remove(self) -> None:
        """Remove it with all that is in it; a second time does nothing."""
        self._end()


def remove_abandoned(dir: str | os.PathLike[str]) -> None:
    """Remove the temporary folders in ``dir`` whose process has ended without removing them."""
    for path in glob.iglob(os.path.join(glob.escape(os.fspath(dir)), NAME + "*")):
        with contextlib.suppress(OSError):  # it is another user's, it has an owner, or it is gone by now
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if time.time() - os.fstat(lock).st_mtime > YOUNG_SECONDS:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _remove(path: str, lock: int, owner: int) -> None:
    if owner == os.getpid():  # a forked process has the parent's folders, and leaves them alone
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
