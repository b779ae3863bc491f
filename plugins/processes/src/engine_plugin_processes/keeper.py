"""A wrapper that ends a command with its owner: ``python -I -S keeper.py LIFE COMMAND...`` becomes COMMAND.

LIFE is the number of an inherited socket to which nothing is written. A forked keeper waits until that socket closes,
which happens when the owner ends, even by SIGKILL. The keeper then kills the whole session: the command, even if it is
stopped or holds its interpreter, and the processes that it started. This file runs as a script and uses only the
standard library.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Fork the keeper, then become the command."""
    life = int(sys.argv[1])
    if os.fork() == 0:
        keep(life)
    os.close(life)
    os.execvp(sys.argv[2], sys.argv[2:])


def keep(life: int) -> None:
    """Wait for the owner's end, then kill this session.

    The keeper closes every other descriptor: an open socket would hide the end of the command from the owner.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.closerange(0, life)
    os.closerange(life + 1, os.sysconf("SC_OPEN_MAX"))
    os.read(life, 1)  # the end of the file
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
