"""A benchmark of this machine in less than a minute: matrix products, memory, disk and collectives.

Invariant: every part ends after some seconds, and none begins after 30; no file is left behind. A number is
the best of some repeats, which is that of the idle machine. Collectives need several processes, which
`paceline bench machine` starts; `measure_collectives` is what they run.
"""

from __future__ import annotations

import json
import math
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table

from paceline.comm.net import Net
from paceline.errors import DataError
from paceline.job.cluster import Cluster
from paceline.observe.terminal_text import escape_controls
from paceline.report.number_format import format_bytes, format_number
from paceline.tuning.comm_benchmark import measure_comm
from paceline.tuning.machine_facts import describe_machine, find_slow_paths

SCHEMA_VERSION = 1
_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
_SIZES = {"cpu": (128, 2048), "cuda": (1024, 8192)}
_LAST_START_SECONDS = 30.0
_LONG_PRODUCT_SECONDS = 0.03
_NUM_PROBES = 4
_PART_SECONDS = 0.5
_MAX_COPY_BYTES = 2**28
_MAX_FILE_BYTES = 2**28
_CHUNK_BYTES = 2**24
_DISK_SECONDS = 4.0
_SYNC_SECONDS = 1.5
_SMALL_BYTES, _LARGE_BYTES = 1024, 2**24
_NUM_SYNCS = 20


class MachineNumber(NamedTuple):
    """A measured number.

    Args:
        value: in `unit`.
        unit: for example "GFLOP/s".
        is_rate: a larger value is better; else it is a time, and a smaller one is.
    """

    value: float
    unit: str
    is_rate: bool = True


