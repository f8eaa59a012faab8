"""One command on all hosts of a lab, from its start to the end of the last host.

Invariant: when `run` returns or raises, no process is left in any host, every fault is healed, and the signal
handlers are what they were.
"""

from __future__ import annotations

import json
import re
import secrets
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cluster import process_environment
from paceline.errors import RecipeError
from paceline.lab.agents import Agent, Say
from paceline.lab.command import spread
from paceline.lab.counters import Traffic
from paceline.lab.delays import render_counts
from paceline.lab.faults import FaultPlan
from paceline.lab.inject import Injector
from paceline.lab.load import Sampler, verdict
from paceline.lab.summary import Outcome
from paceline.lab.topology import HOST_DEVICE, SWITCH

if TYPE_CHECKING:
    from paceline.lab.lab import Lab

_TICK_SECONDS = 0.01
_GRACE_SECONDS = 15.0
_ENTRY_SECONDS = 30.0
_FAULTS = "PACELINE_FAULTS"
_METRICS = re.compile(r"^metrics: +(?P<path>\S.*metrics\.jsonl)\nresume: .* -n (?P<world>\d+)", re.MULTILINE)


class Job:
    """See `Lab.run` for the arguments."""

    def __init__(
        self,
        lab: Lab,
        command: Sequence[str],
        faults: FaultPlan | None,
        say: Say,
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
            self._environ[_FAULTS] = str(self._injector.folder)
        addresses = [host.address for host in lab.topology.hosts]
        self._commands = spread(command, addresses)
        lab.record.command = " ".join(command)

    def _prepare(self, plan: FaultPlan) -> Injector:
        lab = self._lab
        misplaced = plan.misplaced(lab.hosts, [rack.name for rack in lab.topology.racks])
        if misplaced:
            raise RecipeError(
                f"the fault plan names {', '.join(misplaced)}", next_step=f"there are {', '.join(lab.hosts)}"
            )
        disk = lab.disk if any(fault.kind == "disk_full" for fault in plan.faults) else None
        folder = lab.record.folder / f"faults-{len(list(lab.record.folder.glob('faults-*')))}"
        return Injector(plan, folder, lab.spaces, lab.network, disk, self._directory)

    def run(self, deadline_seconds: float | None, event_log: Path | None) -> Outcome:
        """Start, watch, end, count."""
        lab = self._lab
        lab.record.save()
        before, delayed = lab.network.traffic(), lab.network.delay_counts()
        sampler = Sampler(lab.spaces[SWITCH].first, lab.network.cables)
        self._injector.begin()
        began = time.monotonic()
        if deadline_seconds is not None:
            self._stop_at = began + deadline_seconds
        with self._signals_noted():
            agents: list[Agent] = []
            try:
                self._start(agents)
                self._await_entry(agents)
                self._injector.start_clock()
                self._watch(agents, sampler)
            finally:
                self._end(agents)
        if event_log is not None:
            self._injector.save(event_log)
        kept = render_counts({k: n - delayed.get(k, 0) for k, n in lab.network.delay_counts().items()})
        remarks = [*lab.remarks(), *([kept] if kept else []), verdict(sampler.samples)]
        return self._outcome(agents, time.monotonic() - began, before, remarks)

    def _start(self, agents: list[Agent]) -> None:
        lab = self._lab
        for host, argv, share in zip(lab.hosts, self._commands, lab.shares, strict=True):
            agent = Agent(
                lab.spaces[host],
                argv,
                share.environ(self._environ),
                self._say,
                cores=share.cores,
                cgroups=lab.group(host),
                directory=self._directory,
            )
            agents.append(agent)

    def _await_entry(self, agents: Sequence[Agent]) -> None:
        """Until every command is in its host: one that comes after its host was killed would go on."""
        expires = min(self._stop_at, time.monotonic() + _ENTRY_SECONDS)
        while time.monotonic() < min(expires, self._stop_at) and not all(one.has_entered for one in agents):
            time.sleep(_TICK_SECONDS)

    def _watch(self, agents: list[Agent], sampler: Sampler) -> None:
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

    def _end(self, agents: list[Agent]) -> None:
        self._injector.end()
        for agent in agents:
            if not agent.poll():
                agent.kill()
        for agent in agents:
            agent.close()

    @contextmanager
    def _signals_noted(self) -> Iterator[None]:
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
        self, agents: Sequence[Agent], seconds: float, before: Mapping[str, Traffic], remarks: Sequence[str]
    ) -> Outcome:
        after = self._lab.network.traffic()
        return Outcome(
            exit_codes={agent.host: agent.exit_code or 0 for agent in agents},
            seconds=seconds,
            traffic={name: traffic.since(before[name]) for name, traffic in after.items()},
            output={agent.host: agent.lines for agent in agents},
            events=self._injector.events,
            remarks=remarks,
            ledger_bytes=self._ledger_bytes(agents),
            forced=self._forced,
        )

    def _ledger_bytes(self, agents: Sequence[Agent]) -> float | None:
        """What all ranks sent, by the ledger of rank 0 (they send alike): it prints where its metrics are."""
        said = _METRICS.search("\n".join(agents[0].lines))
        if said is None:
            return None
        path = self._lab.inside(agents[0].host, self._directory / said["path"])
        sent = ledger_bytes(path) if path.exists() else None
        return None if sent is None else sent * int(said["world"])


def ledger_bytes(metrics: Path) -> float | None:
    """Bytes that one rank sent in the last run of a metrics file, by its ledger; None: it says nothing."""
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    books = [record["rows"] for record in records if record.get("event") == "communication"]
    return sum(row["sent_bytes"] for row in books[-1].values()) if books else None
