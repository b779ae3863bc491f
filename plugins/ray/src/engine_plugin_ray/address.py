"""The address of a cluster in a run file. Does not import Ray: ``engine validate`` reads it."""

from __future__ import annotations

AUTO = "auto"
MAX_PORT = 65535


def host_and_port(address: str) -> tuple[str, int]:
    """Split ``HOST:PORT``; an IPv6 address is in brackets.

    Raises:
        ValueError: the text is no such address; the message says what was expected.
    """
    scheme, found, rest = address.partition("://")
    if found:
        what = "Ray Client's" if scheme == "ray" else "not a cluster's"
        host = rest.partition("/")[0].rpartition(":")[0] or "HOST"
        raise ValueError(
            f"an address that begins with '{scheme}://' is {what}. Name the cluster's head itself: '{host}:6379' (6379 is "
            "Ray's port)."
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= MAX_PORT or set(host) & set("/ \t"):
        raise ValueError(
            f"expected HOST:PORT of a Ray cluster's head (6379 is Ray's port), or '{AUTO}'. Leave it out for a cluster of "
            "the run's own."
        )
    return host.strip("[]"), int(port)
