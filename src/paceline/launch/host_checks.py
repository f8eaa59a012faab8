"""Checks of this host before a job: what would end it later, or slow it down, and the next step.

Each check reads one fact of the system and judges it. Invariant: nothing is changed, every wait has a limit
below the 15 s of the command, and PyTorch is not imported here, so that `paceline train` can afford the cheap
ones.
"""

from __future__ import annotations

import math
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from paceline.errors import format_count
from paceline.job.addresses import loopback_address
from paceline.job.cpu_count import find_cores
from paceline.launch.stale_folders import find_stale_folders
from paceline.observe.process_info import read_stat_fields

_CONNECT_SECONDS = 3.0
_REMOTE_SECONDS = 10.0
_IMPORT_SECONDS = 10.0
_FILES_OF_PROCESS, _FILES_OF_PEER = 128, 4
_MIN_MEMORY_BYTES, _USUAL_MEMORY_BYTES = 256 << 20, 1 << 30
_MIN_DISK_BYTES, _USUAL_DISK_BYTES = 64 << 20, 1 << 30
_MIN_SHM_BYTES, _USUAL_SHM_BYTES = 16 << 20, 256 << 20
_MAX_CLOCK_SECONDS = 0.5
_SLOW_LINK = 5.0
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}

Severity = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class HostCheck:
    """The result of one check.

    Args:
        name: of the check, as in "disk".
        severity: "error": a job fails; "warning": it is slow, or can fail.
        found: what was found.
        next_step: what to do; empty if there is nothing.
    """

    name: str
    severity: Severity
    found: str
    next_step: str = ""


@dataclass(frozen=True)
class PlannedJob:
    """The facts of a job that its host is checked for.

    Args:
        processes: on this host.
        world_size: on all hosts.
        folder: an existing folder on the disk that its runs are written to.
        threads: `runtime.threads`; 0: chosen.
        precision: `precision.compute`.
        device: `runtime.device`.
        rendezvous: host and port of node 0; empty and 0 on one node.
        serves: this host is node 0, where the port must be free.
    """

    processes: int = 1
    world_size: int = 1
    folder: Path = Path()
    threads: int = 0
    precision: str = "auto"
    device: str = "auto"
    rendezvous: tuple[str, int] = ("", 0)
    serves: bool = True


def check_cheaply(job: PlannedJob, environ: Mapping[str, str]) -> list[HostCheck]:
    """Return the checks that take a few milliseconds, for the start of every job."""
    return [
        check_disk(job),
        check_memory(job),
        check_shared_memory(job),
        check_open_files(job),
        check_copies(os.getpid(), environ),
    ]


def check_host(job: PlannedJob, environ: Mapping[str, str]) -> list[HostCheck]:
    """Return all checks of this host, in the order in which a job would fail by them."""
    return [
        check_names(),
        check_port(job),
        *check_cheaply(job, environ),
        check_threads(job, environ),
        check_precision(job),
        check_gpus(job),
        check_leftovers(),
        check_torchvision(),
    ]


def check_names() -> HostCheck:
    """Check that the name of this host is one of its addresses, as Gloo and other hosts assume."""
    name = socket.gethostname()
    try:
        addresses = sorted({str(row[4][0]) for row in socket.getaddrinfo(name, None)})
    except OSError as error:
        found = f"the name of this host, {name}, has no address: {error.strerror or error}"
        return HostCheck("names", "warning", found, f"add {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME")
    return HostCheck("names", "ok", f"{name} is {', '.join(addresses)}")


def check_port(job: PlannedJob) -> HostCheck:
    """Check that the rendezvous can be bound here, or reached from here."""
    host, port = job.rendezvous
    if not port:
        with socket.socket() as free:
            free.bind((loopback_address(), 0))
        return HostCheck("ports", "ok", "free ports can be bound")
    where = f"{host}:{port}"
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        found = f"the rendezvous host {host} has no address: {error.strerror or error}"
        return HostCheck("ports", "error", found, "use an address, or a name that every node resolves")
    try:
        with socket.socket(address[0]) as tried:
            if job.serves:
                tried.bind(address[4])
            else:
                tried.settimeout(_CONNECT_SECONDS)
                tried.connect(address[4])
    except OSError as error:
        verb = "bound" if job.serves else "reached"
        found = f"the rendezvous {where} cannot be {verb}: {error.strerror or error}"
        step = (
            "choose another port, or end the process that has it (ss -ltnp)"
            if job.serves
            else "start node 0 first, and open the port in the firewall between the nodes"
        )
        return HostCheck("ports", "error", found, step)
    return HostCheck("ports", "ok", f"{where} can be {'bound' if job.serves else 'reached'}")


