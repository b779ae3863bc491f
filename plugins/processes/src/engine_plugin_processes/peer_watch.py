"""Hosts that are gone without a word: no power, no network.

Who ends closes its connections, and a process that hangs is the watchdog's business. A host that is gone does neither.
An idle connection is probed (``channel.KEEPALIVE``), but one with something under way is not: its bytes are sent again
for a quarter of an hour before the system gives up. So whoever depends on another host asks the system when that
last acknowledged something.

A host whose process reads nothing (it is stopped, or holds the interpreter) acknowledges all the same, and is not silent.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from collections.abc import Callable

SILENT_SECONDS = 15.0  # something was sent, and nothing was acknowledged for so long
LOOK_SECONDS = 1.0  # between two looks
LATE_SECONDS = 5.0  # one that comes so long after the last: this process was stopped, or its machine
PROBES, UNACKED, LAST_ACK = 3, 24, 56  # offsets in Linux' struct tcp_info: a byte, a number, milliseconds
INFO_BYTES = 104


class PeerWatch:
    """For how long the other side of a connection has owed an acknowledgement; 0 where nobody can tell.

    Args:
        connection: over a network; others, and none at all, are never silent.
    """

    def __init__(self, connection: socket.socket | None) -> None:
        internet = connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6)
        self._socket = connection if internet and sys.platform == "linux" else None
        self._since: float | None = None  # it owes one
        self._looked = -LOOK_SECONDS

    @property
    def known(self) -> bool:
        """Whether the system can tell."""
        return self._socket is not None

    @property
    def told(self) -> str:
        """What to say of a host that counts as gone; "": it does not. Looks once in ``LOOK_SECONDS``."""
        now = time.monotonic()
        if self._socket is None or now - self._looked < LOOK_SECONDS:
            return ""
        if now - self._looked > LATE_SECONDS:
            self._since = None  # what was acknowledged in between is not known, or waits to be read
        self._looked = now
        if self.seconds(now) < SILENT_SECONDS:
            return ""
        return f"its host has acknowledged nothing for {SILENT_SECONDS:g} s: it is down, or the network to it"

    def seconds(self, now: float) -> float:
        """As of ``time.monotonic()``."""
        assert self._socket is not None
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
        except OSError:  # closed: whoever reads is told
            return 0.0
        unacked, last_ack = (struct.unpack_from("=I", info, at)[0] for at in (UNACKED, LAST_ACK))
        if not unacked and info[PROBES] < 2:  # a system may leave one of many without an answer
            self._since = None
            return 0.0
        # one that was idle owes nothing for the time before it was sent something
        self._since = max(now if self._since is None else self._since, now - last_ack / 1000)
        return now - self._since


def end_with(connection: socket.socket | None, end: Callable[[], object]) -> None:
    """Call ``end`` once, in a thread, where the host on the other side is gone.

    consumes: nothing; waits for: the next look; unblocked by: the clock, the end of the connection; produces: the call.
    """
    silence = PeerWatch(connection)
    if connection is None or not silence.known:
        return

    def watch() -> None:
        while connection.fileno() >= 0:
            if silence.told:
                end()
                return
            time.sleep(LOOK_SECONDS)

    threading.Thread(target=watch, name="silence", daemon=True).start()
