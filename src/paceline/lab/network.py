"""The lab's network: built once, changed by faults, read for the summary.

Invariant: everything is inside the lab's namespaces; the machine's own interfaces are never touched.

What `tc` is told: token buckets for rates, netem for delays where there is one. Pure but for the probe.

A rate counts Ethernet frames without preamble and check sequence: of 1,514 bytes of a full frame 1,448 are
payload of TCP (with its time stamps), so TCP's goodput is 95.6 % of the rate at most. A bucket holds 1 ms
of the rate: a message that is smaller leaves at once, a stream has the rate. Frames wait up to 50 ms, then
they are lost, as in a switch.

Latency, jitter and loss of links: netem where the kernel has it, else a forwarder of our own.

Invariant: both are changed and ended the same way, and `means` says which one is in use.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from paceline.errors import LabError
from paceline.lab.namespaces import HostNamespaces, inside_script, read_json_line
from paceline.lab.topology import (
    SWITCH,
    UNREACHABLE_MAC,
    LabTopology,
    LinkDirection,
    VethCable,
    plan_cables,
    render_forwarding_tables,
    render_host,
    render_neighbour,
    render_switch,
    render_tap,
)
from paceline.lab.utilization import LinkTraffic, read_traffic

UNLIMITED_BITS = 100e9
FRAME_BYTES, PAYLOAD_BYTES = 1514, 1448
_BURST_SECONDS, _MIN_BURST_BYTES = 1e-3, 6000
_QUEUE_SECONDS, _MIN_QUEUE_BYTES = 0.05, 128 * 1024


def render_rate(device: str, wire: LinkDirection, verb: str = "add") -> str:
    """The `tc -batch` line for a rate; a link without a limit has a bucket that never fills, which counts."""
    rate = wire.rate_bits or UNLIMITED_BITS
    burst = max(_MIN_BURST_BYTES, int(min(rate, 10e9) / 8 * _BURST_SECONDS))
    limit = burst + max(_MIN_QUEUE_BYTES, int(min(rate, 10e9) / 8 * _QUEUE_SECONDS))
    return f"qdisc {verb} dev {device} root handle 1: tbf rate {rate:.0f}bit burst {burst} limit {limit}"


def render_netem(device: str, wire: LinkDirection, seed: int, verb: str = "add") -> str:
    """The `tc -batch` line for a delay, inside the token bucket of the same device."""
    jitter = f" {wire.jitter_seconds * 1e6:.0f}us" if wire.jitter_seconds else ""
    loss = f" loss {wire.loss * 100:g}%" if wire.loss else ""
    delay = f"delay {wire.latency_seconds * 1e6:.0f}us{jitter}{loss}"
    return f"qdisc {verb} dev {device} parent 1:1 handle 10: netem limit 100000 {delay} seed {seed}"


def render_redirect(device: str, tap: str) -> list[str]:
    """The `tc -batch` lines that send everything that arrives on a port to the forwarder's device."""
    return [
        f"qdisc add dev {device} handle ffff: ingress",
        f"filter add dev {device} parent ffff: protocol all u32 match u32 0 0 "
        f"action mirred egress redirect dev {tap}",
    ]


def has_netem(space: HostNamespaces) -> bool:
    """Whether the kernel has netem: tried on the loopback of a namespace, where it disturbs nobody."""
    try:
        space.tool(["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"])
    except LabError:
        return False
    space.tool(["tc", "qdisc", "del", "dev", "lo", "root"])
    return True


_END_SECONDS = 5.0


class LinkDelays(Protocol):
    """Delays the upward direction of cables."""

    @property
    def means(self) -> str:
        """For the summary."""
        ...

    def set(self, cable: VethCable, wire: LinkDirection, seed: int) -> None: ...
    def counts(self) -> dict[str, int]: ...
    def end(self) -> None: ...


