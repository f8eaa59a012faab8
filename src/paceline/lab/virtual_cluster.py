"""The virtual cluster: a lab of hosts, links and faults for the duration of a `with` block, and the jobs it
runs.

Invariant: when the block is left, no process, namespace, link, mount, control group or file of the lab is
left, whatever happened. If this process is killed, processes, namespaces, links and mounts vanish with it,
and `clean` removes the rest. When `run` returns or raises, no process is left in any host but those of
`start_companions`, every fault is healed, and the signal handlers are restored.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.errors import LabError, RecipeError
from paceline.job.cluster import process_environment
from paceline.lab.fault_injection import FaultInjector
from paceline.lab.fault_plan import FaultPlan
from paceline.lab.host_commands import HostCompanion, HostProcess, LineCallback, spread_over_hosts
from paceline.lab.host_cores import assign_cores, describe_core_shares
from paceline.lab.lab_outcome import LabOutcome
from paceline.lab.lab_registry import ProcessIdentity, create_lab_record, remove_lab_folder
from paceline.lab.namespaces import HostNamespaces, check_tools, start_first_namespaces, start_namespaces
from paceline.lab.network import LabNetwork, render_delay_counts
from paceline.lab.topology import HOST_DEVICE, SWITCH, Links, build_topology, parse_size_bytes
from paceline.lab.utilization import LinkTraffic, UtilizationSampler, describe_bottleneck

_TICK_SECONDS = 0.01
_GRACE_SECONDS = 15.0  # from SIGTERM to SIGKILL
_ENTRY_SECONDS = 30.0  # for the commands to enter their hosts
_FAULTS_VARIABLE = "PACELINE_FAULTS"
# Gloo would else take the interface of the host name, which can be the loopback.
_HOST_VARIABLES = {"GLOO_SOCKET_IFNAME": HOST_DEVICE}
_METRICS_LINE = re.compile(
    r"^metrics: +(?P<path>\S.*metrics\.jsonl)\n(?:report: .*\n)?resume: .* -n (?P<world>\d+)", re.MULTILINE
)


class LabJob:
    """One command on all hosts of a lab, with the arguments of `Lab.run`."""

    def __init__(
        self,
        lab: Lab,
        command: Sequence[str],
        faults: FaultPlan | None,
        on_line: LineCallback,
        environ: Mapping[str, str] | None,
        directory: Path,
        settle_seconds: float,
    ) -> None:
        self._lab, self._on_line, self._directory = lab, on_line, directory
        self._settle_seconds = settle_seconds
        self._signals = self._first_signal = 0
        self._stop_at = self._kill_at = float("inf")
        self._forced: list[str] = []
        self._injector = self._prepare(faults or FaultPlan())
        self._environ = dict(process_environment() if environ is None else environ)
        self._environ |= {**_HOST_VARIABLES, "PACELINE_TOKEN": secrets.token_hex(32)}
        if self._injector.plan.faults:
            self._environ[_FAULTS_VARIABLE] = str(self._injector.folder)
        addresses = [host.address for host in lab.topology.hosts]
        self._commands = spread_over_hosts(command, addresses)
        lab.record.command = " ".join(command)

    def _prepare(self, plan: FaultPlan) -> FaultInjector:
        lab = self._lab
        invalid_targets = plan.invalid_targets(lab.hosts, [rack.name for rack in lab.topology.racks])
        if invalid_targets:
            raise RecipeError(
                f"the fault plan has unknown or unsuitable hosts: {', '.join(invalid_targets)}",
                next_step=f"the hosts are {', '.join(lab.hosts)}",
            )
        disk = lab.disk if any(fault.kind == "disk_full" for fault in plan.faults) else None
        folder = lab.record.folder / f"faults-{len(list(lab.record.folder.glob('faults-*')))}"
        return FaultInjector(plan, folder, lab.spaces, lab.network, disk, self._directory)

    def run(self, deadline_seconds: float | None, event_log: Path | None) -> LabOutcome:
        """Run the command until its end on all hosts, and return the outcome.

        Raises:
            LabError: a process that delays a link has ended.
        """
        lab = self._lab
        lab.record.save()
        before, delays_before = lab.network.traffic(), lab.network.delay_counts()
        sampler = UtilizationSampler(lab.spaces[SWITCH].first, lab.network.cables)
        self._injector.begin()
        began = time.monotonic()
        if deadline_seconds is not None:
            self._stop_at = began + deadline_seconds
        with self._handling_signals():
            agents: list[HostProcess] = []
            try:
                self._start(agents)
                self._wait_for_entry(agents)
                self._injector.start_clock()
                self._watch(agents, sampler)
            finally:
                self._end(agents)
        if event_log is not None:
            self._injector.save(event_log)
        counts = lab.network.delay_counts()
        delays = render_delay_counts({name: n - delays_before.get(name, 0) for name, n in counts.items()})
        remarks = [*lab.remarks(), *([delays] if delays else []), describe_bottleneck(sampler.samples)]
        return self._outcome(agents, time.monotonic() - began, before, remarks)

    def _start(self, agents: list[HostProcess]) -> None:
        lab = self._lab
        for host, argv, share in zip(lab.hosts, self._commands, lab.shares, strict=True):
            companions = lab.companions[host]
            variables = {name: value for one in companions for name, value in one.variables.items()}
            agent = HostProcess(
                lab.spaces[host],
                argv,
                share.environ({**self._environ, **variables}),
                self._on_line,
                cores=share.cores,
                cgroups=lab.group(host),
                directory=self._directory,
                companions=[pid for one in companions for pid in one.pids],
            )
            agents.append(agent)

    def _wait_for_entry(self, agents: Sequence[HostProcess]) -> None:
        """Wait until every command is inside its host."""
        # A command that enters after its host was killed by a fault would survive the fault.
        expires = min(self._stop_at, time.monotonic() + _ENTRY_SECONDS)
        while time.monotonic() < min(expires, self._stop_at) and not all(
            agent.has_entered for agent in agents
        ):
            time.sleep(_TICK_SECONDS)

    def _watch(self, agents: list[HostProcess], sampler: UtilizationSampler) -> None:
        while sum(not agent.poll() for agent in agents):
            now = time.monotonic()
            if any(agent.exit_code for agent in agents):
                self._stop_at = min(self._stop_at, now + self._settle_seconds)
            if now >= self._stop_at and self._kill_at == float("inf"):
                self._kill_at = now + _GRACE_SECONDS
                for agent in agents:
                    agent.terminate()
            if now >= self._kill_at:
                self._forced += [agent.host for agent in agents if not agent.poll()]
                return
            self._injector.poll()
            sampler.poll()
            self._lab.network.require_delays()
            time.sleep(_TICK_SECONDS)

    def _end(self, agents: list[HostProcess]) -> None:
        # Faults end first: the thread of `slow` must not signal numbers that are free again.
        self._injector.end()
        for agent in agents:
            if not agent.poll():
                agent.kill()
        for agent in agents:
            agent.close()

    @contextmanager
    def _handling_signals(self) -> Iterator[None]:
        """Let Ctrl-C and SIGTERM stop the hosts instead of this process."""
        # Python sets signal handlers in the main thread only.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals += 1
        if self._signals == 1:
            self._first_signal = number
            self._stop_at = 0.0
        else:
            self._kill_at = 0.0

    def _outcome(
        self,
        agents: Sequence[HostProcess],
        seconds: float,
        before: Mapping[str, LinkTraffic],
        remarks: Sequence[str],
    ) -> LabOutcome:
        after = self._lab.network.traffic()
        return LabOutcome(
            exit_codes={agent.host: agent.exit_code or 0 for agent in agents},
            seconds=seconds,
            traffic={name: traffic.since(before[name]) for name, traffic in after.items()},
            output={agent.host: agent.lines for agent in agents},
            events=self._injector.events,
            remarks=remarks,
            ledger_bytes=self._ledger_bytes(agents),
            forced=self._forced,
            signal=self._first_signal,
        )

    def _ledger_bytes(self, agents: Sequence[HostProcess]) -> float | None:
        """Return the bytes that all ranks sent, by the ledger of rank 0, as all ranks send the same."""
        match = find_metrics_line(agents[0].lines)
        if match is None:
            return None
        metrics, world_size = match
        path = self._lab.inside(agents[0].host, self._directory / metrics)
        sent_bytes = read_ledger_bytes(path) if path.exists() else None
        return None if sent_bytes is None else sent_bytes * world_size


def find_metrics_line(lines: Sequence[str]) -> tuple[str, int] | None:
    """Return the metrics file and the number of ranks from the output of a job; None without them."""
    match = _METRICS_LINE.search("\n".join(lines))
    return None if match is None else (match["path"], int(match["world"]))


def read_ledger_bytes(metrics: Path) -> float | None:
    """Return the bytes that one rank sent in the last run of a metrics file; None if it has no ledger."""
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    ledgers = [record["rows"] for record in records if record.get("event") == "communication"]
    return sum(row["sent_bytes"] for row in ledgers[-1].values()) if ledgers else None


class Lab:
    """A cluster on this machine.

        with Lab(hosts=4, links=Links(rate="100mbit", latency="2ms")) as lab:
            outcome = lab.run(["paceline", "train", "recipes/digits.toml", "-n", "4"])

    Args:
        hosts: their number (they are named h0, h1, ...), or their names.
        links: the link of every host.
        host_links: links of single hosts, in place of `links`.
        racks: host names by rack; each rack has a switch, and a core switch connects them.
        uplinks: the link of every rack to the core.
        cores: cores that each host can use, also a fraction; 0 divides the cores of this process evenly.
        disk: size of a disk that each host has for itself at `lab.disk`, such as "64mb"; empty for none.
        seed: seed of jitter and loss.
    Raises:
        LabError: on entering, if the lab was entered before, the system does not allow it, or a tool is
            missing.
        RecipeError: a name or quantity is wrong.
    """

    def __init__(
        self,
        hosts: int | Sequence[str] = 2,
        links: Links | None = None,
        *,
        host_links: Mapping[str, Links] | None = None,
        racks: Mapping[str, Sequence[str]] | None = None,
        uplinks: Links | None = None,
        cores: float = 0.0,
        disk: str = "",
        seed: int = 0,
    ) -> None:
        self.topology = build_topology(
            hosts, links or Links(), host_links=host_links, racks=racks, uplinks=uplinks
        )
        self._cores, self._disk_bytes, self._seed = cores, parse_size_bytes(disk), seed
        self.spaces: dict[str, HostNamespaces] = {}
        self.companions: dict[str, list[HostCompanion]] = {host.name: [] for host in self.topology.hosts}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        check_tools()
        if self.spaces:
            raise LabError(
                "this lab was entered before",
                next_step="create another Lab, or use this one inside its with block",
            )
        with ExitStack() as stack:
            self._build(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def _build(self, stack: ExitStack) -> None:
        self.record = create_lab_record()
        stack.callback(remove_lab_folder, self.record.folder)
        names = [host.name for host in self.topology.hosts]
        self.shares, self.groups = assign_cores(self.record.name, names, self._cores)
        if self.groups is not None:
            stack.callback(self.groups.remove)
            # Saved before the first process starts, so that `clean` finds them if this process is killed.
            self.record.cgroups = [str(folder) for folder in self.groups.folders]
            self.record.save()
        self._start_spaces(names, stack)
        self.network = LabNetwork(self.topology, self.spaces, self._seed)
        # Before the build, which can fail after it has started forwarders.
        stack.callback(self.network.end)
        self.network.build()
        self._save_record()

    def _start_spaces(self, names: list[str], stack: ExitStack) -> None:
        """Start the namespaces of the switch and of all hosts."""
        # The switch comes first, because without root the hosts join its user namespace.
        disk = (str(self.record.folder / "disk"), str(self._disk_bytes)) if self._disk_bytes else ()
        if disk:
            Path(disk[0]).mkdir()
        self.spaces[SWITCH] = start_first_namespaces(self.record.name, SWITCH)
        stack.callback(self.spaces[SWITCH].end)
        join = str(self.spaces[SWITCH].first) if "user" in self.spaces[SWITCH].kinds else "root"
        table = self.record.folder / "hosts"
        table.write_text(
            "127.0.0.1 localhost\n"
            + "".join(f"{h.address} {h.name}\n::ffff:{h.address} {h.name}\n" for h in self.topology.hosts)
        )
        for name in names:
            self.spaces[name] = start_namespaces(self.record.name, name, join, str(table), disk)
            stack.callback(self.spaces[name].end)

    def _save_record(self) -> None:
        """Save what other processes need to enter the hosts or to remove the lab."""
        self.record.first = {name: ProcessIdentity.of(space.first) for name, space in self.spaces.items()}
        self.record.holders = {
            name: ProcessIdentity.of(space.holder.pid) for name, space in self.spaces.items()
        }
        self.record.addresses = {host.name: host.address for host in self.topology.hosts}
        self.record.kinds = self.spaces[SWITCH].kinds
        self.record.save()

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts, in the order of their node ranks."""
        return tuple(host.name for host in self.topology.hosts)

    @property
    def disk(self) -> Path:
        """The mount point of the disk of each host: the same path on every host, with different content.

        Raises:
            RecipeError: the lab has no disks.
        """
        if not self._disk_bytes:
            raise RecipeError(
                "the hosts of this lab have no disks", next_step='create it with Lab(disk="64mb")'
            )
        return self.record.folder / "disk"

    def inside(self, host: str, path: Path | str) -> Path:
        """Return the path with which this process can open a file of a host."""
        return Path(f"/proc/{self.spaces[host].first}/root") / Path(path).absolute().relative_to("/")

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs a command in a host, for `subprocess`."""
        share = self.shares[self.hosts.index(host)]
        return self.spaces[host].command(argv, cores=share.cores, cgroups=self.group(host))

    def group(self, host: str) -> list[str]:
        """Return the control groups for the processes of a host."""
        return [] if self.groups is None else [f for f in self.record.cgroups if f.endswith(f"/{host}")]

    def start_companions(self, argv: Sequence[str]) -> None:
        """Start a process in every host that stays there until the lab ends, as `HostCompanion` describes.

        Faults that hit a whole host hit it as well.

        Raises:
            LabError: it does not start.
        """
        environ = {**process_environment(), **_HOST_VARIABLES}
        for host, share in zip(self.hosts, self.shares, strict=True):
            companion = HostCompanion(
                self.spaces[host],
                argv,
                share.environ(environ),
                cores=share.cores,
                cgroups=self.group(host),
            )
            self._stack.callback(companion.end)
            self.companions[host].append(companion)

    def run(
        self,
        command: Sequence[str],
        *,
        faults: FaultPlan | None = None,
        on_line: LineCallback = lambda line: None,
        environ: Mapping[str, str] | None = None,
        directory: Path | None = None,
        deadline_seconds: float | None = None,
        settle_seconds: float = 60.0,
        event_log: Path | None = None,
    ) -> LabOutcome:
        """Run a command on all hosts and wait for its end.

        A `paceline` command that starts a job is one job of all hosts; its `-n` counts the processes of all.
        Ctrl-C and SIGTERM stop the commands, a second signal kills them.

        Args:
            faults: the faults that are injected meanwhile.
            on_line: receives each line of output of each host as "[h0] ..." with its newline.
            environ: the environment of the commands; None for that of this process.
            directory: the working directory of the commands; None for that of this process.
            deadline_seconds: time limit for the whole run; None for no limit.
            settle_seconds: how long the other hosts can go on after the command of one host has failed.
            event_log: file for the log of the fault plan, one JSON object per line.
        Raises:
            RecipeError: the processes cannot be divided evenly, or the plan has an unknown host.
        """
        job = LabJob(self, command, faults, on_line, environ, directory or Path.cwd(), settle_seconds)
        return job.run(deadline_seconds, event_log)

    def remarks(self) -> list[str]:
        """Return lines about links and cores, for the summary."""
        delays = self.network.delays
        lines = ["rates: token buckets (tc tbf), counted in Ethernet frames"]
        lines += [f"latency: {delays.method}"] if delays is not None else []
        cores = describe_core_shares(self.shares, len(os.sched_getaffinity(0)), self.groups is not None)
        control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
        lines[0] += f"; TCP congestion control of the machine: {control}"
        user = "; in a user namespace, without root" if "user" in self.spaces[SWITCH].kinds else ""
        return [*lines, f"cores: {cores}{user}"]
