"""The lab: hosts, links and faults on one machine, for as long as a `with` block lasts.

Invariant: when the block is left, however, no process, namespace, link, mount, control group or file of the
lab is left. If this process is killed, processes, namespaces, links and mounts go at once; `clean` removes
the rest.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.errors import LabError, RecipeError
from paceline.lab.agents import Say
from paceline.lab.cores import assign, describe
from paceline.lab.faults import FaultPlan
from paceline.lab.job import Job
from paceline.lab.namespaces import Space, check_tools, start_first_space, start_space
from paceline.lab.network import Network
from paceline.lab.state import Process, new_record, remove_folder
from paceline.lab.summary import Outcome
from paceline.lab.topology import SWITCH, Links, build_topology
from paceline.lab.units import size_bytes


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
        self._cores, self._disk_bytes, self._seed = cores, size_bytes(disk), seed
        self.spaces: dict[str, Space] = {}
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
        self.record = new_record()
        stack.callback(remove_folder, self.record.folder)
        names = [host.name for host in self.topology.hosts]
        self.shares, self.groups = assign(self.record.name, names, self._cores)
        if self.groups is not None:
            stack.callback(self.groups.remove)
            self.record.cgroups = [str(folder) for folder in self.groups.folders]
            self.record.save()
        self._start_spaces(names, stack)
        self.network = Network(self.topology, self.spaces, self._seed)
        stack.callback(self.network.end)
        self.network.build()
        self._note()

    def _start_spaces(self, names: list[str], stack: ExitStack) -> None:
        """The switch first: without root, the hosts join its user namespace."""
        disk = (str(self.record.folder / "disk"), str(self._disk_bytes)) if self._disk_bytes else ()
        if disk:
            Path(disk[0]).mkdir()
        self.spaces[SWITCH] = start_first_space(self.record.name, SWITCH)
        stack.callback(self.spaces[SWITCH].end)
        join = str(self.spaces[SWITCH].first) if "user" in self.spaces[SWITCH].kinds else "root"
        table = self.record.folder / "hosts"
        table.write_text(
            "127.0.0.1 localhost\n"
            + "".join(f"{h.address} {h.name}\n::ffff:{h.address} {h.name}\n" for h in self.topology.hosts)
        )
        for name in names:
            self.spaces[name] = start_space(self.record.name, name, join, str(table), disk)
            stack.callback(self.spaces[name].end)

    def _note(self) -> None:
        """Write down what another process needs in order to look inside."""
        self.record.first = {name: Process.of(space.first) for name, space in self.spaces.items()}
        self.record.holders = {name: Process.of(space.holder.pid) for name, space in self.spaces.items()}
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
        say: Say = lambda line: None,
        environ: Mapping[str, str] | None = None,
        directory: Path | None = None,
        deadline_seconds: float | None = None,
        settle_seconds: float = 60.0,
        event_log: Path | None = None,
    ) -> Outcome:
        """Run a command on all hosts and wait for its end; for `paceline` jobs see `paceline.lab.command`.

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
        job = Job(self, command, faults, say, environ, directory or Path.cwd(), settle_seconds)
        return job.run(deadline_seconds, event_log)

    def remarks(self) -> list[str]:
        """How links and cores are made, for the summary."""
        delays = self.network.delays
        lines = ["rates: token buckets (tc tbf), counted in Ethernet frames"]
        lines += [f"latency: {delays.means}"] if delays is not None else []
        cores = describe(self.shares, len(os.sched_getaffinity(0)), self.groups is not None)
        control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
        lines[0] += f"; TCP's congestion control is the machine's, {control}"
        user = "; in a user namespace, without root" if "user" in self.spaces[SWITCH].kinds else ""
        return [*lines, f"cores: {cores}{user}"]
