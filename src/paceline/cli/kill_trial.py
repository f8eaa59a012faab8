"""A trial run in which a worker is killed half-way: the time until training continues.

The run is started as a user would start it, and observed through the metrics that it writes. The last rank
is killed, which is no server and not the rank that writes the metrics. A job that ends is resumed from its
newest checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli import common_options
from paceline.cli.study_runs import StudyRun, run_command, write_resolved_recipe
from paceline.job.cluster import process_environment
from paceline.observe.sinks import METRICS
from paceline.studies.comparison_trials import KillRecovery, read_recovery

if TYPE_CHECKING:
    from paceline.recipe.recipe import Recipe

_POLL_SECONDS = 0.02
_DEADLINE_SECONDS = 900.0
_CHECKPOINTS = 10
"""Number of checkpoints of a run whose recipe does not set an interval."""


def kill_and_recover(run: StudyRun, steps: int, folder: Path) -> KillRecovery | None:
    """Train a run again in a folder of its own, kill a worker after half of its steps, and measure.

    Args:
        run: the completed run, which the trial repeats.
        steps: its number of steps.
        folder: folder of the trial; if it holds a result already, that is returned.
    Returns:
        The recovery, or None if the run ended before its worker could be killed.
    """
    recovery = read_recovery(folder)
    if recovery is not None or run.recipe is None:
        return recovery
    folder.mkdir(parents=True, exist_ok=True)
    (folder / METRICS).unlink(missing_ok=True)
    recipe = _with_checkpoints(run.recipe, steps)
    copy = replace(run, folder=folder, recipe=recipe)
    path = write_resolved_recipe(copy, recipe)
    words = ["train", str(path), "--set", f'run_dir="{folder.resolve() / "run"}"']
    recovery = _measure(copy, words, str(path), folder / "run", steps // 2)
    if recovery is not None:
        recovery.save(folder)
    return recovery


def _with_checkpoints(recipe: Recipe, steps: int) -> Recipe:
    if recipe.checkpoint.every_steps:
        return recipe
    every = max(1, steps // _CHECKPOINTS)
    return recipe.replace(checkpoint=recipe.checkpoint.replace(every_steps=every))


def _measure(
    run: StudyRun, words: Sequence[str], mark: str, run_dir: Path, after: int
) -> KillRecovery | None:
    assert run.recipe is not None, "the caller has checked it"
    # The last rank, because servers come first and rank 0 writes the records.
    victim, records = common_options.processes_for(run.recipe, None, 1) - 1, _MetricsTail(run_dir / METRICS)
    with _RunningJob(run_command(run, words), run.folder / "first.log") as job:
        if records.first(lambda record: _is_step(record, after), job) is None:
            return None
        killed_at = _kill(victim, mark)
        if killed_at is None:
            return None
        records.first(lambda record: False, job)  # a step that was under way may end after the kill
        code = job.poll()
    return (
        _recovery_by_resume(run, run_dir, records, killed_at)
        if code
        else _recovery_without_restart(records, killed_at)
    )


def _recovery_without_restart(records: _MetricsTail, killed_at: float) -> KillRecovery | None:
    """Return the recovery of a job that ended well; None if it was done before the kill."""
    done = max(int(r["step"]) for r in records.known if _is_step(r, 0) and r["time"] <= killed_at)
    beyond = [r for r in records.known if _is_new_step(r, done, killed_at)]
    return KillRecovery("goes on", beyond[0]["time"] - killed_at, 0) if beyond else None


def _recovery_by_resume(
    run: StudyRun, run_dir: Path, records: _MetricsTail, killed_at: float
) -> KillRecovery:
    """Resume a job that failed, or that hung and was stopped, and measure until its next new step."""
    done = max(int(record["step"]) for record in records.known if _is_step(record, 0))
    with _RunningJob(
        run_command(run, ["train", "--resume", str(run_dir)]), run.folder / "resumed.log"
    ) as job:
        next_step = records.first(lambda record: _is_new_step(record, done, killed_at), job)
    if next_step is None:
        return KillRecovery("lost", None, 0)
    # The newest start is that of the resumed job, at the step of its checkpoint.
    starts = [r for r in records.known if r["event"] == "run"]
    again = done + 1 - int(starts[-1]["step"])
    return KillRecovery("resumed", next_step["time"] - killed_at, max(0, again))


def _is_new_step(record: Mapping[str, Any], done: int, killed_at: float) -> bool:
    return _is_step(record, done + 1) and bool(record["time"] > killed_at)


def _is_step(record: Mapping[str, Any], at_least: int) -> bool:
    return record["event"] == "step" and int(record["step"]) >= at_least


def _kill(rank: int, mark: str) -> float | None:
    """Kill a rank of the job whose command line has `mark`; returns the time, None if there is none."""
    # Only the launcher knows its workers, so they are found by what the system shows of them.
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            variables = (process / "environ").read_bytes().split(b"\0")
            if mark.encode() in words and f"RANK={rank}".encode() in variables:
                before = time.time()  # not after it: the job could have continued by then
                os.kill(int(process.name), signal.SIGKILL)
                return before
    return None


class _RunningJob:
    """A job in a process of its own, which is stopped at the end of the block."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command, self._log = command, log

    def __enter__(self) -> subprocess.Popen[bytes]:
        # A forked worker would show the command line of its server.
        environ = {**process_environment(), "PACELINE_FORK_SERVER": "none"}
        with self._log.open("wb") as stream:
            self._job = subprocess.Popen(
                self._command, stdout=stream, stderr=stream, env=environ, start_new_session=True
            )
        return self._job

    def __exit__(self, *error: object) -> None:
        # The second SIGTERM ends it without saving.
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if self._job.poll() is None:
                self._job.send_signal(number)
                with suppress(subprocess.TimeoutExpired):
                    self._job.wait(20)


class _MetricsTail:
    """The metrics that a run has written so far."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.known: list[Mapping[str, Any]] = []

    def first(
        self, wanted: Callable[[Mapping[str, Any]], bool], job: subprocess.Popen[bytes]
    ) -> Mapping[str, Any] | None:
        """Wait for the first record that satisfies `wanted`; None if the job ends without it."""
        expires = time.monotonic() + _DEADLINE_SECONDS
        num_seen = 0
        while time.monotonic() < expires:
            ended = job.poll() is not None  # before reading: what it wrote until its end is read below
            self.read()
            for record in self.known[num_seen:]:
                if wanted(record):
                    return record
            num_seen = len(self.known)
            if ended:
                return None
            time.sleep(_POLL_SECONDS)
        return None

    def read(self) -> None:
        """Read the complete lines that are new."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as stream:
            stream.seek(self._offset)
            text = stream.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            with suppress(ValueError):  # a job that is killed can leave half a line
                self.known.append(json.loads(line))
