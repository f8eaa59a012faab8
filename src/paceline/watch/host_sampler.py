"""The system sampler: a process of its own that writes what a job uses of its host to the run folder.

A run with `log.sample_seconds` starts one on every host, as `python -m paceline.watch.host_sampler`, and ends
it. It appends two kinds of records to a file of its own: `process` for each rank and the processes that it
has started, and `system` for the host. Counters are differences to the sample before, so that sums over
records continue across a resume.

Invariants: it never outlives the process that started it; it runs at a low priority and imports no torch;
what the kernel does not tell is absent from a record, and named in its `unavailable`.

RAPL measures whole processors with all that runs on them, and most kernels let only root read it. Linux has
no counters of network bytes by process: those of TCP connections are what `ss` of iproute2 prints, without
what a connection sent between the last sample and its end.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from paceline.observe.process_info import process_start_ticks
from paceline.observe.sinks import JsonLinesSink

_SS_COMMAND = ("ss", "--tcp", "--info", "--numeric", "--processes", "--no-header")
_SS_SECONDS = 5.0
_PID = re.compile(r"\bpid=(\d+)")
_SS_NUMBERS = {
    "bytes_sent": re.compile(r"\bbytes_sent:(\d+)"),
    "bytes_received": re.compile(r"\bbytes_received:(\d+)"),
    "retransmits": re.compile(r"\bretrans:\d+/(\d+)"),
    "rtt": re.compile(r"\brtt:([\d.]+)"),
}


class TcpConnection(NamedTuple):
    """A connection, seen from one of its ends.

    Args:
        pids: processes that hold this end.
        local, peer: addresses of both ends, as "HOST:PORT".
        sent_bytes: since it was opened; what was sent again counts again.
        received_bytes: since it was opened.
        retransmits: segments that were sent again.
        round_trip_seconds: the kernel's smoothed estimate; 0 if it has none yet.
    """

    pids: tuple[int, ...]
    local: str
    peer: str
    sent_bytes: int
    received_bytes: int
    retransmits: int
    round_trip_seconds: float

    @property
    def peer_host(self) -> str:
        """The address of the other end, without its port."""
        return self.peer.rpartition(":")[0].strip("[]").removeprefix("::ffff:")


def why_no_connections() -> str:
    """Return why `read_connections` returns nothing here; empty if it can return something."""
    return "" if shutil.which(_SS_COMMAND[0]) else "ss of iproute2 is not installed"


def read_connections() -> list[TcpConnection]:
    """Return the connections of this network namespace whose processes this user may see."""
    try:
        result = subprocess.run(
            _SS_COMMAND, capture_output=True, text=True, errors="replace", timeout=_SS_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return list(parse_connections(result.stdout))


def parse_connections(text: str) -> Iterator[TcpConnection]:
    """Yield the connections that `ss` has printed; lines that begin with a space continue the one before."""
    blocks: list[str] = []
    for line in text.splitlines():
        if line[:1].isspace() and blocks:
            blocks[-1] += line
        else:
            blocks.append(line)
    for block in blocks:
        words = block.split(maxsplit=5)
        if len(words) < 6 or ":" not in words[3] or ":" not in words[4]:
            continue
        found = {name: pattern.search(words[5]) for name, pattern in _SS_NUMBERS.items()}
        number = {name: float(match[1]) if match else 0.0 for name, match in found.items()}
        yield TcpConnection(
            tuple(map(int, _PID.findall(words[5]))),
            words[3],
            words[4],
            int(number["bytes_sent"]),
            int(number["bytes_received"]),
            int(number["retransmits"]),
            number["rtt"] / 1000,
        )


_POWERCAP = Path("/sys/class/powercap")
_WATTS_PER_UNIT = _JOULES_PER_UNIT = 1e-3  # NVML counts in milliwatts and millijoules


class RaplCounters:
    """The energy of processors and their memory, in joules since the first reading.

    Args:
        folder: where the kernel shows its power capping zones.

    Attributes:
        why_none: why there is nothing to read; empty if there is.
    """

    def __init__(self, folder: Path = _POWERCAP) -> None:
        zones = sorted(folder.glob("*-rapl:*"))
        self._zones = {f"{_read(zone / 'name')} {zone.name.partition(':')[2]}": zone for zone in zones}
        self._before: dict[str, int] = {}
        self._joules: dict[str, float] = {}
        self.why_none = "this machine shows no RAPL counters"
        if self._zones:
            readable = bool(self.read())
            self.why_none = "" if readable else "only root may read the RAPL counters"

    def read(self) -> Mapping[str, float]:
        """Return joules by domain, for example "package-0 0" or "dram 0:1"."""
        for name, zone in self._zones.items():
            with suppress(OSError, ValueError):
                now = int((zone / "energy_uj").read_text("ascii"))
                difference = now - self._before.get(name, now)
                if difference < 0:  # the counter has begun again from 0
                    difference += int((zone / "max_energy_range_uj").read_text("ascii"))
                self._before[name] = now
                self._joules[name] = self._joules.get(name, 0.0) + max(0, difference) / 1e6
        return dict(self._joules)


class GpuCounters:
    """The NVIDIA GPUs of this host, through NVML.

    Attributes:
        why_none: why there is nothing to read; empty if there is.
    """

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self.why_none = ""
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        except ImportError:
            self.why_none = "nvidia-ml-py is not installed"
        except pynvml.NVMLError as error:
            self.why_none = f"NVML: {error}"
        else:
            self._nvml = pynvml
            self.why_none = "" if self._handles else "NVML finds no GPU"

    def read(self) -> dict[str, dict[str, float]]:
        """Return values by kind and index of the GPU; energy is in joules since the driver was loaded."""
        values: dict[str, dict[str, float]] = {
            "utilization": {},
            "memory_bytes": {},
            "celsius": {},
            "watts": {},
            "joules": {},
        }
        for index, handle in enumerate(self._handles):
            for kind, read in self._readers(handle).items():
                with suppress(self._nvml.NVMLError):  # not every GPU has every counter
                    values[kind][str(index)] = read()
        return values

    def _readers(self, handle: Any) -> dict[str, Callable[[], float]]:
        nvml = self._nvml
        return {
            "utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "memory_bytes": lambda: float(nvml.nvmlDeviceGetMemoryInfo(handle).used),
            "celsius": lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            "watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) * _WATTS_PER_UNIT,
            "joules": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) * _JOULES_PER_UNIT,
        }


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text("utf-8", errors="replace").strip()
    return "unknown"


_CHECK_PARENT_SECONDS = 0.5
_NICENESS = 10
_PSS_TIME_FRACTION = 0.001  # of the time that may be spent on it: the kernel walks over all pages for it
_MAX_LINKS = 16  # of a rank, so that a rank of a large job has at most 200 series
_MAX_DEVICES = 16
_PRESSURE = Path("/proc/pressure")

Record = dict[str, Any]


class RankProcess(NamedTuple):
    """A process of the job on this host; the start tells it from a later one with the same id."""

    rank: int
    pid: int
    start_ticks: int


class CounterDifferences:
    """Differences of counters to their last reading, by a name for each group of them."""

    def __init__(self) -> None:
        self._before: dict[object, dict[str, float]] = {}

    def update(
        self, name: object, counters: Mapping[str, float], *, new_from_zero: bool = False
    ) -> dict[str, float]:
        """Return how much each counter has risen since the last call of this name; nothing at the first call.

        Args:
            new_from_zero: a counter that was not there at the last call began at 0, and not at its value now.
        """
        before = self._before.get(name)
        self._before[name] = dict(counters)
        if before is None:
            return {}
        return {
            key: max(0.0, value - before.get(key, 0.0 if new_from_zero else value))
            for key, value in counters.items()
        }


class HostSampler:
    """The samples of one host.

    Args:
        ranks: the processes of the job here.
        run_dir: the run folder; the space of its disk is part of a sample.
    """

    def __init__(self, ranks: Sequence[RankProcess], run_dir: Path) -> None:
        self._ranks, self._run_dir, self._host = ranks, run_dir, socket.gethostname()
        self._differences = CounterDifferences()
        self._rapl, self._gpus = RaplCounters(), GpuCounters()
        self._is_observer: dict[tuple[int, float], bool] = {}
        self._next_pss: dict[int, float] = defaultdict(float)
        self._unavailable: dict[str, str] = {
            name: reason
            for name, reason in (
                ("links", why_no_connections()),
                ("energy", self._rapl.why_none),
                ("gpu", self._gpus.why_none),
                ("stalls", "" if _PRESSURE.is_dir() else "this kernel has no /proc/pressure"),
            )
            if reason
        }
        self._last = time.monotonic()
        # From here on counters are counted.
        list(self.sample())
        self._next_pss.clear()

    def sample(self) -> Iterator[tuple[str, Record]]:
        """Yield the events and records of a sample; counters are those since the sample before."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        trees = self._process_trees()
        links = self._links(trees)
        for rank, tree in trees.items():
            yield "process", {"rank": rank, "seconds": seconds, **self._process(rank, tree), **links[rank]}
        rank = min((process.rank for process in self._ranks), default=0)
        yield "system", {"rank": rank, "host": self._host, "seconds": seconds, **self._system()}

    def _process_trees(self) -> dict[int, list[psutil.Process]]:
        """Return the living processes of each rank: its own, first, and all that it has started."""
        found = {process.pid: process for process in psutil.process_iter(["ppid"])}
        children: dict[int, list[int]] = defaultdict(list)
        for pid, process in found.items():
            children[process.info["ppid"] or 0].append(pid)
        trees: dict[int, list[psutil.Process]] = {}
        for rank, pid, start_ticks in self._ranks:
            if pid not in found or process_start_ticks(pid) != start_ticks:
                continue
            tree, waiting = [], [pid]
            while waiting:
                parent = waiting.pop()
                if not self._observes(found[parent]):
                    tree.append(found[parent])
                    waiting += children[parent]
            trees[rank] = tree
        return trees

    def _observes(self, process: psutil.Process) -> bool:
        """Return whether a process is this one, or an exporter, which are no part of the training."""
        key = process.pid, process.create_time()
        if key not in self._is_observer:
            words: list[str] = []
            with suppress(psutil.Error):
                words = process.cmdline()
            self._is_observer[key] = process.pid == os.getpid() or any(
                word.startswith("paceline.watch.") for word in words[1:3]
            )
        return self._is_observer[key]

    def _process(self, rank: int, tree: Sequence[psutil.Process]) -> Record:
        cpu, memory, disk = {"user": 0.0, "system": 0.0}, {"rss": 0.0}, dict[str, float]()
        threads = 0
        for process in tree:
            with suppress(psutil.NoSuchProcess), process.oneshot():
                times = process.cpu_times()
                # The time of children that have ended is in that of the process that waited for them.
                cpu["user"] += times.user + times.children_user
                cpu["system"] += times.system + times.children_system
                memory["rss"] += process.memory_info().rss
                threads += process.num_threads()
            with suppress(psutil.Error):
                counters = process.io_counters()
                disk[f"{process.pid} {process.create_time()} read"] = counters.read_bytes
                disk[f"{process.pid} {process.create_time()} written"] = counters.write_bytes
        pss = self._pss(rank, tree)
        rise = self._differences.update(("disk", rank), disk, new_from_zero=True)
        return {
            "pid": tree[0].pid if tree else 0,
            "processes": len(tree),
            "threads": threads,
            "cpu_seconds": self._differences.update(("cpu", rank), cpu),
            "memory_bytes": memory if pss is None else {**memory, "pss": pss},
            "disk_bytes": {
                way: sum(value for key, value in rise.items() if key.endswith(way))
                for way in ("read", "written")
            }
            if disk
            else {},
        }

    def _pss(self, rank: int, tree: Sequence[psutil.Process]) -> float | None:
        """Return the memory of a rank, shared pages in part; None if it is not due, or denied."""
        began = time.monotonic()
        if began < self._next_pss[rank] or "pss" in self._unavailable:
            return None
        total = 0.0
        try:
            for process in tree:
                with suppress(psutil.NoSuchProcess):
                    total += process.memory_full_info().pss
        except (psutil.AccessDenied, AttributeError):
            self._unavailable["pss"] = "the kernel does not let this user read it"
            return None
        ended = time.monotonic()
        self._next_pss[rank] = ended + (ended - began) / _PSS_TIME_FRACTION
        return total

    def _links(self, trees: Mapping[int, Sequence[psutil.Process]]) -> dict[int, Record]:
        """Return what each rank has sent to and received from each peer: a rank of this host, or a host."""
        rank_of_pid = {process.pid: rank for rank, tree in trees.items() for process in tree}
        owned: list[tuple[int, TcpConnection]] = []
        for connection in read_connections() if trees and "links" not in self._unavailable else ():
            ranks = [rank_of_pid[pid] for pid in connection.pids if pid in rank_of_pid]
            owned += [(ranks[0], connection)] if ranks else []
        rank_of_address = {connection.local: rank for rank, connection in owned}
        fields: dict[int, Record] = {rank: {} for rank in trees}
        for rank in trees:
            own = [connection for owner, connection in owned if owner == rank]
            peers = {
                connection: str(rank_of_address.get(connection.peer, connection.peer_host))
                for connection in own
            }
            fields[rank] = self._link_fields(rank, peers)
        return fields

    def _link_fields(self, rank: int, peers: Mapping[TcpConnection, str]) -> Record:
        tables: dict[str, dict[str, float]] = {
            name: {} for name in ("link_sent_bytes", "link_received_bytes", "link_retransmits")
        }
        for name, read in _LINK_COUNTERS.items():
            counters = {f"{c.local} {c.peer} {peer}": float(read(c)) for c, peer in peers.items()}
            rise = self._differences.update((name, rank), counters, new_from_zero=True)
            for key, value in rise.items():
                peer = key.split(" ", 2)[2]
                tables[name][peer] = tables[name].get(peer, 0.0) + value
        round_trips: dict[str, float] = {}
        for connection in sorted(peers, key=lambda c: c.sent_bytes):  # that of the busiest one is left
            if connection.round_trip_seconds:
                round_trips[peers[connection]] = connection.round_trip_seconds
        tables["link_round_trip_seconds"] = round_trips
        kept = sorted({*peers.values()}, key=lambda peer: (not peer.isdecimal(), len(peer), peer))[
            :_MAX_LINKS
        ]
        return {name: {peer: table[peer] for peer in kept if peer in table} for name, table in tables.items()}

    def _system(self) -> Record:
        memory, disk = psutil.virtual_memory(), shutil.disk_usage(self._run_dir)
        times = psutil.cpu_times()._asdict()
        gpus = self._gpus.read()
        update = self._differences.update
        return {
            "cores": psutil.cpu_count() or 1,
            "load": os.getloadavg()[0],
            # Time of guests is part of the user's.
            "cpu_seconds": update("cpu", {k: v for k, v in times.items() if not k.startswith("guest")}),
            "memory_bytes": {
                "total": memory.total,
                "available": memory.available,
                "swap": psutil.swap_memory().used,
            },
            "stalled_seconds": update("stalls", read_stalls()),
            "network_sent_bytes": update("sent", _network_bytes("bytes_sent")),
            "network_received_bytes": update("received", _network_bytes("bytes_recv")),
            "tcp_retransmits": update("retransmits", read_retransmits()).get("segments", 0.0),
            "disk_read_bytes": update("read", _disk_bytes("read_bytes")),
            "disk_written_bytes": update("written", _disk_bytes("write_bytes")),
            "folder_bytes": {"total": disk.total, "free": disk.free},
            "temperature_celsius": _temperatures(),
            "energy_joules": update("energy", self._rapl.read()),
            "gpu_utilization": gpus["utilization"],
            "gpu_memory_bytes": gpus["memory_bytes"],
            "gpu_temperature_celsius": gpus["celsius"],
            "gpu_power_watts": gpus["watts"],
            "gpu_energy_joules": update("gpu energy", gpus["joules"]),
            "unavailable": dict(self._unavailable),
        }


