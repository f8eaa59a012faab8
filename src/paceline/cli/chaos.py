"""`paceline chaos`: one fault at a time in a lab, and what a job survives, as a certificate.

Every cell is a kind of fault and the role of what it hits. A job that ends is resumed as a user would do it.
The certificate holds what was run, cell by cell: the outcome beside the expected one, which follows from the
table of recoveries (`recipe.recovery`) and docs/howto/survive.md; recovery time, steps lost, samples, and the
hash of the last state beside that of a run without a fault. What the lab cannot do is listed with its reason.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import common_options
from paceline.cli.console import print_json, print_plain
from paceline.errors import RecipeError, StrategyError

if TYPE_CHECKING:
    from paceline.lab.fault_plan import FaultPlan
    from paceline.lab.virtual_cluster import Lab
    from paceline.recipe.recipe import Recipe

FAULTS = ("kill", "stop", "delay", "drop", "disk-full", "partition", "clock-jump")
ROLES = ("worker", "rank0", "stage", "server", "launcher", "launcher0")
_STRATEGIES: Mapping[str, str] = {"stage": "pipeline=2", "server": "servers=1 sync=server"}
OUTCOMES = ("continued", "restarted", "resumed", "lost")
"""What comes of a job with a fault, the best first; see `ChaosCell.outcome`."""
NOT_RUN = "not run"
_MAX_FAULT_SECONDS = 8.0  # 10 s later a stopped process, and 12 s later a blocked link, count as lost
_RUN_SECONDS, _SETTLE_SECONDS = 240.0, 60.0
_DISK = "256mb"
_MAX_RESUMES = 2
_FORK_SERVER = "from paceline.launch.fork_client import serve_until_input_ends; serve_until_input_ends()"


@dataclass(frozen=True)
class ChaosCell:
    """One fault on one role, and what came of it.

    Args:
        fault, role: of `FAULTS` and `ROLES`.
        strategy: that the job ran with; empty: that of the recipe.
        refusal: why it was not run; empty if it was.
        expected: of `OUTCOMES`, or `NOT_RUN`; see `expected_outcome`.
        outcome: "continued": by the processes that were left; "restarted": the launcher has started all of
            them again from the newest checkpoint; "resumed": the job ended, and continued by `--resume`;
            "lost": it did not, or the fault has hit nothing.
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
    expected: str = NOT_RUN
    outcome: str = NOT_RUN
    recovery_seconds: float = 0.0
    steps_lost: int = 0
    num_samples: int = 0
    expected_samples: int = 0
    sha256: str = ""
    expected_sha256: str = ""
    seconds: float = 0.0
    message: str = ""

    def is_survived(self, *, same_bits: bool) -> bool:
        """Return whether the run ended where it would have ended, in no worse way than expected.

        A cell that was not run counts as survived.
        """
        if self.refusal:
            return True
        has_samples = self.num_samples == self.expected_samples
        has_bits = not same_bits or self.sha256 == self.expected_sha256
        return self.outcome != "lost" and not self.is_worse_than_expected and has_samples and has_bits

    @property
    def is_worse_than_expected(self) -> bool:
        """Return whether the outcome comes after the expected one in `OUTCOMES`."""
        return not self.refusal and OUTCOMES.index(self.outcome) > OUTCOMES.index(self.expected)


def expected_outcome(
    recipe: Recipe, fault: str, role: str, *, processes: int, hosts: int, fault_seconds: float
) -> str:
    """Return the outcome that docs/howto/survive.md states for a cell; pure.

    Args:
        recipe: with the strategy of the cell.
        processes, hosts, fault_seconds: of `ChaosTrials`.
    """
    if fault == "disk-full":
        return "continued" if recipe.checkpoint.full_disk_seconds > fault_seconds else "resumed"
    from paceline.recipe.recovery import keeps_copies, recovery_of

    if fault != "kill":
        return "continued"  # nothing is lost: all other faults pass before anything counts as lost
    recovery, processes_per_host = recovery_of(recipe), processes // hosts
    num_lost = processes_per_host if role.startswith("launcher") else 1
    num_workers = processes - recipe.strategy.servers
    if recipe.strategy.servers and role in ("worker", "launcher"):
        continues = num_lost < num_workers
    else:
        has_whole_state = num_lost == 1 or not keeps_copies(recipe)
        is_enough = processes - num_lost >= recipe.elastic.min_processes
        continues = recovery.kind == "in process" and has_whole_state and is_enough
    is_only_launcher = hosts == 1 and role.startswith("launcher")
    if continues and not is_only_launcher:
        return "continued"
    # On several nodes nothing is started again, and neither is anything without its launcher.
    restarts = hosts == 1 and not is_only_launcher and recovery.kind != "none"
    return "restarted" if restarts and recipe.elastic.max_restarts else "resumed"


