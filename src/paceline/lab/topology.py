"""The topology of a lab: hosts, racks and links as values, and the `ip` and `bridge` lines that create them.
Pure.

Every host has one link, to the switch of its rack. A path crosses the link of the sender upwards, the uplinks
if the racks differ, and the link of the receiver downwards. Neighbours and forwarding tables are static, so
links carry only frames of hosts: there is no address resolution and no flooding. A destination that is not in
a table is unreachable, which is how a partition is made.

Invariant: a quantity such as "100mbit" or "2ms" needs a unit; one without is an error, never a guess.
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
    """Return the bits per second of a text such as "10mbit"; 0 for the empty text, which means unlimited."""
    return _parse_quantity(text, _RATE_UNITS, "a rate, for example 100mbit or 1gbit")


def parse_duration_seconds(text: str) -> float:
    """Return the seconds of a text such as "500us", "2ms" or "1.5s"; 0 for the empty text."""
    return _parse_quantity(text, _TIME_UNITS, "a time, for example 500us or 2ms")


def parse_size_bytes(text: str) -> int:
    """Return the bytes of a text such as "64mb", in powers of 1,024; 0 for the empty text."""
    return int(_parse_quantity(text, _SIZE_UNITS, "a size, for example 64mb"))


def parse_fraction(text: str) -> float:
    """Return the fraction of a text such as "0.1%"; 0 for the empty text."""
    fraction = _parse_quantity(text, _FRACTION_UNITS, "a percentage, for example 0.1%")
    if fraction > 1:
        raise RecipeError(f"'{text}' is more than 100%", next_step="choose at most 100%")
    return fraction


def _parse_quantity(text: str, units: Mapping[str, float], expected: str) -> float:
    if not text:
        return 0.0
    match = _NUMBER.fullmatch(text.strip().lower())
    if match is None or match["unit"] not in units:
        raise RecipeError(f"'{text}' is not {expected}", next_step=f"known units: {', '.join(units)}")
    return float(match["number"]) * units[match["unit"]]


_NAME = re.compile(r"[a-z][a-z0-9-]{0,14}")
CORE = "core"
SWITCH = "switch"
HOST_DEVICE = "eth0"


@dataclass(frozen=True)
class LinkDirection:
    """One direction of a link.

    Args:
        rate_bits: bits per second, counted at the Ethernet layer; 0 for no limit.
        latency_seconds: delay of every frame.
        jitter_seconds: largest deviation from it; frames keep their order.
        loss: fraction of the frames that are lost, 0 to 1.
    """

    rate_bits: float = 0.0
    latency_seconds: float = 0.0
    jitter_seconds: float = 0.0
    loss: float = 0.0

    @property
    def delayed(self) -> bool:
        """Return whether the line needs a delay in addition to the token bucket."""
        return self.latency_seconds > 0 or self.jitter_seconds > 0 or self.loss > 0


@dataclass(frozen=True)
class Links:
    """The properties of a link as texts such as "100mbit"; an empty text means no limit, or none.

    Args:
        rate: rate of both directions at the Ethernet layer; the goodput of TCP is about 95 % of it, because
            1,448 of the 1,514 bytes of a full frame are payload.
        up, down: rates from the host to the switch and back, if they differ; empty for `rate`.
        latency, jitter, loss: of frames that leave the host. A frame to another host of the same switch takes
            `latency`; a round trip takes the latencies of both hosts.
    Raises:
        RecipeError: a quantity cannot be parsed, or the jitter is larger than the latency.
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
                next_step="raise latency: no frame can arrive before it was sent",
            )

    @property
    def upwards(self) -> LinkDirection:
        """The direction from the host (or the rack) to the switch."""
        return LinkDirection(
            parse_rate_bits(self.up or self.rate),
            parse_duration_seconds(self.latency),
            parse_duration_seconds(self.jitter),
            parse_fraction(self.loss),
        )

    @property
    def downwards(self) -> LinkDirection:
        """The direction from the switch to the host (or the rack)."""
        return LinkDirection(parse_rate_bits(self.down or self.rate))


@dataclass(frozen=True)
class HostSpec:
    """A host: its name, its rack, its IPv4 address, and the hardware address of its link."""

    name: str
    rack: str
    address: str
    mac: str
    links: Links


@dataclass(frozen=True)
class RackSpec:
    """A rack: a switch with an uplink to the core."""

    name: str
    uplink: Links