_LINK_COUNTERS: Mapping[str, Callable[[TcpConnection], int]] = {
    "link_sent_bytes": lambda connection: connection.sent_bytes,
    "link_received_bytes": lambda connection: connection.received_bytes,
    "link_retransmits": lambda connection: connection.retransmits,
}


def read_stalls(folder: Path = _PRESSURE) -> dict[str, float]:
    """Return the seconds in which some process waited for a resource, by resource: cpu, memory and io.

    Source: Linux, Documentation/accounting/psi.rst.
    """
    seconds = {}
    for name in ("cpu", "memory", "io"):
        with suppress(OSError, ValueError, IndexError):
            line = (folder / name).read_text("ascii").splitlines()[0]  # some avg10=... total=MICROSECONDS
            seconds[name] = int(line.rpartition("total=")[2]) / 1e6
    return seconds


def read_retransmits(path: Path = Path("/proc/net/snmp")) -> dict[str, float]:
    """Return the TCP segments that this network namespace has sent again."""
    with suppress(OSError, ValueError):
        names, values = [line.split() for line in path.read_text("ascii").splitlines() if line[:4] == "Tcp:"]
        return {"segments": float(values[names.index("RetransSegs")])}
    return {}


def _network_bytes(field: str) -> dict[str, float]:
    counters = psutil.net_io_counters(pernic=True)
    used = sorted(name for name, counts in counters.items() if counts.bytes_sent or counts.bytes_recv)
    return {name: getattr(counters[name], field) for name in used[:_MAX_DEVICES]}


