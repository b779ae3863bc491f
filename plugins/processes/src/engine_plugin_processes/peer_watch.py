"""Detection of hosts that are lost without notice: no power, no network.

A process that ends closes its connections, and the watchdog handles a process that hangs. A lost host does neither.
The system probes an idle connection (``channel.KEEPALIVE``), but not one with bytes in flight: these are sent again
for a quarter of an hour before the system gives up. A process that depends on another host therefore asks the system
when that host last acknowledged bytes.

A host whose process reads nothing (it is stopped, or holds the interpreter) still acknowledges and is not silent.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from collections.abc import Callable

SILENT_SECONDS = 15.0  # without an acknowledgement while bytes are in flight: the host is lost
LOOK_SECONDS = 1.0  # between two checks
LATE_SECONDS = 5.0  # a longer gap between two checks: this process or its machine was stopped
PROBES, UNACKED, LAST_ACK = 3, 24, 56  # offsets in Linux' struct tcp_info: a byte, a number, milliseconds
INFO_BYTES = 104


class PeerWatch:
    """A watch on how long the other side of a connection has owed an acknowledgement.

    Args:
        connection: over a network; any other, and None, is never silent.
    """

    def __init__(self, connection: socket.socket | None) -> None:
        internet = connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6)
        self._socket = connection if internet and sys.platform == "linux" else None
        self._since: float | None = None  # when the peer began to owe an acknowledgement
        self._looked = -LOOK_SECONDS

    @property
    def known(self) -> bool:
        """Whether the system reports acknowledgements of this connection."""
        return self._socket is not None

    @property
    def failure(self) -> str:
        """The failure of a host that counts as lost; "" if it does not. Checks at most once in ``LOOK_SECONDS``."""
        now = time.monotonic()
        if self._socket is None or now - self._looked < LOOK_SECONDS:
            return ""
        if now - self._looked > LATE_SECONDS:
            self._since = None  # acknowledgements in between are unknown, or still unread
        self._looked = now
        if self.seconds(now) < SILENT_SECONDS:
            return ""
        return f"its host has acknowledged nothing for {SILENT_SECONDS:g} s: it is down, or the network to it"

    def seconds(self, now: float) -> float:
        """Return for how long an acknowledgement has been owed, as of ``now`` of ``time.monotonic()``."""
        assert self._socket is not None
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
        except OSError:  # closed: the reader gets the error
            return 0.0
        unacked, last_ack = (struct.unpack_from("=I", info, at)[0] for at in (UNACKED, LAST_ACK))
        if not unacked and info[PROBES] < 2:  # one unanswered probe may have been lost
            self._since = None
            return 0.0
        # an idle peer owes nothing for the time before bytes were sent
        self._since = max(now if self._since is None else self._since, now - last_ack / 1000)
        return now - self._since


def end_with(connection: socket.socket | None, end: Callable[[], object]) -> None:
    """Call ``end`` once, in a thread, when the host on the other side is lost.

    consumes: nothing; waits for: the next check; unblocked by: the clock, the end of the connection; produces: the
    call.
    """
    silence = PeerWatch(connection)
    if connection is None or not silence.known:
        return

    def watch() -> None:
        """Check the connection until it is closed or its host is lost."""
        while connection.fileno() >= 0:
            if silence.failure:
                end()
                return
            time.sleep(LOOK_SECONDS)

    threading.Thread(target=watch, name="silence", daemon=True).start()