@dataclass(frozen=True)
class LabTopology:
    """The hosts in the order of their node ranks, and the racks; without racks they share one switch."""

    hosts: tuple[HostSpec, ...]
    racks: tuple[RackSpec, ...] = ()

    def host(self, name: str) -> HostSpec:
        """Return a host by name.

        Raises:
            RecipeError: there is no host of this name.
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
    """Build a topology with names and addresses.

    Args:
        hosts: their number (they are named h0, h1, ...), or their names.
        links: the link of every host.
        host_links: links of single hosts, in place of `links`.
        racks: host names by rack; every host is in exactly one. None for a single switch.
        uplinks: the link of every rack to the core.
    Raises:
        RecipeError: names clash or cannot be used, or a host is in no rack.
    """
    names = [f"h{i}" for i in range(hosts)] if isinstance(hosts, int) else list(hosts)
    _check_names(names, racks or {}, host_links or {})
    rack_of = {name: rack for rack, members in (racks or {}).items() for name in members}
    built = tuple(
        HostSpec(
            name,
            rack_of.get(name, CORE),
            # No address ends in 0 or 255, which mean a network or a broadcast in other subnets.
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
        f"these names cannot be used: {', '.join(bad)}": not bad,
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
        name: name of the host or the rack.
        near_space, near_device: namespace and device where the upward direction begins.
        far_device: the port in the namespace of the switch, where the downward direction begins.
        bridge: the bridge of the port.
        up, down: properties of the two directions.
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
        """The name of the TAP device, if the cable has a forwarder."""
        return f"t{self.far_device}"


def plan_cables(topology: LabTopology) -> tuple[VethCable, ...]:
    """Return one cable for each host, then one for each rack."""
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
    """Return the `ip -batch` lines that create bridges and links, for the namespace of the switch.

    Args:
        first_of: a process in the namespaces of each host.
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
        # All addresses are known, and flooded frames would count on links that they are not for.
        f"link set dev {device} type bridge_slave learning off flood off mcast_flood off bcast_flood off",
    ]


def render_tap(cable: VethCable) -> list[str]:
    """Return the `ip -batch` lines that attach the TAP device of a forwarder to the bridge of its link."""
    return [f"link set dev {cable.tap} txqueuelen 4000", *_render_port(cable.tap, cable.bridge)]


def render_forwarding_tables(topology: LabTopology, cables: Sequence[VethCable]) -> list[str]:
    """Return the `bridge -batch` lines with the port of each host on each bridge."""
    port_of = {cable.name: cable.far_device for cable in cables}
    lines = []
    for host in topology.hosts:
        bridge = _find_cable(host.name, cables).bridge
        lines.append(_render_fdb_line(host, port_of[host.name]))
        if host.rack != CORE:
            lines.append(_render_fdb_line(host, port_of[host.rack]))
        lines += [
            _render_fdb_line(host, cable.near_device)
            for cable in _uplinks(cables)
            if _bridge_of(cable.name, topology, cables) != bridge
        ]
    return lines


def _render_fdb_line(host: HostSpec, port: str) -> str:
    return f"fdb replace {host.mac} dev {port} master static"


def render_host(topology: LabTopology, host: HostSpec) -> list[str]:
    """Return the `ip -batch` lines of a host: its address, and the hardware addresses of all others."""
    return [
        "link set dev lo up",
        f"link set dev {HOST_DEVICE} address {host.mac} up",
        f"address add {host.address}/16 dev {HOST_DEVICE}",
        *(render_neighbour(other.address, other.mac) for other in topology.hosts if other is not host),
    ]


def render_neighbour(address: str, mac: str) -> str:
    """Return the `ip -batch` line that maps an address to a hardware address."""
    # Permanent, so that no ARP frames add to the traffic that is counted.
    return f"neighbour replace {address} lladdr {mac} dev {HOST_DEVICE} nud permanent"


def _find_cable(name: str, cables: Sequence[VethCable]) -> VethCable:
    return next(cable for cable in cables if cable.name == name)


def _uplinks(cables: Sequence[VethCable]) -> list[VethCable]:
    return [cable for cable in cables if cable.near_space == SWITCH]


def _bridge_of(rack: str, topology: LabTopology, cables: Sequence[VethCable]) -> str:
    """Return the bridge of a rack."""
    member = next(host for host in topology.hosts if host.rack == rack)
    return _find_cable(member.name, cables).bridge
