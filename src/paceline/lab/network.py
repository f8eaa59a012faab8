"""The lab's network: built once, changed by faults, read for the summary.

Invariant: everything is inside the lab's namespaces; the machine's own interfaces are never touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from paceline.lab.cables import (
    NOWHERE,
    Cable,
    plan_cables,
    render_host,
    render_neighbour,
    render_switch,
    render_tables,
)
from paceline.lab.counters import Traffic, read_traffic
from paceline.lab.delays import Delays, choose_delays
from paceline.lab.namespaces import Space
from paceline.lab.shaper import render_rate
from paceline.lab.topology import SWITCH, Topology, Wire

_IP, _TC, _BRIDGE = ["ip", "-batch", "-"], ["tc", "-batch", "-"], ["bridge", "-batch", "-"]


class Network:
    """Links between spaces that are there already.

    Args:
        spaces: by host name, and "switch".
        seed: of jitter and loss.
    Raises:
        LabError: the system refuses a part of it.
    """

    def __init__(self, topology: Topology, spaces: Mapping[str, Space], seed: int) -> None:
        self.topology, self._spaces = topology, spaces
        self.cables = plan_cables(topology)
        self.delays: Delays | None = None
        self._seed = seed

    def build(self) -> None:
        """Make every link."""
        switch = self._spaces[SWITCH]
        first_of = {name: space.first for name, space in self._spaces.items()}
        switch.tool(_IP, render_switch(self.topology, self.cables, first_of))
        switch.tool(_BRIDGE, render_tables(self.topology, self.cables))
        for host in self.topology.hosts:
            self._spaces[host.name].tool(_IP, render_host(self.topology, host))
        self._shape(self.cables, "add")
        for cable in self.cables:
            if cable.up.delayed:
                self._delay(cable, cable.up)

    def _delay(self, cable: Cable, wire: Wire) -> None:
        if self.delays is None:
            self.delays = choose_delays(self._spaces)
        self.delays.set(cable, wire, self._seed * 1000 + self.cables.index(cable))

    def _shape(self, cables: Iterable[Cable], verb: str) -> None:
        lines: dict[str, list[str]] = {}
        for cable in cables:
            lines.setdefault(cable.near_space, []).append(render_rate(cable.near_device, cable.up, verb))
            lines.setdefault(SWITCH, []).append(render_rate(cable.far_device, cable.down, verb))
        for space, texts in lines.items():
            self._spaces[space].tool(_TC, texts)

    def cable(self, name: str) -> Cable:
        """The link of a host or of a rack."""
        return next(cable for cable in self.cables if cable.name == name)

    def set_rate(self, names: Sequence[str], rate_bits: float | None) -> None:
        """Change the rates of links, both ways; 0 lifts the limit, None restores what they were made with."""
        cables = [self.cable(name) for name in names]
        if rate_bits is not None:
            new = Wire(rate_bits)
            cables = [replace(c, up=replace(c.up, rate_bits=rate_bits), down=new) for c in cables]
        self._shape(cables, "change")

    def set_delay(self, names: Sequence[str], **changed: float) -> None:
        """Change fields of the upward `Wire` of links, not the rate; none: as they were made."""
        for name in names:
            cable = self.cable(name)
            self._delay(cable, replace(cable.up, **changed))

    def set_link(self, names: Sequence[str], *, up: bool) -> None:
        """Cut the links of hosts, or mend them."""
        state = "up" if up else "down"
        lines = [f"link set dev {self.cable(name).far_device} {state}" for name in names]
        self._spaces[SWITCH].tool(_IP, lines)

    def set_reachable(self, one: Sequence[str], other: Sequence[str], *, reachable: bool) -> None:
        """Drop everything between two groups of hosts, both ways, or let it pass again."""
        for senders, receivers in ((one, other), (other, one)):
            targets = [self.topology.host(name) for name in receivers]
            lines = [render_neighbour(t.address, t.mac if reachable else NOWHERE) for t in targets]
            for sender in senders:
                self._spaces[sender].tool(_IP, lines)

    def traffic(self) -> dict[str, Traffic]:
        """What went over every link since it was made."""
        return read_traffic(self._spaces, self.cables)

    def delay_counts(self) -> dict[str, int]:
        """What the means of delays has counted since the lab was made."""
        return {} if self.delays is None else self.delays.counts()

    def end(self) -> None:
        """End what delays."""
        if self.delays is not None:
            self.delays.end()
