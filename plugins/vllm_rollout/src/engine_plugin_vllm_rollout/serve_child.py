"""``python -m engine_plugin_vllm_rollout.serve_child LIFE OWNER COMMAND...``: becomes COMMAND, in a session that ends with OWNER.

LIFE is the number of an inherited pipe that nobody writes to. A forked keeper waits for its end, which comes with the end of the
owner, also by SIGKILL, and then ends the whole session: the command, and the processes that it has started.
"""

from __future__ import annotations

import os
import sys

from engine_plugin_processes.sampler_process.child import die_with, start_keeper


def main() -> None:
    """Keep, then become the command."""
    life, owner = int(sys.argv[1]), int(sys.argv[2])
    start_keeper(life)
    die_with(owner)
    os.execv(sys.argv[3], sys.argv[3:])


if __name__ == "__main__":
    main()
