"""The fault injector: carries out a fault plan while a job runs, and logs the faults.

Invariant: the log has only what the plan and its seed determine, and no times of the clock. Every fault is
healed when the job has ended, at the latest. Damage to files acts on the real files of a host; the file, byte
and bit follow from the numbers that are passed in.
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
_KILL_SECONDS = 10.0

DrawNumber = Callable[[int, str], int]
"""Returns a number below the first argument; the second one names the purpose."""


def path_in_host(first: int, path: str, directory: Path) -> Path:
    """Return the path of a file of a host for a process outside, below the root of the host."""
    return Path(f"/proc/{first}/root") / (directory / path).relative_to("/")


def newest_match(pattern: Path) -> Path:
    """Return the newest file that matches a pattern.

    Raises:
        LabError: no file matches.
    """
    matches = [Path(name) for name in glob.glob(str(pattern)) if Path(name).is_file()]  # noqa: PTH207, absolute
    if not matches:
        raise LabError(
            f"no file matches {pattern}",
            where="the fault plan",
            next_step="trigger the fault later, or check the path",
        )
    return max(matches, key=lambda path: path.stat().st_mtime_ns)


def flip_bit(path: Path, draw: DrawNumber) -> dict[str, object]:
    """Flip one bit of a file in place; return its position for the log."""
    size = path.stat().st_size
    if size == 0:
        raise LabError(f"{path.name} is empty, so it has no bit to flip")
    offset, bit = draw(size, "byte"), draw(8, "bit")
    with path.open("r+b") as stream:
        stream.seek(offset)
        (old,) = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([old ^ (1 << bit)]))
    return {"file": path.name, "byte": offset, "bit": bit}


def truncate_file(path: Path, draw: DrawNumber) -> dict[str, object]:
    """Truncate a file in place; return its new length for the log."""
    size = path.stat().st_size
    length = draw(max(1, size), "length")
    os.truncate(path, length)
    return {"file": path.name, "kept_bytes": length, "of_bytes": size}


def is_process_of_job(pid: int, name: str) -> bool:
    """Return whether a process is the launcher of a job, or one of its ranks; it must not be forked.

    Args:
        name: "launcher", or a rank as in "rank1"; one that a fork server has started is known by its title.
    """
    rank = name.removeprefix("rank")
    try:
        title = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    if name == "launcher":
        has_rank = any(variable.startswith(b"RANK=") for variable in variables)
        return b"paceline" in words and b"train" in words and not has_rank
    return title == f"rank {rank}" or f"RANK={rank}".encode() in variables


def fill_disks(disks: Sequence[Path]) -> None:
    """Fill all free space of disks with a file."""
    for disk in disks:
        fd = os.open(disk / _FILLER, os.O_WRONLY | os.O_CREAT)
        try:
            _allocate_all(fd)
        finally:
            os.close(fd)


def _allocate_all(fd: int) -> None:
    # Ever smaller pieces, so that not even one byte remains free.
    piece_bytes, end = 1 << 20, os.fstat(fd).st_size
    while piece_bytes:
        try:
            os.posix_fallocate(fd, end, piece_bytes)
            end += piece_bytes
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            piece_bytes >>= 1


def free_disks(disks: Sequence[Path]) -> None:
    """Remove the files of `fill_disks`."""
    for disk in disks:
        (disk / _FILLER).unlink(missing_ok=True)


_SLICE_SECONDS = 0.03
_RESCAN_SECONDS = 0.2

HealFunction = Callable[[], object]


@dataclass
class FaultInjector:
    """The injector of the faults of one job; `poll` must be called often.

    Args:
        folder: an empty folder through which workers report their steps.
        spaces: the namespaces of each host.
        disk: the disk of each host, as the host sees it; None if no fault needs it.
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
        """Write the plan for the workers; called before the command starts."""
        self.folder.mkdir()
        (self.folder / PLAN_FILE).write_text(self.plan.to_json(), encoding="utf-8")

    def start_clock(self) -> None:
        """Start the clock of the trigger `at`; called when every host runs its command."""
        self._began = time.monotonic()

    def poll(self) -> None:
        """Heal and apply the faults that are due now."""
        now = time.monotonic()
        # Healed first: a heal that came later would undo a new fault of the same link.
        for due, heal in [pair for pair in self._pending_heals if pair[0] <= now]:
            self._pending_heals.remove((due, heal))
            heal()
        for index, fault in enumerate(self.plan.faults):
            if fault.at is not None and now >= self._began + fault.at and f"at-{index}" not in self._seen:
                self._seen.add(f"at-{index}")
                self._apply_fault(index, fault, -1)
        for path in sorted(self.folder.glob("reached-*")):
            if path.name not in self._seen:
                self._seen.add(path.name)
                host, _, step = path.name.removeprefix("reached-").rpartition("-")
                for index in self.plan.due(host, int(step)):
                    self._apply_fault(index, self.plan.faults[index], int(step))
                # The worker waits for this file, so that no step runs while its faults are applied.
                marker_path(self.folder, "done", host, int(step)).touch()

    def _apply_fault(self, index: int, fault: FaultSpec, step: int) -> None:
        when = f"{fault.at:g} s" if step < 0 else f"step {step}"
        event: dict[str, Any] = {"fault": fault.kind, "hosts": list(fault.hosts), "when": when}
        # Faults by time come before those by step: only a run knows which of the two came first.
        order = (0, fault.at or 0.0, index) if step < 0 else (1, float(step), index)
        if fault.others:
            event["from"] = ",".join(fault.others)
        if fault.value is not None:
            event["value"] = fault.value
        draw = partial(self.plan.draw, index, step)
        heal, details = getattr(self, f"_{fault.kind}")(fault, draw)
        if heal is not None:
            # Without a duration a fault lasts until `end` heals it.
            seconds = float("inf") if fault.seconds is None else fault.seconds
            self._pending_heals.append((time.monotonic() + seconds, heal))
        if fault.seconds is not None:
            event["seconds"] = fault.seconds
        self._done.append((order, {**event, **details}))

    def end(self) -> None:
        """Heal all faults that are still active."""
        for _, heal in self._pending_heals:
            heal()
        self._pending_heals.clear()

    @property
    def events(self) -> list[dict[str, Any]]:
        """The log: faults by time or step, then by index, because hosts reach a step in any order."""
        return [event for _, event in sorted(self._done, key=lambda pair: pair[0])]

    def save(self, path: Path) -> None:
        """Write the log, one JSON object per line."""
        path.write_text("".join(json.dumps(event) + "\n" for event in self.events), encoding="utf-8")

    # -- the faults: each returns a function that heals it, and further fields of the log -------------------

    def _members(self, fault: FaultSpec) -> list[int]:
        pids = [pid for host in fault.hosts for pid in host_pids(self.spaces[host].first)]
        return [pid for pid in pids if not fault.process or is_process_of_job(pid, fault.process)]

    def _kill(self, fault: FaultSpec, draw: DrawNumber) -> tuple[HealFunction | None, dict[str, Any]]:
        if fault.process:  # once: a replacement of the process may be there already
            pids = self._members(fault)
            signal_all(pids, signal.SIGKILL)
            return None, _describe_process(fault, pids)
        expires = time.monotonic() + _KILL_SECONDS
        while (pids := self._members(fault)) and time.monotonic() < expires:
            # A process that was just forked is found in the next round.
            signal_all(pids, signal.SIGKILL)
            time.sleep(0.001)
        return None, {}

    def _stop(self, fault: FaultSpec, draw: DrawNumber) -> tuple[HealFunction | None, dict[str, Any]]:
        pids = self._members(fault)
        signal_all(pids, signal.SIGSTOP)
        # Members are listed again then: a number of now may belong to another process later.
        return lambda: signal_all(self._members(fault), signal.SIGCONT), _describe_process(fault, pids)

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
        assert self.disk is not None  # the lab has checked this
        disks = [path_in_host(self.spaces[host].first, str(self.disk), Path("/")) for host in fault.hosts]
        fill_disks(disks)
        return partial(free_disks, disks), {}

    def _torn_write(self, fault: FaultSpec, draw: DrawNumber) -> tuple[HealFunction | None, dict[str, Any]]:
        return None, truncate_file(self._file(fault), draw)

    def _corrupt(self, fault: FaultSpec, draw: DrawNumber) -> tuple[HealFunction | None, dict[str, Any]]:
        return None, flip_bit(self._file(fault), draw)

    def _nan(self, fault: FaultSpec, draw: DrawNumber) -> tuple[HealFunction | None, dict[str, Any]]:
        return None, {}  # the worker has done it

    def _file(self, fault: FaultSpec) -> Path:
        return newest_match(path_in_host(self.spaces[fault.hosts[0]].first, fault.path, self.directory))


