"""The address of a cluster in a run file. Does not import Ray: ``engine validate`` reads it."""

from __future__ import annotations

from urllib.parse import urlsplit

AUTO = "auto"
OTHER_PORTS = {8265: "the dashboard", 10001: "Ray Client"}


def host_and_port(address: str) -> tuple[str, int]:
    """Split ``HOST:PORT``; an IPv6 address is in brackets.

    Raises:
        ValueError: the text is no such address; the message says what was expected.
    """
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or port in OTHER_PORTS or set(address) & set("/ \t"):
        other = f"{port} is the port of {OTHER_PORTS[port]}; " if port in OTHER_PORTS else ""
        raise ValueError(
            f"{other}expected HOST:PORT of a Ray cluster's head (6379 is Ray's port), or '{AUTO}'. Leave it out for a "
            "cluster of the run's own."
        )
    return host, port
