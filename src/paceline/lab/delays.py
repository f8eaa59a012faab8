"""Latency, jitter and loss of links: netem where the kernel has it, else a forwarder of our own.

Invariant: both are changed and ended the same way, and `means` says which one is in use.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from paceline.errors import LabError
from paceline.lab.cables import Cable, render_tap
from paceline.lab.namespaces import Space, read_record, script
from paceline.lab.shaper import has_netem, render_netem, render_redirect
from paceline.lab.topology import SWITCH, Wire

_END_SECONDS = 5.0


class Delays(Protocol):
    """Delays the upward direction of cables."""

    @property
    def means(self) -> str:
        """For the summary."""
        ...

    def set(self, cable: Cable, wire: Wire, seed: int) -> None: ...
    def counts(self) -> dict[str, int]: ...
    def end(self) -> None: ...


@dataclass
class Netem:
    """The kernel's own; what it counts is in the queues' counts."""

    spaces: Mapping[str, Space]
    means: str = "netem"
    _known: set[str] = field(default_factory=set)

    def set(self, cable: Cable, wire: Wire, seed: int) -> None:
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
class Forwarders:
    """A process for each delayed cable, on a TAP device beside the port of the cable."""

    switch: Space
    scheduling: str = ""
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def means(self) -> str:
        """For the summary."""
        return f"user-space forwarder on TAP devices (this kernel has no netem), {self.scheduling} scheduling"

    def set(self, cable: Cable, wire: Wire, seed: int) -> None:
        """Delay a cable from now on, or differently.

        Raises:
            LabError: this user may not use TAP devices, or the kernel cannot redirect frames to one.
        """
        values = {"latency": wire.latency_seconds, "jitter": wire.jitter_seconds, "loss": wire.loss}
        if cable.name in self._running:
            _tell(self._running[cable.name], values)
            return
        self._start(cable, json.dumps({"device": cable.tap, **values, "seed": seed}))
        self.switch.tool(["ip", "-batch", "-"], render_tap(cable))
        self.switch.tool(["tc", "-batch", "-"], render_redirect(cable.far_device, cable.tap))

    def _start(self, cable: Cable, options: str) -> None:
        process = subprocess.Popen(
            self.switch.command(script("forwarder", self.switch.lab, options), network_only=True),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._running[cable.name] = process
        said = read_record(process)
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
            _tell(process, {})
            for name, count in read_record(process).items():
                total[name] = total.get(name, 0) + int(count)
        return total

    def end(self) -> None:
        """End all processes."""
        for process in self._running.values():
            _finish(process)
        self._running.clear()


def _tell(process: subprocess.Popen[bytes], order: Mapping[str, float]) -> None:
    assert process.stdin is not None
    process.stdin.write((json.dumps(order) + "\n").encode())
    process.stdin.flush()


def _finish(process: subprocess.Popen[bytes]) -> None:
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


def choose_delays(spaces: Mapping[str, Space]) -> Delays:
    """The means that this kernel has."""
    return Netem(spaces) if has_netem(spaces[SWITCH]) else Forwarders(spaces[SWITCH])


def render_counts(counts: Mapping[str, int]) -> str:
    """How well delays were kept, for the summary; empty if nothing was counted. Pure."""
    frames = counts.get("frames", 0)
    if not frames:
        return ""
    late = f"{counts['late'] / frames:.1%} of {frames:,} delayed frames, by more than 0.5 ms"
    lost = f", {counts['lost']:,} were lost as asked" if counts["lost"] else ""
    full = f", {counts['overflow']:,} found no room" if counts["overflow"] else ""
    return f"late: {late}{lost}{full}"
