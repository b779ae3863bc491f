"""A command that ends with the process that started it: ``python -I -S keeper.py LIFE COMMAND...`` becomes COMMAND.

LIFE is the number of an inherited socket to which nothing is written. A forked keeper waits for the end of that socket,
which comes with the end of the owner, also by SIGKILL, and then ends the whole session: the command, also where it holds
its interpreter or is stopped, and the processes that it has started. Run as a file: only the standard library is found.
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
    """Wait for the owner's end, then end this session.

    The keeper holds nothing but ``life``: no other socket, so that the owner sees the command end, and no output.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.closerange(0, life)
    os.closerange(life + 1, os.sysconf("SC_OPEN_MAX"))
    os.read(life, 1)  # the end of the file
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
