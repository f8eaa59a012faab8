"""What a lab consists of: hosts, their links, racks with uplinks. Values only; nothing is made here.

Invariant: every host has one link, to the switch of its rack; a path crosses the link of the sender upwards,
then uplinks where the racks differ, then the link of the receiver downwards.

Quantities as people write them: "100mbit", "2ms", "64mb", "0.1%". Pure.

Invariant: a quantity without a unit that could be misread is an error, never a guess.

From a topology to devices: which link ends where, and the `ip` and `bridge` lines that make it. Pure.

Invariant: neighbours and forwarding tables are written down, so no link carries anything but what hosts send:
no address resolution, no flooding. A destination that is not in a table is dropped, which is how a partition
is made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import RecipeError

_NUMBER = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[a-z%]*)")
_RATE_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_SIZE_UNITS = {"b": 1.0, "kb": 1024.0, "mb": 1024.0**2, "gb": 1024.0**3}
_FRACTION_UNITS = {"%": 0.01}


def parse_rate_bits(text: str) -> float:
    """Bits per second of "10mbit"; 0 for the empty text, which means unlimited."""
    return _parse_quantity(text, _RATE_UNITS, "a rate, for example 100mbit or 1gbit")


def parse_duration_seconds(text: str) -> float:
    """Seconds of "500us", "2ms" or "1.5s"; 0 for the empty text."""
    return _parse_quantity(text, _TIME_UNITS, "a time, for example 500us or 2ms")


def parse_size_bytes(text: str) -> int:
    """Bytes of "64mb", in powers of 1,024; 0 for the empty text."""
    return int(_parse_quantity(text, _SIZE_UNITS, "a size, for example 64mb"))


def parse_fraction(text: str) -> float:
    """The fraction that "0.1%" stands for; 0 for the empty text."""
    found = _parse_quantity(text, _FRACTION_UNITS, "a share, for example 0.1%")
    if found > 1:
        raise RecipeError(f"'{text}' is more than everything", next_step="a share is at most 100%")
    return found


def _parse_quantity(text: str, units: Mapping[str, float], expected: str) -> float:
    if not text:
        return 0.0
    found = _NUMBER.fullmatch(text.strip().lower())
    if found is None or found["unit"] not in units:
        raise RecipeError(f"'{text}' is not {expected}", next_step=f"known units: {', '.join(units)}")
    return float(found["number"]) * units[found["unit"]]


_NAME = re.compile(r"[a-z][a-z0-9-]{0,14}")
CORE = "core"
SWITCH = "switch"
HOST_DEVICE = "eth0"


@dataclass(frozen=True)
class LinkDirection:
    """One direction of a link.

    Args:
        rate_bits: bits per second, counted at the Ethernet layer; 0: unlimited.
        latency_seconds, jitter_seconds: delay of every frame, and the largest deviation from it. Order is
        kept. loss: fraction of the frames that are lost, 0 to 1.
    """

    rate_bits: float = 0.0
    latency_seconds: float = 0.0
    jitter_seconds: float = 0.0
    loss: float = 0.0

    @property
    def delayed(self) -> bool:
        """Whether it needs more than a token bucket."""
        return self.latency_seconds > 0 or self.jitter_seconds > 0 or self.loss > 0


@dataclass(frozen=True)
class Links:
    """What a link does, as people write it; the empty text means "no limit" or "none".

    Args:
        rate: of both directions, at the Ethernet layer: of 1,514 bytes of a full frame, 1,448 are payload
            of TCP, so its goodput is about 95 % of the rate.
        up, down: the rate from the host to the switch and back, where they differ; "" means `rate`.
        latency, jitter, loss: what happens to a frame that leaves the host. The way to another host of the
            same switch takes `latency`, the way there and back the latencies of both hosts.
    Raises:
        RecipeError: a quantity cannot be read.
    """

    rate: str = ""
    up: str = ""
    down: str = ""
    latency: str = ""
    jitter: str = ""
    loss: str = ""

    def __post_init__(self) -> None:
        if self.upwards.jitter_seconds > self.upwards.latency_seconds or self.downwards.delayed:
            raise RecipeError(
                f"the jitter {self.jitter} is larger than the latency {self.latency or 'of 0'}",
                next_step="a frame cannot arrive before it was sent: raise latency",
            )

    @property
    def upwards(self) -> LinkDirection:
        """From the host (or the rack) to the switch."""
        return LinkDirection(
            parse_rate_bits(self.up or self.rate),
            parse_duration_seconds(self.latency),
            parse_duration_seconds(self.jitter),
            parse_fraction(self.loss),
        )

    @property
    def downwards(self) -> LinkDirection:
        """From the switch to the host (or the rack)."""
        return LinkDirection(parse_rate_bits(self.down or self.rate))


@dataclass(frozen=True)
class HostSpec:
    """One host: its name, where it stands, its address (IPv4) and the hardware address of its link."""

    name: str
    rack: str
    address: str
    mac: str
    links: Links


@dataclass(frozen=True)
class RackSpec:
    """A switch of its own, with a link to the core."""

    name: str
    uplink: Links


@dataclass(frozen=True)
class LabTopology:
    """All hosts in the order of their node ranks; `racks` is empty when they share one switch."""

    hosts: tuple[HostSpec, ...]
    racks: tuple[RackSpec, ...] = ()

    def host(self, name: str) -> HostSpec:
        """A host by name.

        Raises:
            RecipeError: there is none of this name.
        """
        for host in self.hosts:
            if host.name == name:
                return host
        raise RecipeError(
            f"there is no host '{name}'", next_step=f"one of: {', '.join(h.name for h in self.hosts)}"
        )


def build_topology(
    hosts: int | Sequence[str],
    links: Links,
    *,
    host_links: Mapping[str, Links] | None = None,
    racks: Mapping[str, Sequence[str]] | None = None,
    uplinks: Links | None = None,
) -> LabTopology:
    """Name and number everything.

    Args:
        hosts: how many (h0, h1, ...), or their names.
        links: of every host.
        host_links: of single hosts, in place of `links`.
        racks: rack name to host names; every host in exactly one. None: all on one switch.
        uplinks: of every rack, between its switch and the core.
    Raises:
        RecipeError: names clash, cannot be used, or a host is in no rack.
    """
    names = [f"h{i}" for i in range(hosts)] if isinstance(hosts, int) else list(hosts)
    _check_names(names, racks or {}, host_links or {})
    rack_of = {name: rack for rack, members in (racks or {}).items() for name in members}
    built = tuple(
        HostSpec(
            name,
            rack_of.get(name, CORE),
            f"10.0.{i // 250}.{i % 250 + 1}",
            f"02:00:00:00:{i // 256:02x}:{i % 256:02x}",
            (host_links or {}).get(name, links),
        )
        for i, name in enumerate(names)
    )
    return LabTopology(built, tuple(RackSpec(name, uplinks or Links()) for name in racks or {}))


def _check_names(names: list[str], racks: Mapping[str, Sequence[str]], special: Mapping[str, Links]) -> None:
    members = [name for group in racks.values() for name in group]
    bad = [name for name in [*names, *racks] if not _NAME.fullmatch(name) or name in (CORE, SWITCH)]
    rules = {
        "a lab needs at least one host": bool(names),
        f"these cannot be names: {', '.join(bad)}": not bad,
        "two hosts have the same name": len(set(names)) == len(names),
        "every host has to be in exactly one rack": not racks or sorted(members) == sorted(names),
        "links are given for a host that does not exist": set(special) <= set(names),
    }
    for problem, holds in rules.items():
        if not holds:
            raise RecipeError(problem, next_step="names are lower-case letters, digits and '-', at most 15")


UNREACHABLE_MAC = "02:00:00:00:ff:ff"


@dataclass(frozen=True)
class VethCable:
    """A link: its near end in a host (or in the switch, for a rack), its far end a port of a bridge.

    Args:
        name: of the host or the rack.
        near_space, near_device: where its upward direction begins.
        far_device: the port, in the switch's namespace; its downward direction begins there.
        bridge: that the port belongs to.
        up, down: what it does in each direction.
    """

    name: str
    near_space: str
    near_device: str
    far_device: str
    bridge: str
    up: LinkDirection
    down: LinkDirection

    @property
    def tap(self) -> str:
        """The device of the forwarder, where there is one."""
        return f"t{self.far_device}"


def plan_cables(topology: LabTopology) -> tuple[VethCable, ...]:
    """One cable for each host, then one for each rack."""
    rack_bridge = {rack.name: f"sw{i}" for i, rack in enumerate(topology.racks)}
    hosts = tuple(
        VethCable(
            host.name,
            host.name,
            HOST_DEVICE,
            f"p{i}",
            rack_bridge.get(host.rack, CORE),
            host.links.upwards,
            host.links.downwards,
        )
        for i, host in enumerate(topology.hosts)
    )
    racks = tuple(
        VethCable(rack.name, SWITCH, f"u{i}", f"r{i}", CORE, rack.uplink.upwards, rack.uplink.downwards)
        for i, rack in enumerate(topology.racks)
    )
    return hosts + racks


def render_switch(topology: LabTopology, cables: Sequence[VethCable], first_of: dict[str, int]) -> list[str]:
    """The `ip -batch` lines that make bridges and links, in the switch's namespace.

    Args:
        first_of: host name to a process in its namespaces.
    """
    bridges = sorted({cable.bridge for cable in cables})
    lines = [f"link add {bridge} type bridge mcast_snooping 0" for bridge in bridges]
    lines += [f"link set dev {bridge} up" for bridge in bridges]
    for cable in cables:
        far = "" if cable.near_space == SWITCH else f" netns {first_of[cable.near_space]}"
        lines.append(f"link add name {cable.far_device} type veth peer name {cable.near_device}{far}")
        lines += _render_port(cable.far_device, cable.bridge)
    for cable, rack in zip(_uplinks(cables), topology.racks, strict=True):
        lines += _render_port(cable.near_device, _bridge_of(rack.name, topology, cables))
    return lines


def _render_port(device: str, bridge: str) -> list[str]:
    return [
        f"link set dev {device} master {bridge} up",
        f"link set dev {device} type bridge_slave learning off flood off mcast_flood off bcast_flood off",
    ]


def render_tap(cable: VethCable) -> list[str]:
    """The `ip -batch` lines that put a forwarder's device beside the port of its link."""
    return [f"link set dev {cable.tap} txqueuelen 4000", *_render_port(cable.tap, cable.bridge)]


