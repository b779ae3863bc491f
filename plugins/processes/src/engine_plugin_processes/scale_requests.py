"""How many samplers a run is to have while it goes on: a small file of its folder, which ``engine scale`` writes and the run reads.

Left out on purpose: a connection to the run. Whoever may write in its folder may ask, and the wish holds after a resume.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from engine_core.runs.folders import replace_text

log = logging.getLogger("engine")

FILE = "samplers.json"
KEY = "samplers"
MOST_BYTES = 1000  # of the file


def write_request(folder: Path, count: int) -> None:
    """Ask for so many samplers; a reader finds the old file or the new one, whole."""
    replace_text(folder / FILE, json.dumps({KEY: count}) + "\n")


def read_request(folder: Path, most: int) -> int | None:
    """How many were asked for; None where nobody has.

    Args:
        folder: of the run.
        most: that the run may have.

    Raises:
        ValueError: the file says nothing that can be done.
    """
    try:
        with (folder / FILE).open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    found = json.loads(text) if len(text) <= MOST_BYTES else None
    count = found.get(KEY) if isinstance(found, dict) else None
    if type(count) is not int or not 1 <= count <= most:
        raise ValueError(f'expected {{"{KEY}": N}} with N from 1 to {most}')
    return count


class ScaleRequests:
    """What was asked for since the last look.

    Args:
        folder: of the run.
        most: samplers that it may have.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self.folder, self.most = folder, most
        self._seen: tuple[int, ...] | None = None  # of the file that was read last

    def new(self) -> int | None:
        """How many are wanted, where somebody has said so anew; what cannot be read is told in the log, once, and ignored."""
        try:
            about = (self.folder / FILE).stat()
            seen = about.st_ino, about.st_mtime_ns, about.st_size
            if seen == self._seen:
                return None
            self._seen = seen
            return read_request(self.folder, self.most)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            log.warning("%s is ignored: %s. 'engine scale' writes it.", self.folder / FILE, error)
            return None