def check_disk(job: PlannedJob) -> HostCheck:
    """Check that runs can be written, and that there is space."""
    try:
        with tempfile.TemporaryFile(dir=job.folder) as file:
            file.write(b"0" * 4096)
            file.flush()
        free = shutil.disk_usage(job.folder).free
    except OSError as error:
        found = f"{job.folder.resolve()} cannot be written: {error.strerror or error}"
        return HostCheck("disk", "error", found, "choose another run_dir, or free some space")
    found = f"{_format(free)} free in {job.folder.resolve()}"
    return _by_limit(
        "disk", free, _MIN_DISK_BYTES, _USUAL_DISK_BYTES, found, "free some space for checkpoints"
    )


def check_memory(job: PlannedJob) -> HostCheck:
    """Check the available memory, by the system and by the control group."""
    available = _available_memory_bytes()
    if available is None:
        return HostCheck("memory", "ok", "this system does not say how much is available")
    share = available / job.processes
    found = f"{_format(available)} available for {format_count(job.processes, 'process')}"
    step = "end other programs, raise the limit of the container, or use fewer processes"
    return _by_limit("memory", share, _MIN_MEMORY_BYTES, _USUAL_MEMORY_BYTES, found, step)


def check_shared_memory(job: PlannedJob, folder: Path = Path("/dev/shm")) -> HostCheck:
    """Check the space in /dev/shm, which loaders and the ranks of a host share."""
    if not folder.is_dir():
        severity: Severity = "warning" if sys.platform == "linux" else "ok"
        found = f"there is no {folder}, which loader workers need"
        return HostCheck("shared memory", severity, found, "docker run --shm-size 2g; or loader.workers = 0")
    free = shutil.disk_usage(folder).free
    found = f"{_format(free)} free in {folder}"
    step = "mount -o remount,size=2g /dev/shm; docker run --shm-size 2g; or set loader.workers = 0"
    return _by_limit("shared memory", free, _MIN_SHM_BYTES, _USUAL_SHM_BYTES, found, step)


