"""`paceline chaos`: one fault at a time in a lab, and what a job survives, as a certificate.

Every cell is a kind of fault and the role of what it hits. A job that ends is resumed as a user would do it.
The certificate holds what was run, cell by cell: recovery time, steps lost, samples, and the hash of the last
state beside that of a run without a fault. What the lab cannot do is listed with its reason.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import common_options
from paceline.cli.console import print_json, print_plain
from paceline.errors import RecipeError

if TYPE_CHECKING:
    from paceline.lab.fault_plan import FaultPlan
    from paceline.lab.virtual_cluster import Lab

FAULTS = ("kill", "stop", "delay", "drop", "disk-full", "partition", "clock-jump")
ROLES = ("worker", "rank0", "stage", "server", "launcher")
_STRATEGIES: Mapping[str, str] = {"stage": "pipeline=2", "server": "servers=1 sync=server"}
_FAULT_SECONDS = 4.0
_DEADLINE_SECONDS = 20.0
_RUN_SECONDS, _SETTLE_SECONDS = 240.0, 60.0
_DISK = "256mb"
_MAX_RESUMES = 2
_WITHOUT_FORK_SERVER = {"PACELINE_FORK_SERVER": "none"}  # else a rank shows the variables of its server


@dataclass(frozen=True)
class ChaosCell:
    """One fault on one role, and what came of it.

    Args:
        fault, role: of `FAULTS` and `ROLES`.
        strategy: that the job ran with; empty: that of the recipe.
        refusal: why it was not run; empty if it was.
        outcome: "continued": the job ended well; "resumed": it ended, and continued by `--resume`; "lost": it
            did not.
        recovery_seconds: the longest pause between two new steps, without the usual time of a step.
        steps_lost: steps that were taken again.
        num_samples, expected_samples: samples of all steps, each step once, and those of a run without fault.
        sha256, expected_sha256: hashes of the last state.
        seconds: of the cell.
        message: the end of the output of a job that was lost.
    """

    fault: str
    role: str
    strategy: str = ""
    refusal: str = ""
    outcome: str = ""
    recovery_seconds: float = 0.0
    steps_lost: int = 0
    num_samples: int = 0
    expected_samples: int = 0
    sha256: str = ""
    expected_sha256: str = ""
    seconds: float = 0.0
    message: str = ""

    def is_survived(self, *, same_bits: bool) -> bool:
        """Return whether the run ended where it would have ended; of a cell that was not run as well."""
        has_samples = self.num_samples == self.expected_samples
        has_bits = not same_bits or self.sha256 == self.expected_sha256
        return bool(self.refusal) or (self.outcome != "lost" and has_samples and has_bits)


@dataclass(frozen=True)
class RunRecord:
    """The steps of a run as its metrics have them.

    Args:
        times: when each step was first recorded, in seconds since the epoch.
        num_repeated: records of steps beyond the first of each.
        samples: samples of each recorded step.
        resumed_at: step of the newest checkpoint from which the run was resumed.
        sha256: hash of the last state; empty if the run has not come there.
    """

    times: tuple[float, ...] = ()
    num_repeated: int = 0
    samples: Mapping[int, int] = field(default_factory=dict)
    resumed_at: int = 0
    sha256: str = ""

    def count_samples(self, undisturbed: RunRecord) -> int:
        """Return the samples of all steps, each step once.

        The record of a step can be lost although a checkpoint has the step; then its samples count as well.
        """
        saved = {step: n for step, n in undisturbed.samples.items() if step < self.resumed_at}
        return sum({**saved, **self.samples}.values())

    @property
    def longest_pause(self) -> float:
        """The longest time between two new steps, without the usual one."""
        gaps = [after - before for before, after in zip(self.times, self.times[1:], strict=False)]
        return max(0.0, max(gaps) - median(gaps)) if gaps else 0.0


def read_run_record(records: Sequence[Mapping[str, Any]], num_steps: int) -> RunRecord:
    """Return what the records of `metrics.jsonl` say about the steps of a run; pure."""
    first: dict[int, Mapping[str, Any]] = {}
    num_records, resumed_at, sha256 = 0, 0, ""
    for record in records:
        if record.get("event") == "step":
            num_records += 1
            first.setdefault(int(record["step"]), record)
        elif record.get("event") == "resume":
            resumed_at = int(record["step"])
        elif record.get("event") == "hash" and record["step"] == num_steps - 1:
            sha256 = str(record["sha256"])
    steps = [first[step] for step in sorted(first)]
    return RunRecord(
        tuple(sorted(float(record["time"]) for record in steps)),
        num_records - len(steps),
        {step: int(record["num_samples"]) for step, record in first.items()},
        resumed_at,
        sha256,
    )


@dataclass
class ChaosTrials:
    """The trials of one recipe: the runs without a fault, and the cells.

    Args:
        recipe: path of its file.
        settings: further options of `paceline train`.
        processes, hosts: of the job and of the lab.
        steps: of each run; the fault comes half-way.
        folder: gets the run folders.
    """

    recipe: Path
    settings: tuple[str, ...]
    processes: int
    hosts: int
    steps: int
    folder: Path
    _undisturbed: dict[tuple[str, int], RunRecord] = field(default_factory=dict)

    def run(self, fault: str, role: str) -> ChaosCell:
        """Run one cell."""
        from paceline.lab.virtual_cluster import Lab

        strategy = _STRATEGIES.get(role, "")
        refusal = self._refusal(fault, role)
        if refusal:
            return ChaosCell(fault, role, strategy, refusal)
        on_disk = fault == "disk-full"
        hosts = 1 if on_disk else self.hosts
        expected = self._run_undisturbed(strategy, hosts)
        began = time.monotonic()
        with Lab(hosts, disk=_DISK if on_disk else "") as lab:
            run_dir = (lab.disk if on_disk else self.folder / f"{fault}-{role}") / "run"
            outcome, message = self._run_in(lab, run_dir, strategy, self._plan(lab.hosts, fault, role))
            record = self._record(lab, run_dir)
        return ChaosCell(
            fault,
            role,
            strategy,
            outcome=outcome,
            recovery_seconds=record.longest_pause,
            steps_lost=record.num_repeated,
            num_samples=record.count_samples(expected),
            expected_samples=sum(expected.samples.values()),
            sha256=record.sha256,
            expected_sha256=expected.sha256,
            seconds=time.monotonic() - began,
            message=message,
        )

    def _refusal(self, fault: str, role: str) -> str:
        if fault == "clock-jump":
            return "the hosts of a lab share the clock of this machine"
        if fault in ("delay", "drop", "partition") and self.hosts < 2:
            return "it needs a link between two hosts: --hosts 2"
        if fault == "disk-full" and role != "rank0":
            return "only rank 0 writes to the disk of the run folder"
        if fault in ("delay", "drop", "partition") and role == "launcher":
            return "a launcher has the link of its host: see worker"
        return ""

    def _plan(self, hosts: Sequence[str], fault: str, role: str) -> FaultPlan:
        from paceline.lab.fault_plan import FaultPlan

        last = self.processes - 1
        first, other = hosts[0], hosts[-1]
        host, process = (first, "rank0") if role in ("rank0", "server") else (other, f"rank{last}")
        process = "launcher" if role == "launcher" else process
        # A server takes no optimizer steps that a fault could wait for on its host alone.
        trigger: dict[str, Any] = {"step": self.steps // 2} if role != "server" else {"at": 8.0}
        lasts: dict[str, Any] = {"seconds": _FAULT_SECONDS, **trigger}
        plan = FaultPlan()
        if fault == "kill":
            return plan.kill(host, process=process, **trigger)
        if fault == "stop":
            return plan.stop(host, process=process, **lasts)
        if fault == "delay":
            return plan.delay(host, "200ms", **lasts)
        if fault == "drop":
            return plan.drop(host, "20%", **lasts)
        if fault == "disk-full":
            return plan.disk_full(host, **lasts)
        others = [name for name in hosts if name != host]
        return plan.partition([host], others, **lasts)

    def _command(self, run_dir: Path, strategy: str) -> list[str]:
        options = [*self.settings, "--strategy", strategy] if strategy else [*self.settings]
        values = {
            "steps": self.steps,
            "epochs": "",
            "hash_every": self.steps,
            "run_dir": json.dumps(str(run_dir)),
            "checkpoint.every_steps": max(1, self.steps // 8),
            "runtime.deadline_seconds": _DEADLINE_SECONDS,
        }
        options += [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        return ["paceline", "train", str(self.recipe), "-n", str(self.processes), *options]

    def _run_undisturbed(self, strategy: str, hosts: int) -> RunRecord:
        from paceline.lab.virtual_cluster import Lab

        if (strategy, hosts) not in self._undisturbed:
            with Lab(hosts) as lab:
                name = f"undisturbed-{hosts}-{strategy.partition('=')[0] or 'recipe'}"
                run_dir = self.folder / name / "run"
                outcome, message = self._run_in(lab, run_dir, strategy, None)
                if outcome != "continued":
                    raise RecipeError(
                        f"the recipe does not train without a fault, with strategy '{strategy}': {message}",
                        next_step="choose other --roles, -n or --hosts",
                    )
                self._undisturbed[strategy, hosts] = self._record(lab, run_dir)
        return self._undisturbed[strategy, hosts]

    def _run_in(self, lab: Lab, run_dir: Path, strategy: str, plan: FaultPlan | None) -> tuple[str, str]:
        """Run the job, and resume it if it ends; returns the outcome, and the end of its output if lost."""
        from paceline.job.cluster import process_environment

        environ = {**process_environment(), **_WITHOUT_FORK_SERVER}
        command, words = self._command(run_dir, strategy), ["--resume", str(run_dir)]
        for attempt in range(1 + (_MAX_RESUMES if plan is not None else 0)):
            ended = lab.run(
                [*command, *(words if attempt else [])],
                faults=None if attempt else plan,
                environ=environ,
                deadline_seconds=_RUN_SECONDS,
                settle_seconds=_SETTLE_SECONDS,
            )
            # A host without its only process has failed, while those of the others continue to the end.
            if self._record(lab, run_dir).sha256:
                return ("resumed" if attempt else "continued"), ""
        lines = [line for host in lab.hosts for line in ended.output[host]]
        return "lost", "\n".join(lines[-12:])

    def _record(self, lab: Lab, run_dir: Path) -> RunRecord:
        path = lab.inside(lab.hosts[0], run_dir / "metrics.jsonl")
        if not path.exists():
            return RunRecord()
        return read_run_record([*_read_lines(path)], self.steps)


def _read_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue  # a process that was killed can leave half a line


def chaos(
    recipe: common_options.RecipeArgument,
    processes: Annotated[int, typer.Option("-n", "--processes", min=2, help="Processes of the job.")] = 2,
    hosts: Annotated[int, typer.Option("--hosts", min=1, help="Hosts of the lab.")] = 2,
    settings: common_options.Settings = None,
    faults: Annotated[str, typer.Option("--faults", help="Kinds of faults, with commas.")] = ",".join(FAULTS),
    roles: Annotated[str, typer.Option("--roles", help="What they hit, with commas.")] = ",".join(ROLES),
    steps: Annotated[int, typer.Option("--steps", min=8, help="Steps of each run.")] = 40,
    to: Annotated[Path, typer.Option("--output", "-o", help="File of the certificate.")] = Path("chaos.json"),
    as_json: common_options.AsJson = False,
) -> None:
    """Train RECIPE in a lab with one fault at a time, and write what was survived to a certificate."""
    import tempfile

    chosen = [_choose(faults, FAULTS, "--faults"), _choose(roles, ROLES, "--roles")]
    if processes % hosts:
        raise RecipeError(f"-n {processes} cannot be divided among {hosts} hosts", next_step="change one")
    loaded = common_options.read_recipe(recipe, settings, None)
    words = tuple(word for setting in settings or () for word in ("--set", setting))
    with tempfile.TemporaryDirectory(prefix="paceline-chaos-") as folder:
        trials = ChaosTrials(recipe.resolve(), words, processes, hosts, steps, Path(folder))
        cells = []
        for fault in chosen[0]:
            for role in chosen[1]:
                cells.append(trials.run(fault, role))
                if not as_json:
                    print_plain(_line_of(cells[-1], same_bits=loaded.reproducible))
    certificate = _certificate(trials, cells, same_bits=loaded.reproducible)
    to.write_text(json.dumps(certificate, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print_json(certificate)
    else:
        print_plain(f"{certificate['survived']} of {certificate['run']} cells survived; certificate: {to}")
    raise typer.Exit(certificate["survived"] < certificate["run"])


def _choose(text: str, known: Sequence[str], option: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise RecipeError(
            f"{option} {text}: expected some of {','.join(known)}", next_step=f"{option} {known[0]}"
        )
    return names


def _certificate(trials: ChaosTrials, cells: Sequence[ChaosCell], *, same_bits: bool) -> dict[str, Any]:
    from paceline._version import VERSION

    ran = [cell for cell in cells if not cell.refusal]
    return {
        "paceline": VERSION,
        "recipe": trials.recipe.read_text(encoding="utf-8"),
        "settings": list(trials.settings),
        "processes": trials.processes,
        "hosts": trials.hosts,
        "steps": trials.steps,
        "reproducible": same_bits,
        "run": len(ran),
        "survived": sum(cell.is_survived(same_bits=same_bits) for cell in ran),
        "cells": [{**asdict(cell), "survived": cell.is_survived(same_bits=same_bits)} for cell in cells],
    }


def _line_of(cell: ChaosCell, *, same_bits: bool) -> str:
    name = f"{cell.fault:<10} {cell.role:<9}"
    if cell.refusal:
        return f"{name} not run: {cell.refusal}"
    bits = "the same hash" if cell.sha256 == cell.expected_sha256 else "another hash"
    verdict = "" if cell.is_survived(same_bits=same_bits) else "  NOT SURVIVED"
    return (
        f"{name} {cell.outcome:<9} recovery {cell.recovery_seconds:5.1f} s  steps lost {cell.steps_lost:3}"
        f"  samples {cell.num_samples} of {cell.expected_samples}  {bits}{verdict}"
    )