@dataclass(frozen=True)
class RunRecord:
    """The steps of a run as its metrics have them.

    Args:
        times: when each step was first recorded, in seconds since the epoch.
        num_repeated: records of steps beyond the first of each.
        samples: samples of each recorded step.
        resumed_at: step of the newest checkpoint from which the run was resumed; 0: it was not.
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
        fault_seconds: how long each fault lasts, except a kill.
        deadline_seconds: `runtime.deadline_seconds` of each run.
        folder: gets the run folders.
        stack: closes the labs.
    """

    recipe: Path
    settings: tuple[str, ...]
    processes: int
    hosts: int
    steps: int
    fault_seconds: float
    deadline_seconds: float
    folder: Path
    stack: ExitStack
    _undisturbed: dict[tuple[str, int], RunRecord] = field(default_factory=dict)
    _labs: dict[int, Lab] = field(default_factory=dict)

    def run(self, fault: str, role: str) -> ChaosCell:
        """Run one cell."""
        strategy = _STRATEGIES.get(role, "")
        refusal, recipe = self._refusal(fault, role), None
        if not refusal:
            refusal, recipe = self._read_recipe(strategy)
        if recipe is None:
            return ChaosCell(fault, role, strategy, refusal)
        on_disk = fault == "disk-full"
        hosts = 1 if on_disk else self.hosts
        undisturbed = self._run_undisturbed(strategy, hosts)
        began = time.monotonic()
        lab = self._lab(hosts)
        run_dir = (lab.disk if on_disk else self.folder / f"{fault}-{role}") / "run"
        outcome, message = self._run_in(lab, run_dir, strategy, self._plan(lab.hosts, fault, role))
        record = self._record(lab, run_dir)
        return ChaosCell(
            fault,
            role,
            strategy,
            expected=expected_outcome(
                recipe,
                fault,
                role,
                processes=self.processes,
                hosts=hosts,
                fault_seconds=self.fault_seconds,
            ),
            outcome=outcome,
            recovery_seconds=record.longest_pause,
            steps_lost=record.num_repeated,
            num_samples=record.count_samples(undisturbed),
            expected_samples=sum(undisturbed.samples.values()),
            sha256=record.sha256,
            expected_sha256=undisturbed.sha256,
            seconds=time.monotonic() - began,
            message=message,
        )

    def _lab(self, hosts: int) -> Lab:
        """Return the lab with a number of hosts, in which a fork server makes the imports of all jobs."""
        from paceline.lab.virtual_cluster import Lab

        if hosts not in self._labs:
            lab = self.stack.enter_context(Lab(hosts, disk=_DISK))
            lab.start_companions([sys.executable, "-c", _FORK_SERVER])
            self._labs[hosts] = lab
        return self._labs[hosts]

    def _read_recipe(self, strategy: str) -> tuple[str, Recipe | None]:
        """Return the recipe with the strategy of a cell; why there is none, if the table refuses it."""
        settings = list(self.settings[1::2])
        try:
            return "", common_options.read_recipe(self.recipe, settings, strategy or None)
        except (RecipeError, StrategyError) as error:
            return f"the recipe is refused under '{strategy}': {error.what}", None

    def _refusal(self, fault: str, role: str) -> str:
        if fault == "clock-jump":
            return "the hosts of a lab share the clock of this machine"
        if fault in ("delay", "drop", "partition") and self.hosts < 2:
            return "it needs a link between two hosts: --hosts 2"
        if fault == "disk-full" and role != "rank0":
            return "only rank 0 writes to the disk of the run folder"
        if fault in ("delay", "drop", "partition") and role.startswith("launcher"):
            return "a launcher has the link of its host: see worker"
        if role == "launcher0" and self.hosts < 2:
            return "there is only one launcher: see launcher"
        return ""

    def _plan(self, hosts: Sequence[str], fault: str, role: str) -> FaultPlan:
        from paceline.lab.fault_plan import FaultPlan

        last = self.processes - 1
        first, other = hosts[0], hosts[-1]
        host, process = other, f"rank{last}"
        if role in ("rank0", "server", "launcher0"):
            host, process = first, "rank0"
        process = "launcher" if role.startswith("launcher") else process
        trigger: dict[str, Any] = {"step": self.steps // 2}
        lasts: dict[str, Any] = {"seconds": self.fault_seconds, **trigger}
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
            "runtime.deadline_seconds": self.deadline_seconds,
        }
        options += [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        return ["paceline", "train", str(self.recipe), "-n", str(self.processes), *options]

    def _run_undisturbed(self, strategy: str, hosts: int) -> RunRecord:
        if (strategy, hosts) not in self._undisturbed:
            lab = self._lab(hosts)
            run_dir = self.folder / f"undisturbed-{hosts}-{strategy.partition('=')[0] or 'recipe'}" / "run"
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
        command, words = self._command(run_dir, strategy), ["--resume", str(run_dir)]
        for attempt in range(1 + (_MAX_RESUMES if plan is not None else 0)):
            ended = lab.run(
                [*command, *(words if attempt else [])],
                faults=None if attempt else plan,
                deadline_seconds=_RUN_SECONDS,
                settle_seconds=_SETTLE_SECONDS,
            )
            if ended.signal:
                raise typer.Exit(128 + ended.signal)
            if plan is not None and not attempt and not has_hit(ended.events):
                return "lost", "the job has ended before the fault, or the fault has hit nothing"
            record = self._record(lab, run_dir)
            # A host without its only process has failed, while those of the others continue to the end.
            if record.sha256:
                return ("resumed" if attempt else "restarted" if record.resumed_at else "continued"), ""
        lines = [line for host in lab.hosts for line in ended.output[host]]
        return "lost", "\n".join(lines[-12:])

    def _record(self, lab: Lab, run_dir: Path) -> RunRecord:
        path = lab.inside(lab.hosts[0], run_dir / "metrics.jsonl")
        if not path.exists():
            return RunRecord()
        return read_run_record([*_read_lines(path)], self.steps)


def has_hit(events: Sequence[Mapping[str, object]]) -> bool:
    """Return whether the log of a plan with one fault shows that the fault has hit something; pure."""
    return any(event.get("was_running", True) for event in events)


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
    fault_seconds: Annotated[
        float,
        typer.Option("--fault-seconds", min=0.1, max=_MAX_FAULT_SECONDS, help="How long a fault lasts."),
    ] = 4.0,
    deadline: Annotated[
        float, typer.Option("--deadline", min=1.0, help="runtime.deadline_seconds of each run.")
    ] = 20.0,
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
    with tempfile.TemporaryDirectory(prefix="paceline-chaos-") as folder, ExitStack() as stack:
        trials = ChaosTrials(
            recipe.resolve(), words, processes, hosts, steps, fault_seconds, deadline, Path(folder), stack
        )
        cells: list[ChaosCell] = []
        certificate: dict[str, Any] = {}
        for fault in chosen[0]:
            for role in chosen[1]:
                cells.append(trials.run(fault, role))
                if not as_json:
                    print_plain(_line_of(cells[-1], same_bits=loaded.reproducible))
                # After every cell, so that a command that is stopped leaves what was run.
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
        "fault_seconds": trials.fault_seconds,
        "deadline_seconds": trials.deadline_seconds,
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
    verdict = "" if cell.outcome == cell.expected else f"  (expected: {cell.expected})"
    verdict += "" if cell.is_survived(same_bits=same_bits) else "  NOT SURVIVED"
    return (
        f"{name} {cell.outcome:<9} recovery {cell.recovery_seconds:5.1f} s  steps lost {cell.steps_lost:3}"
        f"  samples {cell.num_samples} of {cell.expected_samples}  {bits}{verdict}"
    )