def check_open_files(job: PlannedJob) -> HostCheck:
    """Check the limit of open files against what the connections of a rank need."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = math.inf if soft == resource.RLIM_INFINITY else soft
    needed = _FILES_OF_PROCESS + _FILES_OF_PEER * job.world_size
    found = (
        f"at most {soft if math.isfinite(limit) else 'any number of'} open files, about {needed} are needed"
    )
    return _by_limit("open files", limit, needed, 2 * needed, found, "raise it: ulimit -n 65536")


def check_copies(pid: int, environ: Mapping[str, str]) -> HostCheck:
    """Check that no launch engine has started several copies of this command, each a job of its own."""
    sizes = {name: environ.get(name, "") for name in _ENGINE_SIZES}
    several = [f"{name}={size}" for name, size in sizes.items() if size.isdecimal() and int(size) > 1]
    copies = _copies_of(pid)
    if copies > 1:
        hint = f" ({', '.join(several)})" if several else ""
        return HostCheck(
            "copies",
            "error",
            f"{copies} copies of this command were started at once{hint}",
            "start it once on each node: Paceline starts the processes of a node itself (-n)",
        )
    return HostCheck("copies", "ok", "this command was started once")


_COPY_SECONDS = 10.0
_ENGINE_SIZES = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PALS_SIZE", "JSM_NAMESPACE_SIZE")


def _copies_of(pid: int) -> int:
    """Return how many processes the parent of this one has started with the same words at this time."""
    own, command = read_stat_fields(pid), _command_line(pid)
    # A process that a fork server has forked shows the command line of its server.
    is_shown = all(os.fsencode(word) in command.split(b"\0") for word in sys.argv[1:])
    if not own or own[1] in ("0", "1") or not is_shown:
        return 1
    count, ticks = 0, _COPY_SECONDS * os.sysconf("SC_CLK_TCK")
    for process in Path("/proc").glob("[0-9]*"):
        fields = read_stat_fields(int(process.name))
        is_sibling = fields[1:2] == own[1:2] and abs(int(fields[19]) - int(own[19])) < ticks
        count += is_sibling and _command_line(int(process.name)) == command
    return max(1, count)


def _command_line(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def check_threads(job: PlannedJob, environ: Mapping[str, str]) -> HostCheck:
    """Check that the threads of all processes fit the cores, by affinity and quota."""
    cores = find_cores()
    given = environ.get("OMP_NUM_THREADS", "")
    threads = job.threads or (int(given) if given.isdecimal() else max(1, cores.number // job.processes))
    total = threads * job.processes
    found = f"{format_count(total, 'thread')} of {format_count(job.processes, 'process')} on {cores.reason}"
    if total > cores.number:
        source = "runtime.threads" if job.threads else "OMP_NUM_THREADS" if given.isdecimal() else "-n"
        step = f"lower {source}: threads beyond the cores wait for each other inside every operation"
        return HostCheck("threads", "warning", found, step)
    return HostCheck("threads", "ok", found)


def check_precision(job: PlannedJob, cpuinfo: Path = Path("/proc/cpuinfo")) -> HostCheck:
    """Check that the processor has instructions for the number format of the recipe."""
    text = ""
    with suppress(OSError):
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    flags = set(match[1].split()) if match else set()
    if job.precision in ("bf16", "fp16") and flags and not flags & _BF16_FLAGS and job.device != "cuda":
        found = f"precision.compute = {job.precision}, and this processor computes it without instructions"
        return HostCheck("precision", "warning", found, 'use precision.compute = "auto", which measures it')
    return HostCheck("precision", "ok", f"precision.compute = {job.precision}")


def check_gpus(job: PlannedJob) -> HostCheck:
    """Check that an NVIDIA driver, the GPUs of the recipe and PyTorch's CUDA agree; PyTorch is asked."""
    has_driver = Path("/proc/driver/nvidia/version").exists()
    if not has_driver and job.device != "cuda":
        return HostCheck("GPUs", "ok", "no NVIDIA driver")
    script = "import torch; n = torch.cuda.device_count(); print(n, torch.version.cuda, *((torch.cuda.nccl"
    script += ".version()) if n else ()))"
    answer = _run_python(script)
    count, _, version = answer.partition(" ")
    if not count.isdecimal() or int(count) == 0:
        found = "an NVIDIA driver is loaded" if has_driver else 'runtime.device = "cuda"'
        found += f", but PyTorch sees no GPU (CUDA of PyTorch: {version.strip() or 'none'})"
        return HostCheck(
            "GPUs", "error" if job.device == "cuda" else "warning", found, "install a CUDA wheel"
        )
    if int(count) < job.processes:
        found = f"{format_count(int(count), 'GPU')} for {format_count(job.processes, 'process')}"
        severity: Severity = "error" if job.device == "cuda" else "warning"
        return HostCheck("GPUs", severity, found, f"use -n {count}, or runtime.device = cpu")
    return HostCheck("GPUs", "ok", f"{format_count(int(count), 'GPU')}, CUDA and NCCL {version}")


def check_leftovers() -> HostCheck:
    """Check for folders that launchers have left which were killed."""
    folders = find_stale_folders()
    if folders:
        found = f"{format_count(len(folders), 'folder')} of killed launchers in {folders[0].parent}"
        return HostCheck("leftovers", "warning", found, f"the next job removes them; or: rm -r {folders[0]}")
    return HostCheck("leftovers", "ok", "nothing is left of earlier jobs")


def check_torchvision() -> HostCheck:
    """Check that torchvision can be imported if it is installed: it fits one version of PyTorch only."""
    if find_spec("torchvision") is None:
        return HostCheck("torchvision", "ok", "not installed")
    answer = _run_python("import torchvision; print(torchvision.__version__)")
    if not re.match(r"\d", answer):
        last = answer.strip().splitlines()[-1] if answer.strip() else "it ended without a message"
        step = "install the version of torchvision for this PyTorch, or remove it: pip uninstall torchvision"
        return HostCheck("torchvision", "error", f"cannot be imported: {last[:160]}", step)
    return HostCheck("torchvision", "ok", answer.strip())


