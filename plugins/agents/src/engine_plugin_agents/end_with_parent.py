"""Start a command that ends with its parent: ``python -I -S end_with_parent.py PARENT COMMAND...`` (Linux)."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(sys.argv[1]):  # the parent has ended already
            sys.exit(1)
    os.execvp(sys.argv[2], sys.argv[2:])
