"""Bytes on every link, both ways, from the kernel; and how busy links and cores were while a job ran.

Invariant: bytes are those of frames on the wire. The kernel hands TCP's data around in segments of up to 64
KiB and counts an interface's bytes with one header each; the queue of the link counts every frame's own
header, so it is the queue that is read.

What was the limit, cores or links: samples while a job runs, and a verdict. The verdict is pure.

Invariant: sampling reads two small files of the kernel and starts nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.lab.namespaces import HostNamespaces, interface_counts
from paceline.lab.topology import VethCable


@dataclass(frozen=True)
class DirectionCount:
    """What went through one direction: bytes and frames on the wire, and frames that found the queue full."""

    num_bytes: int = 0
    frames: int = 0
    dropped: int = 0

    def since(self, before: DirectionCount) -> DirectionCount:
        """What came after."""
        return DirectionCount(
            self.num_bytes - before.num_bytes, self.frames - before.frames, self.dropped - before.dropped
        )


@dataclass(frozen=True)
class LinkTraffic:
    """Both directions of a link, seen from the host (or the rack)."""

    up: DirectionCount
    down: DirectionCount

    def since(self, before: LinkTraffic) -> LinkTraffic:
        """What came after."""
        return LinkTraffic(self.up.since(before.up), self.down.since(before.down))


def read_traffic(spaces: Mapping[str, HostNamespaces], cables: Sequence[VethCable]) -> dict[str, LinkTraffic]:
    """The counts of every link since it was made, by the name of its host or rack."""
    near = {space: read_queues(spaces[space]) for space in {cable.near_space for cable in cables}}
    far = near.get("switch") or read_queues(spaces["switch"])
    return {
        cable.name: LinkTraffic(near[cable.near_space][cable.near_device], far[cable.far_device])
        for cable in cables
    }


def read_queues(space: HostNamespaces) -> dict[str, DirectionCount]:
    """The outermost queue of every device of a network namespace."""
    return parse_queues(space.tool(["tc", "-s", "-j", "qdisc", "show"]))


def parse_queues(text: str) -> dict[str, DirectionCount]:
    """Read what `tc -s -j qdisc show` prints."""
    return {
        row["dev"]: DirectionCount(row["bytes"], row["packets"], row["drops"])
        for row in json.loads(text)
        if row.get("root")
    }


_SAMPLE_SECONDS = 0.25
BUSY_CORES_FRACTION, BUSY_LINK_FRACTION = 0.9, 0.8


@dataclass(frozen=True)
class UtilizationSample:
    """One interval: the busy part of all cores, and of the busiest link, 0 to 1."""

    cores: float
    link: float


class UtilizationSampler:
    """Takes a sample whenever enough time has passed, from when hosts first talk to each other.

    Args:
        switch: the first process of the switch, which sees the far end of every cable.
    """

    def __init__(self, switch: int, cables: Sequence[VethCable]) -> None:
        self._switch, self._cables = switch, cables
        self._cores = os.sched_getaffinity(0)
        self.samples: list[UtilizationSample] = []
        self._when, self._times = time.monotonic(), read_core_times(self._cores)
        self._counts = interface_counts(switch)

    def poll(self) -> None:
        """Take a sample if one is due."""
        now = time.monotonic()
        if now - self._when < _SAMPLE_SECONDS:
            return
        times, counts = read_core_times(self._cores), interface_counts(self._switch)
        if not counts:
            return
        total = max(1, times[1] - self._times[1])
        link = busiest_link(self._cables, self._counts, counts, now - self._when)
        if self.samples or counts != self._counts:  # before, the hosts only started
            self.samples.append(UtilizationSample((times[0] - self._times[0]) / total, link))
        self._when, self._times, self._counts = now, times, counts


def read_core_times(cores: set[int]) -> tuple[int, int]:
    """Busy and all ticks of some cores since the machine started."""
    busy = total = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *values = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            ticks = [int(value) for value in values[:8]]
            total += sum(ticks)
            busy += sum(ticks) - ticks[3] - ticks[4]  # idle and waiting for a disk
    return busy, total


def busiest_link(
    cables: Sequence[VethCable],
    before: Mapping[str, tuple[int, int]],
    after: Mapping[str, tuple[int, int]],
    seconds: float,
) -> float:
    """The busy part of the busiest direction of all limited links. Pure."""
    parts = [0.0]
    for cable in cables:
        received, sent = (after[cable.far_device][i] - before[cable.far_device][i] for i in (0, 1))
        for num_bytes, wire in ((received, cable.up), (sent, cable.down)):
            if wire.rate_bits:
                parts.append(num_bytes * 8 / seconds / wire.rate_bits)
    return max(parts)


def describe_bottleneck(samples: Sequence[UtilizationSample]) -> str:
    """What to say about the limit. Pure."""
    if not samples:
        return "the job was too short to say what its limit was"
    cores = sum(sample.cores >= BUSY_CORES_FRACTION for sample in samples) / len(samples)
    links = sum(sample.link >= BUSY_LINK_FRACTION for sample in samples) / len(samples)
    found = f"all cores were busy {cores:.0%} of the time, a link {links:.0%}"
    if cores >= 0.5 and cores > links:
        return f"the cores, not the links, were the limit: {found}"
    if links >= 0.5:
        return f"the links were the limit: {found}"
    return f"neither cores nor links were the limit: {found}"
