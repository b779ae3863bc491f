"""Which addresses a server of a run file may have.

A name is looked up once for each connection, what comes back is judged, and the connection goes to exactly that: a name server that
gives a harmless address first and 169.254.169.254 second (DNS rebinding) finds no second question. Public addresses are
allowed, and loopback where the run file says so itself (``localhost``, ``127.0.0.1``); all others must be named.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

METADATA = frozenset(
    map(
        ipaddress.ip_address,
        # link-local of most clouds; AWS and GCP on IPv6; Alibaba; Oracle; Azure's, which is in a public range
        (
            "169.254.169.254",
            "169.254.170.2",
            "fd00:ec2::254",
            "fd20:ce::254",
            "100.100.100.200",
            "192.0.0.192",
            "168.63.129.16",
        ),
    )
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_COMPATIBLE = ipaddress.IPv6Network("::/96")


class AddressRefused(Exception):
    """The server's name leads to where a run may not go; the message says what to write."""


def literal(host: str) -> Address | None:
    """The address that a host of a URL is; None for a name, also for one such as ``0x7f.1`` that resolvers read as an address."""
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def check_address(host: str, found: str, allowed: Sequence[Network]) -> None:
    """Refuse an address that is not public, unless it is loopback and meant, or in ``allowed``.

    A metadata service counts as named only where a network of ``allowed`` is that one address.

    Args:
        host: of the URL.
        found: the address that it leads to.
        allowed: networks that were named.

    Raises:
        AddressRefused: it is.
    """
    address = _carried(ipaddress.ip_address(found.partition("%")[0]))
    named = [network for network in allowed if address in network]
    if address in METADATA:
        allow = any(network.num_addresses == 1 for network in named)
    else:
        plain = address.is_global and not address.is_multicast
        allow = plain or bool(named) or (address.is_loopback and _says_loopback(host))
    if not allow:
        kind = "a cloud's metadata service" if address in METADATA else "not a public address"
        raise AddressRefused(
            f"'{host}' leads to {found}, which is {kind}. If that is meant: "
            f'allow_addresses = ["{address}"].'
        )


def look_up(host: str, port: int, allowed: Sequence[Network]) -> list[str]:
    """Where to connect, in the order of the name server; one refused address refuses them all.

    Raises:
        AddressRefused: see ``check_address``.
        OSError: there is no such name, or no name server.
    """
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    for address in addresses:
        check_address(host, address, allowed)
    return addresses


def _carried(address: Address) -> Address:
    """The IPv4 address that an IPv6 address stands for, however it is wrapped; else the address."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64 or (address in _COMPATIBLE and int(address) > 1):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1] or address


def _says_loopback(host: str) -> bool:
    address = literal(host)
    return host.lower() == "localhost" or (address is not None and address.is_loopback)
