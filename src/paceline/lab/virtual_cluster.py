"""The lab: hosts, links and faults on one machine, for as long as a `with` block lasts.

Invariant: when the block is left, however, no process, namespace, link, mount, control group or file of the
lab is left. If this process is killed, processes, namespaces, links and mounts go at once; `clean` removes
the rest.

One command on all hosts of a lab, from its start to the end of the last host.

Invariant: when `run` returns or raises, no process is left in any host, every fault is healed, and the signal
handlers are what they were.
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
from paceline.lab.host_commands import HostProcess, LineCallback, spread_over_hosts
from paceline.lab.host_cores import assign_cores, describe_core_shares
from paceline.lab.lab_outcome import LabOutcome
from paceline.lab.lab_registry import ProcessIdentity, create_lab_record, remove_lab_folder
from paceline.lab.namespaces import HostNamespaces, check_tools, start_first_namespaces, start_namespaces
from paceline.lab.network import LabNetwork, render_delay_counts
from paceline.lab.topology import HOST_DEVICE, SWITCH, Links, build_topology, parse_size_bytes
from paceline.lab.utilization import LinkTraffic, UtilizationSampler, describe_bottleneck

_TICK_SECONDS = 0.01
_GRACE_SECONDS = 15.0
_ENTRY_SECONDS = 30.0
_FAULTS_VARIABLE = "PACELINE_FAULTS"
_METRICS_LINE = re.compile(
    r"^metrics: +(?P<path>\S.*metrics\.jsonl)\nresume: .* -n (?P<world>\d+)", re.MULTILINE
)


class LabJob:
    """See `Lab.run` for the arguments."""

    def __init__(
        self,
        lab: Lab,
        command: Sequence[str],
        faults: FaultPlan | None,
        say: LineCallback,
        environ: Mapping[str, str] | None,
        directory: Path,
        settle_seconds: float,
    ) -> None:
        self._lab, self._say, self._directory = lab, say, directory
        self._settle_seconds = settle_seconds
        self._signals = 0
        self._stop_at = self._kill_at = float("inf")
        self._forced: list[str] = []
        self._injector = self._prepare(faults or FaultPlan())
        self._environ = dict(process_environment() if environ is None else environ)
        self._environ |= {"GLOO_SOCKET_IFNAME": HOST_DEVICE, "PACELINE_TOKEN": secrets.token_hex(32)}
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
                f"the fault plan names {', '.join(invalid_targets)}",
                next_step=f"there are {', '.join(lab.hosts)}",
            )
        disk = lab.disk if any(fault.kind == "disk_full" for fault in plan.faults) else None
        folder = lab.record.folder / f"faults-{len(list(lab.record.folder.glob('faults-*')))}"
        return FaultInjector(plan, folder, lab.spaces, lab.network, disk, self._directory)

    def run(self, deadline_seconds: float | None, event_log: Path | None) -> LabOutcome:
        """Start, watch, end, count."""
        lab = self._lab
        lab.record.save()
        before, delayed = lab.network.traffic(), lab.network.delay_counts()
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
        kept = render_delay_counts({k: n - delayed.get(k, 0) for k, n in lab.network.delay_counts().items()})
        remarks = [*lab.remarks(), *([kept] if kept else []), describe_bottleneck(sampler.samples)]
        return self._outcome(agents, time.monotonic() - began, before, remarks)

    def _start(self, agents: list[HostProcess]) -> None:
        lab = self._lab
        for host, argv, share in zip(lab.hosts, self._commands, lab.shares, strict=True):
            agent = HostProcess(
                lab.spaces[host],
                argv,
                share.environ(self._environ),
                self._say,
                cores=share.cores,
                cgroups=lab.group(host),
                directory=self._directory,
            )
            agents.append(agent)

    def _wait_for_entry(self, agents: Sequence[HostProcess]) -> None:
        """Until every command is in its host: one that comes after its host was killed would go on."""
        expires = min(self._stop_at, time.monotonic() + _ENTRY_SECONDS)
        while time.monotonic() < min(expires, self._stop_at) and not all(one.has_entered for one in agents):
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
            time.sleep(_TICK_SECONDS)

    def _end(self, agents: list[HostProcess]) -> None:
        self._injector.end()
        for agent in agents:
            if not agent.poll():
                agent.kill()
        for agent in agents:
            agent.close()

    @contextmanager
    def _handling_signals(self) -> Iterator[None]:
        """Let Ctrl-C and SIGTERM stop the hosts instead of this process."""
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
        )

    def _ledger_bytes(self, agents: Sequence[HostProcess]) -> float | None:
        """What all ranks sent, by the ledger of rank 0 (they send alike): it prints where its metrics are."""
        said = _METRICS_LINE.search("\n".join(agents[0].lines))
        if said is None:
            return None
        path = self._lab.inside(agents[0].host, self._directory / said["path"])
        sent = read_ledger_bytes(path) if path.exists() else None
        return None if sent is None else sent * int(said["world"])


def read_ledger_bytes(metrics: Path) -> float | None:
    """Bytes that one rank sent in the last run of a metrics file, by its ledger; None: it says nothing."""
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    books = [record["rows"] for record in records if record.get("event") == "communication"]
    return sum(row["sent_bytes"] for row in books[-1].values()) if books else None


class Lab:
    """A cluster on this machine.

        with Lab(hosts=4, links=Links(rate="100mbit", latency="2ms")) as lab:
            outcome = lab.run(["paceline", "train", "recipes/digits.toml", "-n", "4"])

    Args:
        hosts: how many (h0, h1, ...), or their names.
        links: of every host.
        host_links: of single hosts, in place of `links`.
        racks: rack name to host names: a switch for each rack, and a core between them.
        uplinks: of every rack to the core.
        cores: that each host may use, also a part of one; 0: all hosts share this process's cores evenly.
        disk: size of a disk of each host's own, for example "64mb", at `lab.disk`; "": none.
        seed: of jitter and loss.
    Raises:
        LabError: on entering: it was entered before, the system does not allow it, or a tool is missing.
        RecipeError: names or quantities are wrong.
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
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        check_tools()
        if self.spaces:
            raise LabError(
                "this lab has been entered before", next_step="make a new one, or use this one inside"
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
            self.record.cgroups = [str(folder) for folder in self.groups.folders]
            self.record.save()
        self._start_spaces(names, stack)
        self.network = LabNetwork(self.topology, self.spaces, self._seed)
        stack.callback(self.network.end)
        self.network.build()
        self._note()

    def _start_spaces(self, names: list[str], stack: ExitStack) -> None:
        """The switch first: without root, the hosts join its user namespace."""
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

    def _note(self) -> None:
        """Write down what another process needs in order to look inside."""
        self.record.first = {name: ProcessIdentity.of(space.first) for name, space in self.spaces.items()}
        self.record.holders = {
            name: ProcessIdentity.of(space.holder.pid) for name, space in self.spaces.items()
        }
        self.record.addresses = {host.name: host.address for host in self.topology.hosts}
        self.record.kinds = self.spaces[SWITCH].kinds
        self.record.save()

    @property
    def hosts(self) -> tuple[str, ...]:
        """Their names, in the order of their node ranks."""
        return tuple(host.name for host in self.topology.hosts)

    @property
    def disk(self) -> Path:
        """Where each host's own disk is mounted; the same path on every host, another content.

        Raises:
            RecipeError: the lab was made without.
        """
        if not self._disk_bytes:
            raise RecipeError(
                "the hosts of this lab have no disks of their own", next_step='Lab(disk="64mb")'
            )
        return self.record.folder / "disk"

    def inside(self, host: str, path: Path | str) -> Path:
        """A file of a host, as this process can open it."""
        return Path(f"/proc/{self.spaces[host].first}/root") / Path(path).absolute().relative_to("/")

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """The argument vector that runs a command in a host, for `subprocess`."""
        place = self.hosts.index(host)
        return self.spaces[host].command(argv, cores=self.shares[place].cores, cgroups=self.group(host))

    def group(self, host: str) -> list[str]:
        """The control groups of a host's processes."""
        return [] if self.groups is None else [f for f in self.record.cgroups if f.endswith(f"/{host}")]

    def run(
        self,
        command: Sequence[str],
        *,
        faults: FaultPlan | None = None,
        say: LineCallback = lambda line: None,
        environ: Mapping[str, str] | None = None,
        directory: Path | None = None,
        deadline_seconds: float | None = None,
        settle_seconds: float = 60.0,
        event_log: Path | None = None,
    ) -> LabOutcome:
        """Run a command on all hosts and wait for its end; for `paceline` jobs see `paceline.lab.host_commands`.

        Ctrl-C and SIGTERM ask the hosts to stop, a second one ends them.

        Args:
            faults: what goes wrong meanwhile.
            say: is given every line of every host, "[h0] ..." with its end.
            environ: the hosts' environment; None: that of this process.
            directory: where the commands run; None: the working directory.
            deadline_seconds: for the whole; None: as long as it takes.
            settle_seconds: how long the others may run on after one host's command has failed.
            event_log: file for the events of the fault plan, one JSON object a line.
        Raises:
            RecipeError: the processes cannot be shared out, or the plan names a host that is not there.
        """
        job = LabJob(self, command, faults, say, environ, directory or Path.cwd(), settle_seconds)
        return job.run(deadline_seconds, event_log)

    def remarks(self) -> list[str]:
        """How links and cores are made, for the summary."""
        delays = self.network.delays
        lines = ["rates: token buckets (tc tbf), counted in Ethernet frames"]
        lines += [f"latency: {delays.means}"] if delays is not None else []
        cores = describe_core_shares(self.shares, len(os.sched_getaffinity(0)), self.groups is not None)
        control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
        lines[0] += f"; TCP's congestion control is the machine's, {control}"
        user = "; in a user namespace, without root" if "user" in self.spaces[SWITCH].kinds else ""
        return [*lines, f"cores: {cores}{user}"]
