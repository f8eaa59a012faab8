"""Latency, jitter and loss of links: netem where the kernel has it, else a forwarder of our own.

Invariant: both are changed and ended the same way, and `means` says which one is in use.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
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

    means: str

    def add(self, cable: Cable, seed: int) -> None: ...
    def change(self, cable: Cable, wire: Wire) -> None: ...
    def end(self) -> dict[str, int]: ...


class Netem:
    """The kernel's own."""

    means = "netem"

    def __init__(self, spaces: Mapping[str, Space]) -> None:
        self._spaces = spaces
        self._seeds: dict[str, int] = {}

    def add(self, cable: Cable, seed: int) -> None:
        """Delay a cable from now on."""
        self._seeds[cable.name] = seed
        self._tell(cable, cable.up, "add")

    def change(self, cable: Cable, wire: Wire) -> None:
        """Delay it differently."""
        self._tell(cable, wire, "change")

    def _tell(self, cable: Cable, wire: Wire, verb: str) -> None:
        line = render_netem(cable.near_device, wire, self._seeds[cable.name], verb)
        self._spaces[cable.near_space].tool(["tc", "-batch", "-"], [line])

    def end(self) -> dict[str, int]:
        """Nothing to end, and netem's own counts are in the queue's."""
        return {}


@dataclass
class Forwarders:
    """A process for each delayed cable, on a TAP device beside the port of the cable."""

    switch: Space
    means: str = "user-space forwarder on TAP devices (this kernel has no netem)"
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def add(self, cable: Cable, seed: int) -> None:
        """Delay a cable from now on.

        Raises:
            LabError: this user may not use TAP devices, or the kernel cannot redirect frames to one.
        """
        options = {"device": cable.tap, **_values(cable.up), "seed": seed}
        process = subprocess.Popen(
            self.switch.command(script("forwarder", self.switch.lab, json.dumps(options)), network_only=True),
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
        if said["scheduling"] not in self.means:
            self.means += f", {said['scheduling']} scheduling"
        self.switch.tool(["ip", "-batch", "-"], render_tap(cable))
        self.switch.tool(["tc", "-batch", "-"], render_redirect(cable.far_device, cable.tap))

    def change(self, cable: Cable, wire: Wire) -> None:
        """Delay it differently, for frames that come from now on."""
        stdin = self._running[cable.name].stdin
        assert stdin is not None
        stdin.write((json.dumps(_values(wire)) + "\n").encode())
        stdin.flush()

    def end(self) -> dict[str, int]:
        """End all processes; what they counted, in sum."""
        total: dict[str, int] = {}
        for process in self._running.values():
            if process.stdin is not None:
                with suppress(BrokenPipeError):
                    process.stdin.close()
            for name, count in read_record(process).items():
                total[name] = total.get(name, 0) + count if isinstance(count, int) else 0
            _finish(process)
        self._running.clear()
        return total


def _values(wire: Wire) -> dict[str, float]:
    return {"latency": wire.latency_seconds, "jitter": wire.jitter_seconds, "loss": wire.loss}


def _finish(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_END_SECONDS)
    if process.stdout is not None:
        process.stdout.close()


def choose_delays(spaces: Mapping[str, Space], cables: Sequence[Cable]) -> Delays | None:
    """The means for these cables; None when no cable is delayed."""
    if not any(cable.up.delayed for cable in cables):
        return None
    return Netem(spaces) if has_netem(spaces[SWITCH]) else Forwarders(spaces[SWITCH])
