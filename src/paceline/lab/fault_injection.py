"""Carries a fault plan out while a job runs, and writes down what it did.

Invariant: the log holds what the plan and its seed determine, and no time of the clock; a fault that was
begun is healed at the latest when the job has ended.

Damage to files of a host: a full disk, a file that was cut, a bit that flipped. Acts on the real files.

Invariant: what is damaged and where follows from the numbers that are passed in, never from chance.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import LabError
from paceline.lab.fault_plan import FaultPlan, FaultSpec
from paceline.lab.namespaces import HostNamespaces, host_pids, signal_all
from paceline.lab.network import LabNetwork
from paceline.lab.topology import parse_duration_seconds, parse_fraction, parse_rate_bits
from paceline.lab.worker_hook import PLAN_FILE, marker_path

_FILLER = ".filler"

DrawNumber = Callable[[int, str], int]
"""A number below the first argument, for the purpose that the second one names."""


def path_in_host(first: int, path: str, directory: Path) -> Path:
    """Where a file of a host is for a process outside: below the host's own root."""
    return Path(f"/proc/{first}/root") / (directory / path).relative_to("/")


def newest_match(pattern: Path) -> Path:
    """The newest file that fits.

    Raises:
        LabError: none does.
    """
    found = [Path(name) for name in glob.glob(str(pattern)) if Path(name).is_file()]  # noqa: PTH207, absolute
    if not found:
        raise LabError(
            f"no file fits {pattern}",
            where="the fault plan",
            next_step="let it happen later, or check the path",
        )
    return max(found, key=lambda path: path.stat().st_mtime_ns)


def flip_bit(path: Path, draw: DrawNumber) -> dict[str, object]:
    """Flip one bit of a file in place; says which."""
    size = path.stat().st_size
    if size == 0:
        raise LabError(f"{path.name} is empty: it has no bit to flip")
    offset, bit = draw(size, "byte"), draw(8, "bit")
    with path.open("r+b") as stream:
        stream.seek(offset)
        (old,) = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([old ^ (1 << bit)]))
    return {"file": path.name, "byte": offset, "bit": bit}


def truncate_file(path: Path, draw: DrawNumber) -> dict[str, object]:
    """Cut a file in place; says where."""
    size = path.stat().st_size
    kept = draw(max(1, size), "length")
    os.truncate(path, kept)
    return {"file": path.name, "kept_bytes": kept, "of_bytes": size}


def fill_disks(disks: Sequence[Path]) -> None:
    """Take all space that is left on disks."""
    for disk in disks:
        fd = os.open(disk / _FILLER, os.O_WRONLY | os.O_CREAT)
        try:
            _allocate_all(fd)
        finally:
            os.close(fd)


def _allocate_all(fd: int) -> None:
    piece, end = 1 << 20, os.fstat(fd).st_size
    while piece:
        try:
            os.posix_fallocate(fd, end, piece)
            end += piece
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            piece >>= 1


def free_disks(disks: Sequence[Path]) -> None:
    """Give it back."""
    for disk in disks:
        (disk / _FILLER).unlink(missing_ok=True)


_SLICE_SECONDS = 0.03
_RESCAN_SECONDS = 0.2

HealFunction = Callable[[], object]


