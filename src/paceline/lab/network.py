"""The network of a lab: rates, delays and reachability of its links, changed by faults and read for the
summary.

A rate is a token bucket (`tc tbf`) that counts Ethernet frames without preamble and check sequence: of the
1,514 bytes of a full frame 1,448 are payload of TCP with time stamps, so the goodput of TCP is at most 95.6 %
of the rate. A bucket holds 1 ms of the rate: a message that is smaller leaves at once, a stream has the rate.
Frames wait up to 50 ms, then they are lost, as in a switch. Latency, jitter and loss are netem where the
kernel has it, else a forwarder in user space.

Invariant: everything is inside the namespaces of the lab; the interfaces of the machine are never touched.
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
    """Return the `tc -batch` line for a rate.

    A link without a limit gets a bucket that never empties, because it counts the frames.
    """
    rate = wire.rate_bits or UNLIMITED_BITS
    # Capped: the queue of a link without a limit would hold hundreds of megabytes.
    burst = max(_MIN_BURST_BYTES, int(min(rate, 10e9) / 8 * _BURST_SECONDS))
    limit = burst + max(_MIN_QUEUE_BYTES, int(min(rate, 10e9) / 8 * _QUEUE_SECONDS))
    return f"qdisc {verb} dev {device} root handle 1: tbf rate {rate:.0f}bit burst {burst} limit {limit}"


def render_netem(device: str, wire: LinkDirection, seed: int, verb: str = "add") -> str:
    """Return the `tc -batch` line for a delay, inside the token bucket of the same device."""
    jitter = f" {wire.jitter_seconds * 1e6:.0f}us" if wire.jitter_seconds else ""
    loss = f" loss {wire.loss * 100:g}%" if wire.loss else ""
    delay = f"delay {wire.latency_seconds * 1e6:.0f}us{jitter}{loss}"
    # The default limit of netem, 1,000 frames, is too low for a fast link with a long delay.
    return f"qdisc {verb} dev {device} parent 1:1 handle 10: netem limit 100000 {delay} seed {seed}"


def render_redirect(device: str, tap: str) -> list[str]:
    """Return the `tc -batch` lines that redirect all frames of a port to the device of the forwarder."""
    return [
        f"qdisc add dev {device} handle ffff: ingress",
        f"filter add dev {device} parent ffff: protocol all u32 match u32 0 0 "
        f"action mirred egress redirect dev {tap}",
    ]


def has_netem(space: HostNamespaces) -> bool:
    """Return whether the kernel has netem, by adding it to the loopback of a namespace."""
    try:
        space.tool(["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"])
    except LabError:
        return False
    space.tool(["tc", "qdisc", "del", "dev", "lo", "root"])
    return True


_END_SECONDS = 5.0


class LinkDelays(Protocol):
    """A method that delays the upward direction of cables."""

    @property
    def method(self) -> str: ...

    def set(self, cable: VethCable, wire: LinkDirection, seed: int) -> None: ...
    def counts(self) -> dict[str, int]: ...
    def lost(self) -> list[str]: ...
    def end(self) -> None: ...


@dataclass
class NetemDelays:
    """Delays by netem of the kernel; losses are in the counts of the queues."""

    spaces: Mapping[str, HostNamespaces]
    method: str = "netem"
    _delayed: set[str] = field(default_factory=set)

    def set(self, cable: VethCable, wire: LinkDirection, seed: int) -> None:
        """Set or change the delay of a cable."""
        verb = "change" if cable.name in self._delayed else "add"
        line = render_netem(cable.near_device, wire, seed, verb)
        self.spaces[cable.near_space].tool(["tc", "-batch", "-"], [line])
        self._delayed.add(cable.name)

    def counts(self) -> dict[str, int]:
        """Return no counts: those of the queues include them."""
        return {}

    def lost(self) -> list[str]:
        """Return no links: the kernel has no process that could end."""
        return []

    def end(self) -> None:
        """Do nothing: netem vanishes with its device."""


@dataclass
class ForwarderDelays:
    """Delays by a user-space process for each cable, on a TAP device at the port of the cable."""

    switch: HostNamespaces
    scheduling: str = ""
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def method(self) -> str:
        """The method, for the summary."""
        return f"user-space forwarder on TAP devices (this kernel has no netem), {self.scheduling} scheduling"

    def set(self, cable: VethCable, wire: LinkDirection, seed: int) -> None:
        """Set or change the delay of a cable.

        Raises:
            LabError: this user cannot use TAP devices, or the kernel cannot redirect frames to one.
        """
        values = {"latency": wire.latency_seconds, "jitter": wire.jitter_seconds, "loss": wire.loss}
        if cable.name in self._running:
            _send_request(self._running[cable.name], values)
            return
        # The TAP device exists only when the forwarder runs.
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
        answer = read_json_line(process)
        if "scheduling" not in answer:
            raise LabError(
                "Latency, jitter and loss need netem or TAP devices, and neither is available: "
                f"{answer.get('error', 'the forwarder did not start')}.",
                where=f"the link of {cable.name}",
                next_step="run as root, or use links with a rate only",
            )
        self.scheduling = str(answer["scheduling"])

    def counts(self) -> dict[str, int]:
        """Return the numbers of frames, and of late, lost and dropped ones, over all links."""
        total: dict[str, int] = {}
        for process in self._running.values():
            with suppress(BrokenPipeError):  # it has ended; `lost` names its link
                _send_request(process, {})
            for name, count in read_json_line(process).items():
                total[name] = total.get(name, 0) + int(count)
        return total

    def lost(self) -> list[str]:
        """Return the links whose forwarder has ended, which pass no frames any more."""
        return [name for name, process in self._running.items() if process.poll() is not None]

    def end(self) -> None:
        """End all forwarders."""
        for process in self._running.values():
            _end_process(process)
        self._running.clear()


def _send_request(process: subprocess.Popen[bytes], request: Mapping[str, float]) -> None:
    assert process.stdin is not None
    process.stdin.write((json.dumps(request) + "\n").encode())
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
    """Return netem if the kernel has it, else forwarders."""
    return NetemDelays(spaces) if has_netem(spaces[SWITCH]) else ForwarderDelays(spaces[SWITCH])


def render_delay_counts(counts: Mapping[str, int]) -> str:
    """Return one line about late and lost frames, for the summary; empty if none were counted. Pure."""
    frames = counts.get("frames", 0)
    if not frames:
        return ""
    late = f"{counts['late'] / frames:.1%} of {frames:,} delayed frames were more than 0.5 ms late"
    losses = f", {counts['lost']:,} were lost on purpose" if counts["lost"] else ""
    full = f", {counts['overflow']:,} were dropped because the queue was full" if counts["overflow"] else ""
    return f"{late}{losses}{full}"


_IP_BATCH, _TC_BATCH, _BRIDGE_BATCH = ["ip", "-batch", "-"], ["tc", "-batch", "-"], ["bridge", "-batch", "-"]


class LabNetwork:
    """The links between the namespaces of a lab.

    Args:
        topology: hosts, racks and links.
        spaces: namespaces that exist already, by host name and for "switch".
        seed: seed of jitter and loss.
    Raises:
        LabError: from any method, if the system refuses a change.
    """

    def __init__(self, topology: LabTopology, spaces: Mapping[str, HostNamespaces], seed: int) -> None:
        self.topology, self._spaces = topology, spaces
        self.cables = plan_cables(topology)
        self.delays: LinkDelays | None = None
        self._seed = seed

    def build(self) -> None:
        """Create every link."""
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
        # Another seed for each cable, or all of them would lose the same frames.
        self.delays.set(cable, wire, self._seed * 1000 + self.cables.index(cable))

    def _shape(self, cables: Iterable[VethCable], verb: str) -> None:
        lines: dict[str, list[str]] = {}
        for cable in cables:
            lines.setdefault(cable.near_space, []).append(render_rate(cable.near_device, cable.up, verb))
            lines.setdefault(SWITCH, []).append(render_rate(cable.far_device, cable.down, verb))
        # One call for each namespace: entering it takes longer than the changes.
        for space, texts in lines.items():
            self._spaces[space].tool(_TC_BATCH, texts)

    def cable(self, name: str) -> VethCable:
        """Return the link of a host or a rack."""
        return next(cable for cable in self.cables if cable.name == name)

    def set_rate(self, names: Sequence[str], rate_bits: float | None) -> None:
        """Set the rates of links in both directions; 0 removes the limit, None restores the original rate."""
        cables = [self.cable(name) for name in names]
        if rate_bits is not None:
            down = LinkDirection(rate_bits)
            cables = [replace(c, up=replace(c.up, rate_bits=rate_bits), down=down) for c in cables]
        self._shape(cables, "change")

    def set_delay(self, names: Sequence[str], **changed: float) -> None:
        """Set fields of the upward `LinkDirection` of links, except the rate; none restores them."""
        for name in names:
            cable = self.cable(name)
            self._delay(cable, replace(cable.up, **changed))

    def set_link(self, names: Sequence[str], *, up: bool) -> None:
        """Cut or restore the links of hosts."""
        state = "up" if up else "down"
        lines = [f"link set dev {self.cable(name).far_device} {state}" for name in names]
        self._spaces[SWITCH].tool(_IP_BATCH, lines)

    def set_reachable(self, hosts: Sequence[str], other_hosts: Sequence[str], *, reachable: bool) -> None:
        """Drop or pass all frames between two groups of hosts, in both directions."""
        for senders, receivers in ((hosts, other_hosts), (other_hosts, hosts)):
            targets = [self.topology.host(name) for name in receivers]
            lines = [render_neighbour(t.address, t.mac if reachable else UNREACHABLE_MAC) for t in targets]
            for sender in senders:
                self._spaces[sender].tool(_IP_BATCH, lines)

    def traffic(self) -> dict[str, LinkTraffic]:
        """Return the traffic of every link since it was created."""
        return read_traffic(self._spaces, self.cables)

    def delay_counts(self) -> dict[str, int]:
        """Return the counts of delayed frames since the lab was created."""
        return {} if self.delays is None else self.delays.counts()

    def require_delays(self) -> None:
        """Check that every process that delays a link is alive.

        Raises:
            LabError: one has ended, so its link passes no frames.
        """
        lost = [] if self.delays is None else self.delays.lost()
        if lost:
            raise LabError(
                "a process that delays frames has ended, so no frames pass the links of"
                f" {', '.join(lost)} any more",
                where=f"the links of {', '.join(lost)}",
                next_step="run the lab again; if the kernel log (dmesg) says out of memory, use fewer hosts",
            )

    def end(self) -> None:
        """End the processes that delay links."""
        if self.delays is not None:
            self.delays.end()
