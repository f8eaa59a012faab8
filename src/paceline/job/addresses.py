"""Addresses of this host, in IPv4 and IPv6: how others reach it, and how to listen there.

Invariant: a host that has only one of both protocols works with that one. Nothing is sent or received here.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_SIOCGIFADDR = 0x8915  # ioctl of Linux: the IPv4 address of an interface
_IPV6_ADDRESSES = "/proc/net/if_inet6"
_IPV4_LOOPBACK, _IPV6_LOOPBACK = "127.0.0.1", "::1"


def loopback_address() -> str:
    """Return the loopback address: 127.0.0.1, or ::1 on a host without IPv4."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((_IPV4_LOOPBACK, 0))
    except OSError:
        return _IPV6_LOOPBACK
    return _IPV4_LOOPBACK


def listen_at(address: str, port: int, backlog: int) -> socket.socket:
    """Return a listening socket at an address or a name of this host.

    Raises:
        OSError: this host does not have the address, or the port is in use.
    """
    family, _, _, _, socket_address = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(socket_address, family=family, backlog=backlog)


def format_address(address: str, port: int) -> str:
    """Return an address with its port, as in "10.0.0.1:29500" or "[fd00::1]:29500"."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def address_towards(address: str, port: int) -> str:
    """Return the address from which this host reaches `address`, preferably IPv4; empty without a route."""
    with suppress(OSError, UnicodeError):
        candidates = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)
        candidates.sort(key=lambda candidate: candidate[0] != socket.AF_INET)
        for family, kind, _, _, socket_address in candidates:
            with suppress(OSError), socket.socket(family, kind) as probe:
                # connecting a datagram socket sends nothing; it only selects the local address
                probe.connect(socket_address)
                return str(probe.getsockname()[0])
    return ""


def interface_towards(address: str, port: int) -> str:
    """Return the name of the interface through which this host reaches `address`, for example "eth0".

    It is empty if there is no route, or if the system does not tell.
    """
    local_address = address_towards(address, port)
    interfaces = _ipv6_interfaces() if ":" in local_address else _ipv4_interfaces()
    wanted = local_address.partition("%")[0]  # without the zone of a link-local address
    return next((name for address, name in interfaces if wanted and address == wanted), "")


def _ipv4_interfaces() -> Iterator[tuple[str, str]]:
    """Yield the address and the name of each interface."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = name.encode()[:15].ljust(256, b"\0")
            with suppress(OSError):  # the interface has no IPv4 address
                yield socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]), name


def _ipv6_interfaces() -> Iterator[tuple[str, str]]:
    """Yield the address and the name of each interface."""
    with suppress(OSError):
        for line in Path(_IPV6_ADDRESSES).read_text(encoding="ascii").splitlines():
            digits, *_, name = line.split()
            yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)), name