@dataclass
class FaultInjector:
    """Call `poll` often.

    Args:
        folder: where workers and this meet; empty.
        disk: the host's own disk, as the host sees it.
        directory: the working directory of the job.
    """

    plan: FaultPlan
    folder: Path
    spaces: Mapping[str, HostNamespaces]
    network: LabNetwork
    disk: Path | None
    directory: Path
    _done: list[tuple[tuple[int, float, int], dict[str, Any]]] = field(default_factory=list)
    _pending_heals: list[tuple[float, HealFunction]] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)
    _began: float = float("inf")

    def begin(self) -> None:
        """Publish the plan, before a command runs that looks at it."""
        self.folder.mkdir()
        (self.folder / PLAN_FILE).write_text(self.plan.to_json(), encoding="utf-8")

    def start_clock(self) -> None:
        """From now on `at` counts: every host has its command, which a fault can meet."""
        self._began = time.monotonic()

    def poll(self) -> None:
        """Do what is due now."""
        now = time.monotonic()
        for due, heal in [pair for pair in self._pending_heals if pair[0] <= now]:
            self._pending_heals.remove((due, heal))
            heal()
        for place, fault in enumerate(self.plan.faults):
            if fault.at is not None and now >= self._began + fault.at and f"at-{place}" not in self._seen:
                self._seen.add(f"at-{place}")
                self._apply_fault(place, fault, -1)
        for path in sorted(self.folder.glob("reached-*")):
            if path.name not in self._seen:
                self._seen.add(path.name)
                host, _, step = path.name.removeprefix("reached-").rpartition("-")
                self._step(host, int(step))

    def _step(self, host: str, step: int) -> None:
        for place in self.plan.due(host, step):
            self._apply_fault(place, self.plan.faults[place], step)
        marker_path(self.folder, "done", host, step).touch()

    def _apply_fault(self, place: int, fault: FaultSpec, step: int) -> None:
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
            self._pending_heals.append((time.monotonic() + seconds, heal))
        if fault.seconds is not None:
            event["seconds"] = fault.seconds
        self._done.append((order, {**event, **details}))

    def _draw(self, place: int, step: int, end: int, purpose: str) -> int:
        return self.plan.draw(place, step, end, purpose)

    def end(self) -> None:
        """Heal everything that is left."""
        for _, heal in self._pending_heals:
            heal()
        self._pending_heals.clear()

    @property
    def events(self) -> list[dict[str, Any]]:
        """What was done, by time, step and place in the plan: hosts may reach a step in any order."""
        return [event for _, event in sorted(self._done, key=lambda pair: pair[0])]

    def save(self, path: Path) -> None:
        """Write the log: one event a line, JSON."""
        path.write_text("".join(json.dumps(event) + "\n" for event in self.events), encoding="utf-8")

    # -- the faults: each returns how it is healed, and what the log says besides ---------------------------

    def _members(self, fault: FaultSpec) -> list[int]:
        return [pid for host in fault.hosts for pid in host_pids(self.spaces[host].first)]

    def _kill(self, fault: FaultSpec, draw: DrawNumber) -> tuple[HealFunction | None, dict[str, Any]]:
        while pids := self._members(fault):  # what was just being forked comes in the next round
            signal_all(pids, signal.SIGKILL)
            time.sleep(0.001)
        return None, {}

    def _stop(self, fault: FaultSpec, draw: DrawNumber) -> tuple[HealFunction | None, dict[str, Any]]:
        signal_all(self._members(fault), signal.SIGSTOP)
        return lambda: signal_all(self._members(fault), signal.SIGCONT), {}

    def _slow(self, fault: FaultSpec, draw: DrawNumber) -> tuple[HealFunction | None, dict[str, Any]]:
        assert isinstance(fault.value, int | float)
        slowed = SlowdownThread(partial(self._members, fault), float(fault.value))
        slowed.start()
        return slowed.finish, {}

    def _link_down(self, fault: FaultSpec, draw: DrawNumber) -> tuple[HealFunction | None, dict[str, Any]]:
        self.network.set_link(fault.hosts, up=False)
        return partial(self.network.set_link, fault.hosts, up=True), {}

    def _partition(self, fault: FaultSpec, draw: DrawNumber) -> tuple[HealFunction | None, dict[str, Any]]:
        sides = (fault.hosts, fault.others)
        self.network.set_reachable(*sides, reachable=False)
        return partial(self.network.set_reachable, *sides, reachable=True), {}

    def _rate(self, fault: FaultSpec, draw: DrawNumber) -> tuple[HealFunction | None, dict[str, Any]]:
        self.network.set_rate(fault.hosts, parse_rate_bits(str(fault.value)))
        return partial(self.network.set_rate, fault.hosts, None), {}

    def _delay(self, fault: FaultSpec, draw: DrawNumber) -> tuple[HealFunction | None, dict[str, Any]]:
        self.network.set_delay(fault.hosts, latency_seconds=parse_duration_seconds(str(fault.value)))
        return partial(self.network.set_delay, fault.hosts), {}

    def _drop(self, fault: FaultSpec, draw: DrawNumber) -> tuple[HealFunction | None, dict[str, Any]]:
        self.network.set_delay(fault.hosts, loss=parse_fraction(str(fault.value)))
        return partial(self.network.set_delay, fault.hosts), {}

    def _disk_full(self, fault: FaultSpec, draw: DrawNumber) -> tuple[HealFunction | None, dict[str, Any]]:
        assert self.disk is not None  # the lab has checked it
        disks = [path_in_host(self.spaces[host].first, str(self.disk), Path("/")) for host in fault.hosts]
        fill_disks(disks)
        return partial(free_disks, disks), {}

    def _torn_write(self, fault: FaultSpec, draw: DrawNumber) -> tuple[HealFunction | None, dict[str, Any]]:
        return None, truncate_file(self._file(fault), draw)

    def _corrupt(self, fault: FaultSpec, draw: DrawNumber) -> tuple[HealFunction | None, dict[str, Any]]:
        return None, flip_bit(self._file(fault), draw)

    def _nan(self, fault: FaultSpec, draw: DrawNumber) -> tuple[HealFunction | None, dict[str, Any]]:
        return None, {}  # the worker did it

    def _file(self, fault: FaultSpec) -> Path:
        return newest_match(path_in_host(self.spaces[fault.hosts[0]].first, fault.path, self.directory))


class SlowdownThread(threading.Thread):
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
            if began - looked > _RESCAN_SECONDS:
                known, looked = self._pids(), began
            self._over.wait(_SLICE_SECONDS / self._factor)
            ran = time.monotonic() - began

    def finish(self) -> None:
        """Let them run again."""
        self._over.set()
        self.join()