def _run_python(script: str) -> str:
    """Return what a script prints in an interpreter of its own, or its errors."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=_IMPORT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it takes more than {_IMPORT_SECONDS:g} s"
    return done.stderr if done.returncode else done.stdout


# -- other hosts --------------------------------------------------------------------------------------------


def local_facts() -> dict[str, Any]:
    """Return what has to be equal on all hosts of a job: versions of Paceline, PyTorch and Python."""
    from importlib import metadata

    from paceline._version import VERSION

    def version(name: str) -> str:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
        return "not installed"

    python = ".".join(map(str, sys.version_info[:2]))
    return {"paceline": VERSION, "torch": version("torch"), "python": python, "numpy": version("numpy")}


def check_other_hosts(
    hosts: Sequence[str], command: Sequence[str], run: Callable[[Sequence[str]], str] | None = None
) -> list[HostCheck]:
    """Return the checks of other hosts, all at once: names, links, clocks and versions.

    Args:
        hosts: their names or addresses.
        command: words that run the words after them on a host whose name is the last one, as in "ssh".
        run: runs a command and returns its output; None: `subprocess`.
    """
    with ThreadPoolExecutor(max(1, min(32, len(hosts)))) as pool:
        return [
            check
            for checks in pool.map(lambda host: list(_check_other_host(host, command, run or _run)), hosts)
            for check in checks
        ]


def _check_other_host(
    host: str, command: Sequence[str], run: Callable[[Sequence[str]], str]
) -> Iterator[HostCheck]:
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        found = f"{host} has no address: {error.strerror or error}"
        yield HostCheck(
            f"names of {host}", "error", found, f"add {host} to DNS or to /etc/hosts of every node"
        )
        return
    try:
        began = time.time()
        answer = run([*command, host, "date", "+%s.%N"])
        ended, there = time.time(), float(answer.split()[-1])
        versions = run([*command, host, "paceline", "doctor", "--facts"])
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
        found = f"{host} does not answer: {' '.join(command)} failed ({type(error).__name__})"
        step = f"try {' '.join([*command, host, 'paceline', '--version'])}"
        yield HostCheck(f"link to {host}", "error", found, step)
        return
    yield HostCheck(f"link to {host}", "ok", f"answers within {ended - began:.2f} s")
    yield _judge_clock(host, began, ended, there)
    yield _judge_versions(host, versions)


def _judge_clock(host: str, began: float, ended: float, there: float) -> HostCheck:
    """Judge the clock of a host that was read at some moment between two readings of this one."""
    offset = there - ended if there > ended else there - began if there < began else 0.0
    if abs(offset) > _MAX_CLOCK_SECONDS:
        ahead = "ahead" if offset > 0 else "behind"
        found = f"the clock of {host} is {abs(offset):.1f} s {ahead}"
        return HostCheck(f"clock of {host}", "warning", found, "let chrony or systemd-timesyncd set it")
    return HostCheck(f"clock of {host}", "ok", f"agrees within {max(ended - began, 0.001):.2f} s")


def _judge_versions(host: str, answer: str) -> HostCheck:
    import json

    try:
        there = json.loads(answer)
        differing = [
            f"{name} {there.get(name)} (here {value})"
            for name, value in local_facts().items()
            if there.get(name) != value
        ]
    except (ValueError, AttributeError):
        return HostCheck(
            f"versions of {host}", "error", f"{host} has no paceline doctor", "install Paceline there"
        )
    if differing:
        found = f"{host} has {', '.join(differing)}"
        return HostCheck(f"versions of {host}", "error", found, "install the same versions on every node")
    return HostCheck(f"versions of {host}", "ok", "the same as here")


def check_link_profile(profile: Mapping[str, Any], round_trips: Mapping[str, float]) -> Iterator[HostCheck]:
    """Yield a check for each host of a link profile whose round trip is much longer than measured then.

    Args:
        profile: latency from this host to each host, in seconds.
        round_trips: measured now, in seconds.
    """
    for host, seconds in round_trips.items():
        expected = 2 * float(profile.get(host, math.inf))
        if seconds > _SLOW_LINK * expected:
            found = (
                f"a round trip to {host} takes {1e3 * seconds:.1f} ms, {1e3 * expected:.1f} ms in the profile"
            )
            yield HostCheck(f"link to {host}", "warning", found, "measure again: paceline bench link")


def measure_round_trips(hosts: Sequence[str], port: int = 22) -> dict[str, float]:
    """Return the time to connect to each host in seconds, without those that do not answer."""
    seconds = {}
    for host in hosts:
        began = time.perf_counter()
        try:
            socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
        except ConnectionRefusedError:
            pass  # an answer as well
        except OSError:
            continue
        seconds[host] = time.perf_counter() - began
    return seconds


def _run(words: Sequence[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=_REMOTE_SECONDS, check=True)
    return done.stdout


def _by_limit(name: str, value: float, least: float, usual: float, found: str, next_step: str) -> HostCheck:
    if value < least:
        return HostCheck(name, "error", found, next_step)
    return HostCheck(name, "ok", found) if value >= usual else HostCheck(name, "warning", found, next_step)


def _available_memory_bytes() -> float | None:
    """Return the memory that can be used, at most what the control group has left; None: not known."""
    available = None
    with suppress(OSError):
        match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        available = 1024.0 * int(match[1]) if match else None
    with suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        available = min(available or math.inf, limit - used)
    return available


def _format(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
