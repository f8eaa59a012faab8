"""Carries a fault plan out while a job runs, and writes down what it did.

Invariant: the log holds what the plan and its seed determine, and no time of the clock; a fault that was
begun is healed at the latest when the job has ended.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paceline.lab.damage import Draw, fill, flip_bit, free, inside_path, newest, tear
from paceline.lab.faults import Fault, FaultPlan
from paceline.lab.namespaces import Space
from paceline.lab.network import Network
from paceline.lab.processes import members, signal_all
from paceline.lab.units import duration_seconds, rate_bits, share
from paceline.lab.worker import PLAN, mark

_SLICE_SECONDS = 0.03
_LOOK_SECONDS = 0.2

Heal = Callable[[], object]


@dataclass
class Injector:
    """Call `poll` often.

    Args:
        folder: where workers and this meet; empty.
        disk: the host's own disk, as the host sees it.
        directory: the working directory of the job.
    """

    plan: FaultPlan
    folder: Path
    spaces: Mapping[str, Space]
    network: Network
    disk: Path | None
    directory: Path
    _done: list[tuple[tuple[int, float, int], dict[str, Any]]] = field(default_factory=list)
    _heals: list[tuple[float, Heal]] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)
    _began: float = float("inf")

    def begin(self) -> None:
        """Publish the plan, before a command runs that looks at it."""
        self.folder.mkdir()
        (self.folder / PLAN).write_text(self.plan.to_json(), encoding="utf-8")

    def start_clock(self) -> None:
        """From now on `at` counts: every host has its command, which a fault can meet."""
        self._began = time.monotonic()

    def poll(self) -> None:
        """Do what is due now."""
        now = time.monotonic()
        for due, heal in [pair for pair in self._heals if pair[0] <= now]:
            self._heals.remove((due, heal))
            heal()
        for place, fault in enumerate(self.plan.faults):
            if fault.at is not None and now >= self._began + fault.at and f"at-{place}" not in self._seen:
                self._seen.add(f"at-{place}")
                self._do(place, fault, -1)
        for path in sorted(self.folder.glob("reached-*")):
            if path.name not in self._seen:
                self._seen.add(path.name)
                host, _, step = path.name.removeprefix("reached-").rpartition("-")
                self._step(host, int(step))

    def _step(self, host: str, step: int) -> None:
        for place in self.plan.due(host, step):
            self._do(place, self.plan.faults[place], step)
        mark(self.folder, "done", host, step).touch()

    def _do(self, place: int, fault: Fault, step: int) -> None:
        when = f"{fault.at:g} s" if step < 0 else f"step {step}"
        event: dict[str, Any] = {"fault": fault.kind, "hosts": list(fault.hosts), "when": when}
        order = (0, fault.at or 0.0, place) if step < 0 else (1, float(step), place)
        if fault.others:
            event["from"] = ",".join(fault.others)
        if fault.value is not None:
            event["value"] = fault.value
        draw = partial(self._draw, place, step)
        heal, details = getattr(self, f"_{fault.kind}")(fault, draw)
        if heal is not None:
            seconds = float("inf") if fault.seconds is None else fault.seconds
            self._heals.append((time.monotonic() + seconds, heal))
        if fault.seconds is not None:
            event["seconds"] = fault.seconds
        self._done.append((order, {**event, **details}))

    def _draw(self, place: int, step: int, end: int, purpose: str) -> int:
        return self.plan.draw(place, step, end, purpose)

    def end(self) -> None:
        """Heal everything that is left."""
        for _, heal in self._heals:
            heal()
        self._heals.clear()

    @property
    def events(self) -> list[dict[str, Any]]:
        """What was done, by time, step and place in the plan: hosts may reach a step in any order."""
        return [event for _, event in sorted(self._done, key=lambda pair: pair[0])]

    def save(self, path: Path) -> None:
        """Write the log: one event a line, JSON."""
        path.write_text("".join(json.dumps(event) + "\n" for event in self.events), encoding="utf-8")

    # -- the faults: each returns how it is healed, and what the log says besides ---------------------------

    def _members(self, fault: Fault) -> list[int]:
        return [pid for host in fault.hosts for pid in members(self.spaces[host].first)]

    def _kill(self, fault: Fault, draw: Draw) -> tuple[Heal | None, dict[str, Any]]:
        while pids := self._members(fault):  # what was just being forked comes in the next round
            signal_all(pids, signal.SIGKILL)
            time.sleep(0.001)
        return None, {}

    def _stop(self, fault: Fault, draw: Draw) -> tuple[Heal | None, dict[str, Any]]:
        signal_all(self._members(fault), signal.SIGSTOP)
        return lambda: signal_all(self._members(fault), signal.SIGCONT), {}

    def _slow(self, fault: Fault, draw: Draw) -> tuple[Heal | None, dict[str, Any]]:
        assert isinstance(fault.value, int | float)
        slowed = Slowed(partial(self._members, fault), float(fault.value))
        slowed.start()
        return slowed.finish, {}

    def _link_down(self, fault: Fault, draw: Draw) -> tuple[Heal | None, dict[str, Any]]:
        self.network.set_link(fault.hosts, up=False)
        return partial(self.network.set_link, fault.hosts, up=True), {}

    def _partition(self, fault: Fault, draw: Draw) -> tuple[Heal | None, dict[str, Any]]:
        sides = (fault.hosts, fault.others)
        self.network.set_reachable(*sides, reachable=False)
        return partial(self.network.set_reachable, *sides, reachable=True), {}

    def _rate(self, fault: Fault, draw: Draw) -> tuple[Heal | None, dict[str, Any]]:
        self.network.set_rate(fault.hosts, rate_bits(str(fault.value)))
        return partial(self.network.set_rate, fault.hosts, None), {}

    def _delay(self, fault: Fault, draw: Draw) -> tuple[Heal | None, dict[str, Any]]:
        self.network.set_delay(fault.hosts, latency_seconds=duration_seconds(str(fault.value)))
        return partial(self.network.set_delay, fault.hosts), {}

    def _drop(self, fault: Fault, draw: Draw) -> tuple[Heal | None, dict[str, Any]]:
        self.network.set_delay(fault.hosts, loss=share(str(fault.value)))
        return partial(self.network.set_delay, fault.hosts), {}

    def _disk_full(self, fault: Fault, draw: Draw) -> tuple[Heal | None, dict[str, Any]]:
        assert self.disk is not None  # the lab has checked it
        disks = [inside_path(self.spaces[host].first, str(self.disk), Path("/")) for host in fault.hosts]
        fill(disks)
        return partial(free, disks), {}

    def _torn_write(self, fault: Fault, draw: Draw) -> tuple[Heal | None, dict[str, Any]]:
        return None, tear(self._file(fault), draw)

    def _corrupt(self, fault: Fault, draw: Draw) -> tuple[Heal | None, dict[str, Any]]:
        return None, flip_bit(self._file(fault), draw)

    def _nan(self, fault: Fault, draw: Draw) -> tuple[Heal | None, dict[str, Any]]:
        return None, {}  # the worker did it

    def _file(self, fault: Fault) -> Path:
        return newest(inside_path(self.spaces[fault.hosts[0]].first, fault.path, self.directory))


class Slowed(threading.Thread):
    """Lets processes run one `factor`-th of the time, by stopping and continuing them."""

    def __init__(self, pids: Callable[[], list[int]], factor: float) -> None:
        super().__init__(name="lab-slow")
        self._pids, self._factor = pids, factor
        self._over = threading.Event()

    def run(self) -> None:
        """Stop for as long as the factor says after what they really ran; look for new ones often."""
        known, looked = self._pids(), time.monotonic()
        ran = _SLICE_SECONDS / self._factor
        while not self._over.is_set():
            signal_all(known, signal.SIGSTOP)
            self._over.wait(ran * (self._factor - 1))
            signal_all(known, signal.SIGCONT)
            began = time.monotonic()
            if began - looked > _LOOK_SECONDS:
                known, looked = self._pids(), began
            self._over.wait(_SLICE_SECONDS / self._factor)
            ran = time.monotonic() - began

    def finish(self) -> None:
        """Let them run again."""
        self._over.set()
        self.join()