def _describe_process(fault: FaultSpec, pids: Sequence[int]) -> dict[str, Any]:
    """Return the process that a fault has hit, for the log; empty if it has hit a whole host."""
    return {"process": fault.process, "was_running": bool(pids)} if fault.process else {}


class SlowdownThread(threading.Thread):
    """A thread that stops and continues processes, so that they run one `factor`-th of the time."""

    def __init__(self, pids: Callable[[], list[int]], factor: float) -> None:
        super().__init__(name="lab-slow")
        self._pids, self._factor = pids, factor
        self._over = threading.Event()

    def run(self) -> None:
        """Alternate between running and stopped slices; new processes are found every 200 ms."""
        # The pause follows the time that they really ran: on a busy machine a wait takes longer than asked.
        pids, scanned = self._pids(), time.monotonic()
        ran = _SLICE_SECONDS / self._factor
        while not self._over.is_set():
            signal_all(pids, signal.SIGSTOP)
            self._over.wait(ran * (self._factor - 1))
            signal_all(pids, signal.SIGCONT)
            began = time.monotonic()
            if began - scanned > _RESCAN_SECONDS:
                pids, scanned = self._pids(), began
            self._over.wait(_SLICE_SECONDS / self._factor)
            ran = time.monotonic() - began

    def finish(self) -> None:
        """End the slowdown; the processes run again."""
        self._over.set()
        self.join()