@dataclass
class NetemDelays:
    """The kernel's own; what it counts is in the queues' counts."""

    spaces: Mapping[str, HostNamespaces]
    means: str = "netem"
    _known: set[str] = field(default_factory=set)

    def set(self, cable: VethCable, wire: LinkDirection, seed: int) -> None:
        """Delay a cable from now on, or differently."""
        verb = "change" if cable.name in self._known else "add"
        line = render_netem(cable.near_device, wire, seed, verb)
        self.spaces[cable.near_space].tool(["tc", "-batch", "-"], [line])
        self._known.add(cable.name)

    def counts(self) -> dict[str, int]:
        """Nothing of its own."""
        return {}

    def end(self) -> None:
        """It goes with the device."""


@dataclass
class ForwarderDelays:
    """A process for each delayed cable, on a TAP device beside the port of the cable."""

    switch: HostNamespaces
    scheduling: str = ""
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def means(self) -> str:
        """For the summary."""
        return f"user-space forwarder on TAP devices (this kernel has no netem), {self.scheduling} scheduling"

    def set(self, cable: VethCable, wire: LinkDirection, seed: int) -> None:
        """Delay a cable from now on, or differently.

        Raises:
            LabError: this user may not use TAP devices, or the kernel cannot redirect frames to one.
        """
        values = {"latency": wire.latency_seconds, "jitter": wire.jitter_seconds, "loss": wire.loss}
        if cable.name in self._running:
            _send_request(self._running[cable.name], values)
            return
        self._start(cable, json.dumps({"device": cable.tap, **values, "seed": seed}))
        self.switch.tool(["ip", "-batch", "-"], render_tap(cable))
        self.switch.tool(["tc", "-batch", "-"], render_redirect(cable.far_device, cable.tap))

    def _start(self, cable: VethCable, options: str) -> None:
        process = subprocess.Popen(
            self.switch.command(inside_script("forwarder", self.switch.lab, options), network_only=True),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._running[cable.name] = process
        said = read_json_line(process)
        if "scheduling" not in said:
            raise LabError(
                "Latency, jitter and loss need netem or TAP devices, and neither is there: "
                f"{said.get('error', 'the forwarder did not start')}.",
                where=f"the link of {cable.name}",
                next_step="run as root, or use links with a rate only",
            )
        self.scheduling = str(said["scheduling"])

    def counts(self) -> dict[str, int]:
        """Frames, and those that were late, lost or found no room, of all links since they were made."""
        total: dict[str, int] = {}
        for process in self._running.values():
            _send_request(process, {})
            for name, count in read_json_line(process).items():
                total[name] = total.get(name, 0) + int(count)
        return total

    def end(self) -> None:
        """End all processes."""
        for process in self._running.values():
            _end_process(process)
        self._running.clear()


def _send_request(process: subprocess.Popen[bytes], order: Mapping[str, float]) -> None:
    assert process.stdin is not None
    process.stdin.write((json.dumps(order) + "\n").encode())
    process.stdin.flush()


def _end_process(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_END_SECONDS)
    if process.stdout is not None:
        process.stdout.close()


def choose_link_delays(spaces: Mapping[str, HostNamespaces]) -> LinkDelays:
    """The means that this kernel has."""
    return NetemDelays(spaces) if has_netem(spaces[SWITCH]) else ForwarderDelays(spaces[SWITCH])


def render_delay_counts(counts: Mapping[str, int]) -> str:
    """How well delays were kept, for the summary; empty if nothing was counted. Pure."""
    frames = counts.get("frames", 0)
    if not frames:
        return ""
    late = f"{counts['late'] / frames:.1%} of {frames:,} delayed frames, by more than 0.5 ms"
    lost = f", {counts['lost']:,} were lost as asked" if counts["lost"] else ""
    full = f", {counts['overflow']:,} found no room" if counts["overflow"] else ""
    return f"late: {late}{lost}{full}"


_IP_BATCH, _TC_BATCH, _BRIDGE_BATCH = ["ip", "-batch", "-"], ["tc", "-batch", "-"], ["bridge", "-batch", "-"]


class LabNetwork:
    """Links between spaces that are there already.

    Args:
        spaces: by host name, and "switch".
        seed: of jitter and loss.
    Raises:
        LabError: the system refuses a part of it.
    """

    def __init__(self, topology: LabTopology, spaces: Mapping[str, HostNamespaces], seed: int) -> None:
        self.topology, self._spaces = topology, spaces
        self.cables = plan_cables(topology)
        self.delays: LinkDelays | None = None
        self._seed = seed

    def build(self) -> None:
        """Make every link."""
        switch = self._spaces[SWITCH]
        first_of = {name: space.first for name, space in self._spaces.items()}
        switch.tool(_IP_BATCH, render_switch(self.topology, self.cables, first_of))
        switch.tool(_BRIDGE_BATCH, render_forwarding_tables(self.topology, self.cables))
        for host in self.topology.hosts:
            self._spaces[host.name].tool(_IP_BATCH, render_host(self.topology, host))
        self._shape(self.cables, "add")
        for cable in self.cables:
            if cable.up.delayed:
                self._delay(cable, cable.up)

    def _delay(self, cable: VethCable, wire: LinkDirection) -> None:
        if self.delays is None:
            self.delays = choose_link_delays(self._spaces)
        self.delays.set(cable, wire, self._seed * 1000 + self.cables.index(cable))

    def _shape(self, cables: Iterable[VethCable], verb: str) -> None:
        lines: dict[str, list[str]] = {}
        for cable in cables:
            lines.setdefault(cable.near_space, []).append(render_rate(cable.near_device, cable.up, verb))
            lines.setdefault(SWITCH, []).append(render_rate(cable.far_device, cable.down, verb))
        for space, texts in lines.items():
            self._spaces[space].tool(_TC_BATCH, texts)

    def cable(self, name: str) -> VethCable:
        """The link of a host or of a rack."""
        return next(cable for cable in self.cables if cable.name == name)

    def set_rate(self, names: Sequence[str], rate_bits: float | None) -> None:
        """Change the rates of links, both ways; 0 lifts the limit, None restores what they were made with."""
        cables = [self.cable(name) for name in names]
        if rate_bits is not None:
            new = LinkDirection(rate_bits)
            cables = [replace(c, up=replace(c.up, rate_bits=rate_bits), down=new) for c in cables]
        self._shape(cables, "change")

    def set_delay(self, names: Sequence[str], **changed: float) -> None:
        """Change fields of the upward `LinkDirection` of links, not the rate; none: as they were made."""
        for name in names:
            cable = self.cable(name)
            self._delay(cable, replace(cable.up, **changed))

    def set_link(self, names: Sequence[str], *, up: bool) -> None:
        """Cut the links of hosts, or mend them."""
        state = "up" if up else "down"
        lines = [f"link set dev {self.cable(name).far_device} {state}" for name in names]
        self._spaces[SWITCH].tool(_IP_BATCH, lines)

    def set_reachable(self, one: Sequence[str], other: Sequence[str], *, reachable: bool) -> None:
        """Drop everything between two groups of hosts, both ways, or let it pass again."""
        for senders, receivers in ((one, other), (other, one)):
            targets = [self.topology.host(name) for name in receivers]
            lines = [render_neighbour(t.address, t.mac if reachable else UNREACHABLE_MAC) for t in targets]
            for sender in senders:
                self._spaces[sender].tool(_IP_BATCH, lines)

    def traffic(self) -> dict[str, LinkTraffic]:
        """What went over every link since it was made."""
        return read_traffic(self._spaces, self.cables)

    def delay_counts(self) -> dict[str, int]:
        """What the means of delays has counted since the lab was made."""
        return {} if self.delays is None else self.delays.counts()

    def end(self) -> None:
        """End what delays."""
        if self.delays is not None:
            self.delays.end()