@dataclass(frozen=True)
class MachineReport:
    """A report about a machine.

    Args:
        host: its name.
        time: seconds since the epoch.
        facts: see `describe_machine`.
        measured: numbers by name.
        slow_paths: sentences, see `find_slow_paths`.
        not_measured: why a part has no numbers, by its name.
    """

    host: str
    time: float
    facts: Mapping[str, Any]
    measured: Mapping[str, MachineNumber]
    slow_paths: Sequence[str]
    not_measured: Mapping[str, str]

    def record(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        measured = {name: number._asdict() for name, number in self.measured.items()}
        return {"schema": SCHEMA_VERSION, **asdict(self), "measured": measured}


def load_report(path: Path) -> MachineReport:
    """Read a report that `paceline bench machine --json` has printed.

    Raises:
        DataError: the file cannot be read, or is no such report.
    """
    try:
        record = json.loads(path.read_text("utf-8"))
        if record.pop("schema") != SCHEMA_VERSION:
            raise ValueError("another version of the schema")
        measured = {name: MachineNumber(**number) for name, number in record.pop("measured").items()}
        if not all(math.isfinite(number.value) and number.value > 0 for number in measured.values()):
            raise ValueError("a number that is not positive")
        return MachineReport(measured=measured, **record)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise DataError(
            f"'{path}' is no report of a machine: {error}",
            next_step=f"paceline bench machine --json > {path}, on that machine",
        ) from error


def measure_machine(
    folder: Path,
    measure_collectives: Callable[[], Mapping[str, MachineNumber]],
    log: Callable[[str], None] = lambda text: None,
) -> MachineReport:
    """Describe and measure this machine.

    Args:
        folder: an existing folder on the disk to measure; a file in it is removed again.
        measure_collectives: starts processes, see `measure_collectives`; an OSError or RuntimeError of it is
            part of the report.
        log: receives a line of progress before each part.
    """
    log("reading what the system says about the machine")
    facts = describe_machine(folder)
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    parts: dict[str, Callable[[], Mapping[str, MachineNumber]]] = {}
    for device in devices:
        parts[f"matrix products on {device}"] = partial(measure_matmuls, device)
        parts[f"memory of {device}"] = partial(measure_memory, device)
    parts[f"the disk of {folder}"] = lambda: measure_disk(folder)
    parts["collectives of two processes"] = measure_collectives
    measured: dict[str, MachineNumber] = {}
    not_measured: dict[str, str] = {}
    began = time.monotonic()
    for name, measure in parts.items():
        seconds = time.monotonic() - began
        if seconds > _LAST_START_SECONDS:
            not_measured[name] = f"the parts before it took {seconds:.0f} s, so the machine is busy"
            continue
        log(f"{seconds:4.1f} s  measuring {name}")
        try:
            measured |= measure()
        except (OSError, RuntimeError) as error:  # a full disk, or a GPU whose memory is in use
            not_measured[name] = f"{type(error).__name__}: {error}"
    values = {name: number.value for name, number in measured.items()}
    slow_paths = find_slow_paths(facts, values)
    return MachineReport(socket.gethostname(), time.time(), facts, measured, slow_paths, not_measured)


def measure_matmuls(device: torch.device) -> dict[str, MachineNumber]:
    """Measure matrix products in each number format, in GFLOP/s; on a CPU also fp32 on one thread."""
    name = "cpu" if device.type == "cpu" else f"gpu{device.index}"
    numbers = {
        f"matmul.{name}.{word}": MachineNumber(_matmul_gflops(device, dtype), "GFLOP/s")
        for word, dtype in _DTYPES.items()
    }
    threads = torch.get_num_threads()
    if device.type == "cpu" and threads > 1:
        torch.set_num_threads(1)
        try:
            gflops = _matmul_gflops(device, torch.float32)
        finally:
            torch.set_num_threads(threads)
        numbers[f"matmul.{name}.fp32.one_thread"] = MachineNumber(gflops, "GFLOP/s")
    return numbers


def _matmul_gflops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the speed of a square product that takes long enough to be timed, or of the largest."""
    size, largest = _SIZES[device.type]
    while True:
        x = torch.ones(size, size, dtype=dtype, device=device)
        y = torch.empty_like(x)
        seconds = _best_seconds(partial(torch.mm, x, x, out=y), device, 0.0, _NUM_PROBES)
        if seconds > _LONG_PRODUCT_SECONDS or size >= largest:
            best = _best_seconds(partial(torch.mm, x, x, out=y), device, _PART_SECONDS)
            return 2 * size**3 / best / 1e9
        size *= 2


def measure_memory(device: torch.device) -> dict[str, MachineNumber]:
    """Measure copies of a tensor larger than any cache, in GB/s read and written; on a GPU also from pinned
    memory of the host.
    """
    num_bytes = _MAX_COPY_BYTES
    if device.type == "cpu":
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        num_bytes = max(_CHUNK_BYTES, min(num_bytes, free // 8))
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    rate = 2 * num_bytes / _best_seconds(lambda: target.copy_(source), device, _PART_SECONDS) / 1e9
    if device.type == "cpu":
        return {"memory.cpu.copy": MachineNumber(rate, "GB/s")}
    pinned = torch.ones(num_bytes // 4).pin_memory()
    seconds = _best_seconds(lambda: target.copy_(pinned, non_blocking=True), device, _PART_SECONDS)
    return {
        f"memory.gpu{device.index}.copy": MachineNumber(rate, "GB/s"),
        f"memory.gpu{device.index}.from_host": MachineNumber(num_bytes / seconds / 1e9, "GB/s"),
    }


def _best_seconds(
    run: Callable[[], object], device: torch.device, budget_seconds: float, min_runs: int = 2
) -> float:
    """Return the shortest time of at least `min_runs` runs, the first of which only warms up."""
    times: list[float] = []
    end = time.perf_counter() + budget_seconds
    while len(times) < min_runs or time.perf_counter() < end:
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def measure_disk(folder: Path) -> dict[str, MachineNumber]:
    """Measure the disk of a folder: write and read in GB/s, and the time to sync 4 KiB in microseconds.

    Every chunk is synced, so the page cache does not count. On a file system in memory, and on some network
    disks, the kernel keeps the pages all the same, and reading is as fast as memory.
    """
    room = os.statvfs(folder)
    num_chunks = max(1, min(_MAX_FILE_BYTES, room.f_bavail * room.f_frsize // 8) // _CHUNK_BYTES)
    chunk = os.urandom(_CHUNK_BYTES)  # some disks compress
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".bench-machine-", buffering=0) as file:
        descriptor = file.fileno()
        syncs: list[float] = []
        end = time.perf_counter() + _SYNC_SECONDS
        while len(syncs) < 2 or (len(syncs) < _NUM_SYNCS and time.perf_counter() < end):
            began = time.perf_counter()
            os.pwrite(descriptor, chunk[:4096], 4096 * len(syncs))
            os.fdatasync(descriptor)
            syncs.append(time.perf_counter() - began)
        written, began = 0, time.perf_counter()
        while written < num_chunks * _CHUNK_BYTES and time.perf_counter() - began < _DISK_SECONDS:
            written += os.pwrite(descriptor, chunk, written)
            os.fdatasync(descriptor)
        write_seconds = time.perf_counter() - began
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        read, began = 0, time.perf_counter()
        while read < written and time.perf_counter() - began < _DISK_SECONDS:
            read += len(os.pread(descriptor, _CHUNK_BYTES, read))
        read_seconds = time.perf_counter() - began
    return {
        "disk.write": MachineNumber(written / write_seconds / 1e9, "GB/s"),
        "disk.read": MachineNumber(read / read_seconds / 1e9, "GB/s"),
        "disk.sync": MachineNumber(1e6 * statistics.median(syncs), "us", is_rate=False),
    }


def measure_collectives(cluster: Cluster, deadline_seconds: float) -> dict[str, MachineNumber]:
    """Measure an all_reduce over Gloo, of 1 KiB in microseconds and of 16 MiB in GB/s sent; collective.

    Args:
        cluster: connected.
    """
    small, large = measure_comm(cluster, Net(deadline_seconds), ["native"], [], [_SMALL_BYTES, _LARGE_BYTES])
    name = f"all_reduce.gloo.{cluster.world_size}_processes"
    return {
        f"{name}.1KiB": MachineNumber(1e6 * small.seconds, "us", is_rate=False),
        f"{name}.16MiB": MachineNumber(large.busbw / 8e9, "GB/s"),
    }


def compare_reports(first: MachineReport, second: MachineReport) -> dict[str, float]:
    """Return how many times as fast the second machine is, by the names that both have measured."""
    return {
        name: second.measured[name].value / number.value
        if number.is_rate
        else number.value / second.measured[name].value
        for name, number in first.measured.items()
        if name in second.measured
    }


def differing_facts(first: MachineReport, second: MachineReport) -> dict[str, tuple[str, str]]:
    """Return the facts in which two machines differ, in words; what changes by itself is left out."""
    before, after = (dict(_flatten(report.facts)) for report in (first, second))
    names = [name for name in (before | after) if name.rpartition(".")[2] not in _CHANGING]
    return {
        name: (before.get(name, "–"), after.get(name, "–"))
        for name in names
        if before.get(name) != after.get(name)
    }


_CHANGING = ("load", "available_bytes", "free_bytes", "throttled_periods")


def render_report(report: MachineReport) -> Iterator[Table | str]:
    """Yield the tables and lines of a report."""
    facts = Table("fact", "value", title=escape_controls(report.host), title_justify="left")
    for name, text in _flatten(report.facts):
        facts.add_row(name, escape_controls(text))
    yield facts
    numbers = Table("measured", title_justify="left")
    numbers.add_column("value", justify="right")
    numbers.add_column("unit")
    for name, number in report.measured.items():
        numbers.add_row(name, format_number(number.value, 3), number.unit)
    for name, why in report.not_measured.items():
        numbers.add_row(name, "–", escape_controls(why))
    yield numbers
    yield from (f"slow: {text}" for text in report.slow_paths)
    if not report.slow_paths:
        yield "no slow path is in use"


def render_comparison(first: MachineReport, second: MachineReport) -> Iterator[Table | str]:
    """Yield the tables of two reports: numbers with their ratio, and facts that differ."""
    numbers = Table("measured")
    for title in (escape_controls(first.host), escape_controls(second.host), "unit", "times as fast"):
        numbers.add_column(title, justify="right")
    for name, ratio in compare_reports(first, second).items():
        before, after = first.measured[name], second.measured[name]
        cells = format_number(before.value, 3), format_number(after.value, 3), before.unit, f"{ratio:.2f}"
        numbers.add_row(name, *cells)
    yield numbers
    facts = Table("fact that differs", escape_controls(first.host), escape_controls(second.host))
    for name, texts in differing_facts(first, second).items():
        facts.add_row(name, *map(escape_controls, texts))
    yield facts


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield facts by dotted name, in words; unknown ones are left out."""
    match value:
        case None | "":
            return
        case Mapping():
            for key, inside in value.items():
                yield from _flatten(inside, f"{name}.{key}" if name else str(key))
        case [Mapping(), *_]:
            for number, item in enumerate(value):
                yield from _flatten(item, f"{name}.{number}")
        case list():
            yield name, " ".join(map(str, value)) or "none"
        case bool():
            yield name, "yes" if value else "no"
        case _:
            yield name, format_bytes(value) if name.endswith("_bytes") else str(value)
