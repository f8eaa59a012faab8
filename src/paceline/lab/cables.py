"""From a topology to devices: which link ends where, and the `ip` and `bridge` lines that make it. Pure.

Invariant: neighbours and forwarding tables are written down, so no link carries anything but what hosts send:
no address resolution, no flooding. A destination that is not in a table is dropped, which is how a partition
is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.lab.topology import CORE, HOST_DEVICE, SWITCH, HostSpec, Topology, Wire

NOWHERE = "02:00:00:00:ff:ff"


@dataclass(frozen=True)
class Cable:
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
    up: Wire
    down: Wire

    @property
    def tap(self) -> str:
        """The device of the forwarder, where there is one."""
        return f"t{self.far_device}"


def plan_cables(topology: Topology) -> tuple[Cable, ...]:
    """One cable for each host, then one for each rack."""
    rack_bridge = {rack.name: f"sw{i}" for i, rack in enumerate(topology.racks)}
    hosts = tuple(
        Cable(
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
        Cable(rack.name, SWITCH, f"u{i}", f"r{i}", CORE, rack.uplink.upwards, rack.uplink.downwards)
        for i, rack in enumerate(topology.racks)
    )
    return hosts + racks


def render_switch(topology: Topology, cables: Sequence[Cable], first_of: dict[str, int]) -> list[str]:
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
        lines += _port(cable.far_device, cable.bridge)
    for cable, rack in zip(_uplinks(cables), topology.racks, strict=True):
        lines += _port(cable.near_device, _bridge_of(rack.name, topology, cables))
    return lines


def _port(device: str, bridge: str) -> list[str]:
    return [
        f"link set dev {device} master {bridge} up",
        f"link set dev {device} type bridge_slave learning off flood off mcast_flood off bcast_flood off",
    ]


def render_tap(cable: Cable) -> list[str]:
    """The `ip -batch` lines that put a forwarder's device beside the port of its link."""
    return [f"link set dev {cable.tap} txqueuelen 4000", *_port(cable.tap, cable.bridge)]


def render_tables(topology: Topology, cables: Sequence[Cable]) -> list[str]:
    """The `bridge -batch` lines: behind which port of which bridge is which host."""
    port_of = {cable.name: cable.far_device for cable in cables}
    lines = []
    for host in topology.hosts:
        own = _cable(host.name, cables).bridge
        lines.append(_table_line(host, port_of[host.name]))
        if host.rack != CORE:
            lines.append(_table_line(host, port_of[host.rack]))
        lines += [
            _table_line(host, cable.near_device)
            for cable in _uplinks(cables)
            if _inner(cable, topology, cables) != own
        ]
    return lines


def _table_line(host: HostSpec, port: str) -> str:
    return f"fdb replace {host.mac} dev {port} master static"


def render_host(topology: Topology, host: HostSpec) -> list[str]:
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


def _cable(name: str, cables: Sequence[Cable]) -> Cable:
    return next(cable for cable in cables if cable.name == name)


def _uplinks(cables: Sequence[Cable]) -> list[Cable]:
    return [cable for cable in cables if cable.near_space == SWITCH]


def _inner(cable: Cable, topology: Topology, cables: Sequence[Cable]) -> str:
    return _bridge_of(cable.name, topology, cables)


def _bridge_of(rack: str, topology: Topology, cables: Sequence[Cable]) -> str:
    """The bridge inside a rack."""
    member = next(host for host in topology.hosts if host.rack == rack)
    return _cable(member.name, cables).bridge
