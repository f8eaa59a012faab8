"""Addresses of this host, of IPv4 and of IPv6 alike: how others reach it, and how to listen there.

Invariant: a host that has only one of both works with that one. Nothing is read from anybody here.
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
    """Where this host reaches itself: 127.0.0.1, or ::1 where there is no IPv4."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((_IPV4_LOOPBACK, 0))
    except OSError:
        return _IPV6_LOOPBACK
    return _IPV4_LOOPBACK


def listen_at(address: str, port: int, backlog: int) -> socket.socket:
    """A listening socket at an address, or a name, of this host.

    Raises:
        OSError: there is no such address here, or the port is taken.
    """
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(where, family=family, backlog=backlog)


def format_address(address: str, port: int) -> str:
    """An address with its port, as in "10.0.0.1:29500" or "[fd00::1]:29500"."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def address_towards(address: str, port: int) -> str:
    """The address from which this host reaches `address`, IPv4 if it has one; empty if there is no route."""
    with suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)
        for family, kind, _, _, where in sorted(found, key=lambda one: one[0] != socket.AF_INET):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(where)
                return str(probe.getsockname()[0])
    return ""


def interface_towards(address: str, port: int) -> str:
    """The name of the interface that has the address from which this host reaches `address`.

    Returns:
        For example "lo" or "eth0"; empty if there is no route, or the system cannot tell.
    """
    own = address_towards(address, port)
    pairs = _ipv6_interfaces() if ":" in own else _ipv4_interfaces()
    return next((name for has, name in pairs if own and has == own.partition("%")[0]), "")


def _ipv4_interfaces() -> Iterator[tuple[str, str]]:
    """Address and name."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = name.encode()[:15].ljust(256, b"\0")
            with suppress(OSError):  # it has no IPv4 address
                yield socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]), name


def _ipv6_interfaces() -> Iterator[tuple[str, str]]:
    """Address and name."""
    with suppress(OSError):
        for line in Path(_IPV6_ADDRESSES).read_text(encoding="ascii").splitlines():
            digits, *_, name = line.split()
            yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)), name