def _disk_bytes(field: str) -> dict[str, float]:
    """Return a counter of each disk; partitions and loop devices are parts of others."""
    with suppress(OSError, RuntimeError):  # psutil finds no disks in some containers
        counters = psutil.disk_io_counters(perdisk=True) or {}
        disks = [
            name
            for name in sorted(counters)
            if Path("/sys/block", name).exists() and not name.startswith(("loop", "ram", "zram"))
        ]
        return {name: getattr(counters[name], field) for name in disks[:_MAX_DEVICES]}
    return {}


def _temperatures() -> dict[str, float]:
    with suppress(OSError, AttributeError):
        sensors = [
            (f"{chip} {sensor.label or number}", sensor.current)
            for chip, group in psutil.sensors_temperatures().items()
            for number, sensor in enumerate(group)
        ]
        return dict(sensors[:_MAX_DEVICES])
    return {}


def follow(sampler: HostSampler, sink: JsonLinesSink, seconds: float, parent: int) -> None:
    """Write a sample every `seconds` until SIGTERM, which writes a last one, or until the parent is gone."""
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    due = time.monotonic() + seconds
    while os.getppid() == parent:
        stopped.wait(min(_CHECK_PARENT_SECONDS, max(0.0, due - time.monotonic())))
        if stopped.is_set() or time.monotonic() >= due:
            for name, record in sampler.sample():
                sink.event(name, record)
            due = max(due + seconds, time.monotonic())
        if stopped.is_set():
            break
    sink.close()


def main() -> None:
    """Run the sampler with the arguments of `paceline.session.companion_processes`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("name", help="of the file in the run folder")
    parser.add_argument("seconds", type=float)
    parser.add_argument("rotate_bytes", type=int)
    parser.add_argument("parent", type=int)
    parser.add_argument("ranks", nargs="*", help="RANK:PID:START of each rank on this host")
    arguments = parser.parse_args()
    os.nice(_NICENESS)
    ranks = [RankProcess(*map(int, text.split(":"))) for text in arguments.ranks]
    path = arguments.run_dir / arguments.name
    sink = JsonLinesSink(path, rotate_bytes=arguments.rotate_bytes)
    follow(HostSampler(ranks, arguments.run_dir), sink, arguments.seconds, arguments.parent)


if __name__ == "__main__":
    main()