def render_forwarding_tables(topology: LabTopology, cables: Sequence[VethCable]) -> list[str]:
    """The `bridge -batch` lines: behind which port of which bridge is which host."""
    port_of = {cable.name: cable.far_device for cable in cables}
    lines = []
    for host in topology.hosts:
        own = _find_cable(host.name, cables).bridge
        lines.append(_render_fdb_line(host, port_of[host.name]))
        if host.rack != CORE:
            lines.append(_render_fdb_line(host, port_of[host.rack]))
        lines += [
            _render_fdb_line(host, cable.near_device)
            for cable in _uplinks(cables)
            if _rack_bridge_of(cable, topology, cables) != own
        ]
    return lines


def _render_fdb_line(host: HostSpec, port: str) -> str:
    return f"fdb replace {host.mac} dev {port} master static"


def render_host(topology: LabTopology, host: HostSpec) -> list[str]:
    """The `ip -batch` lines of a host: its address, and the hardware addresses of all others."""
    return [
        "link set dev lo up",
        f"link set dev {HOST_DEVICE} address {host.mac} up",
        f"address add {host.address}/16 dev {HOST_DEVICE}",
        *(render_neighbour(other.address, other.mac) for other in topology.hosts if other is not host),
    ]


def render_neighbour(address: str, mac: str) -> str:
    """The `ip -batch` line that says behind which hardware address an address is."""
    return f"neighbour replace {address} lladdr {mac} dev {HOST_DEVICE} nud permanent"


def _find_cable(name: str, cables: Sequence[VethCable]) -> VethCable:
    return next(cable for cable in cables if cable.name == name)


def _uplinks(cables: Sequence[VethCable]) -> list[VethCable]:
    return [cable for cable in cables if cable.near_space == SWITCH]


def _rack_bridge_of(cable: VethCable, topology: LabTopology, cables: Sequence[VethCable]) -> str:
    return _bridge_of(cable.name, topology, cables)


def _bridge_of(rack: str, topology: LabTopology, cables: Sequence[VethCable]) -> str:
    """The bridge inside a rack."""
    member = next(host for host in topology.hosts if host.rack == rack)
    return _find_cable(member.name, cables).bridge
