"""Bytes on every link, both ways, from the kernel; and how busy links and cores were while a job ran.

Invariant: bytes are those of frames on the wire. The kernel hands TCP's data around in segments of up to 64
KiB and counts an interface's bytes with one header each; the queue of the link counts every frame's own
header, so it is the queue that is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.lab.cables import Cable
from paceline.lab.namespaces import Space


@dataclass(frozen=True)
class Count:
    """What went through one direction: bytes and frames on the wire, and frames that found the queue full."""

    num_bytes: int = 0
    frames: int = 0
    dropped: int = 0

    def since(self, before: Count) -> Count:
        """What came after."""
        return Count(
            self.num_bytes - before.num_bytes, self.frames - before.frames, self.dropped - before.dropped
        )


@dataclass(frozen=True)
class Traffic:
    """Both directions of a link, seen from the host (or the rack)."""

    up: Count
    down: Count

    def since(self, before: Traffic) -> Traffic:
        """What came after."""
        return Traffic(self.up.since(before.up), self.down.since(before.down))


def read_traffic(spaces: Mapping[str, Space], cables: Sequence[Cable]) -> dict[str, Traffic]:
    """The counts of every link since it was made, by the name of its host or rack."""
    near = {space: read_queues(spaces[space]) for space in {cable.near_space for cable in cables}}
    far = near.get("switch") or read_queues(spaces["switch"])
    return {
        cable.name: Traffic(near[cable.near_space][cable.near_device], far[cable.far_device])
        for cable in cables
    }


def read_queues(space: Space) -> dict[str, Count]:
    """The outermost queue of every device of a network namespace."""
    return parse_queues(space.tool(["tc", "-s", "-j", "qdisc", "show"]))


def parse_queues(text: str) -> dict[str, Count]:
    """Read what `tc -s -j qdisc show` prints."""
    return {
        row["dev"]: Count(row["bytes"], row["packets"], row["drops"])
        for row in json.loads(text)
        if row.get("root")
    }
