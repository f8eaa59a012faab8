"""What a lab consists of: hosts, their links, racks with uplinks. Values only; nothing is made here.

Invariant: every host has one link, to the switch of its rack; a path crosses the link of the sender upwards,
then uplinks where the racks differ, then the link of the receiver downwards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import RecipeError
from paceline.lab.units import duration_seconds, rate_bits, share

_NAME = re.compile(r"[a-z][a-z0-9-]{0,14}")
CORE = "core"
SWITCH = "switch"
HOST_DEVICE = "eth0"


@dataclass(frozen=True)
class Wire:
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
    def upwards(self) -> Wire:
        """From the host (or the rack) to the switch."""
        return Wire(
            rate_bits(self.up or self.rate),
            duration_seconds(self.latency),
            duration_seconds(self.jitter),
            share(self.loss),
        )

    @property
    def downwards(self) -> Wire:
        """From the switch to the host (or the rack)."""
        return Wire(rate_bits(self.down or self.rate))


@dataclass(frozen=True)
class HostSpec:
    """One host: its name, where it stands, its address (IPv4) and the hardware address of its link."""

    name: str
    rack: str
    address: str
    mac: str
    links: Links


@dataclass(frozen=True)
class Rack:
    """A switch of its own, with a link to the core."""

    name: str
    uplink: Links


@dataclass(frozen=True)
class Topology:
    """All hosts in the order of their node ranks; `racks` is empty when they share one switch."""

    hosts: tuple[HostSpec, ...]
    racks: tuple[Rack, ...] = ()

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
) -> Topology:
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
    _check(names, racks or {}, host_links or {})
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
    return Topology(built, tuple(Rack(name, uplinks or Links()) for name in racks or {}))


def _check(names: list[str], racks: Mapping[str, Sequence[str]], special: Mapping[str, Links]) -> None:
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
