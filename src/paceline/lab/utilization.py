"""Utilization of links and cores: bytes on every link, samples while a job runs, and the bottleneck.

Invariant: bytes are those of frames on the wire. The kernel passes TCP segments of up to 64 KiB around and
counts the bytes of an interface with one header each, so the queue of a link is read, which counts every
frame. Sampling reads two small files of the kernel and starts no process.
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
    """The counts of one direction: bytes and frames on the wire, and frames dropped by a full queue."""

    num_bytes: int = 0
    frames: int = 0
    dropped: int = 0

    def since(self, before: DirectionCount) -> DirectionCount:
        """Return the difference to earlier counts."""
        return DirectionCount(
            self.num_bytes - before.num_bytes, self.frames - before.frames, self.dropped - before.dropped
        )


@dataclass(frozen=True)
class LinkTraffic:
    """The traffic of a link in both directions, seen from the host (or the rack)."""

    up: DirectionCount
    down: DirectionCount

    def since(self, before: LinkTraffic) -> LinkTraffic:
        """Return the difference to earlier counts."""
        return LinkTraffic(self.up.since(before.up), self.down.since(before.down))


def read_traffic(spaces: Mapping[str, HostNamespaces], cables: Sequence[VethCable]) -> dict[str, LinkTraffic]:
    """Return the traffic of every link since it was created, by the name of its host or rack."""
    near = {space: read_queues(spaces[space]) for space in {cable.near_space for cable in cables}}
    far = near.get("switch") or read_queues(spaces["switch"])
    return {
        cable.name: LinkTraffic(near[cable.near_space][cable.near_device], far[cable.far_device])
        for cable in cables
    }


def read_queues(space: HostNamespaces) -> dict[str, DirectionCount]:
    """Return the counts of the root queue of every device of a network namespace."""
    return parse_queues(space.tool(["tc", "-s", "-j", "qdisc", "show"]))


def parse_queues(text: str) -> dict[str, DirectionCount]:
    """Parse the output of `tc -s -j qdisc show`."""
    return {
        row["dev"]: DirectionCount(row["bytes"], row["packets"], row["drops"])
        for row in json.loads(text)
        if row.get("root")
    }


_SAMPLE_SECONDS = 0.25
BUSY_CORES_FRACTION, BUSY_LINK_FRACTION = 0.9, 0.8


@dataclass(frozen=True)
class UtilizationSample:
    """The utilization in one interval: of all cores, and of the busiest link, 0 to 1."""

    cores: float
    link: float


class UtilizationSampler:
    """A sampler of the utilization, from the first traffic between hosts on.

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
        """Take a sample if 250 ms have passed since the last one."""
        now = time.monotonic()
        if now - self._when < _SAMPLE_SECONDS:
            return
        times, counts = read_core_times(self._cores), interface_counts(self._switch)
        if not counts:
            return
        total = max(1, times[1] - self._times[1])
        link = busiest_link(self._cables, self._counts, counts, now - self._when)
        if self.samples or counts != self._counts:  # without traffic the hosts are still starting
            self.samples.append(UtilizationSample((times[0] - self._times[0]) / total, link))
        self._when, self._times, self._counts = now, times, counts


def read_core_times(cores: set[int]) -> tuple[int, int]:
    """Return busy and total ticks of some cores since the machine started."""
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
    """Return the utilization of the busiest direction of all links with a limit, 0 to 1. Pure."""
    utilizations = [0.0]
    for cable in cables:
        received, sent = (after[cable.far_device][i] - before[cable.far_device][i] for i in (0, 1))
        for num_bytes, wire in ((received, cable.up), (sent, cable.down)):
            if wire.rate_bits:
                utilizations.append(num_bytes * 8 / seconds / wire.rate_bits)
    return max(utilizations)


def describe_bottleneck(samples: Sequence[UtilizationSample]) -> str:
    """Return a sentence about the bottleneck: cores, links or neither. Pure."""
    if not samples:
        return "the job was too short to find its bottleneck"
    cores = sum(sample.cores >= BUSY_CORES_FRACTION for sample in samples) / len(samples)
    links = sum(sample.link >= BUSY_LINK_FRACTION for sample in samples) / len(samples)
    measured = f"all cores were busy {cores:.0%} of the time, a link {links:.0%}"
    if cores >= 0.5 and cores > links:
        return f"the bottleneck was the cores, not the links: {measured}"
    if links >= 0.5:
        return f"the bottleneck was the links: {measured}"
    return f"the bottleneck was neither the cores nor the links: {measured}"
