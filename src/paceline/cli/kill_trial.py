"""One run in which a worker is killed half-way: does the job go on, and if not, how long until it has again?

The run is started as a user would start it, and watched by what it writes. The last rank is killed: no
server, and not the one that writes the records. A job that ends is resumed from its newest checkpoint.
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
from paceline.report.run_files import METRICS
from paceline.studies.comparison_trials import KillRecovery, read_recovery

if TYPE_CHECKING:
    from paceline.recipe.recipe import Recipe

_POLL_SECONDS = 0.02
_DEADLINE_SECONDS = 900.0
_CHECKPOINTS = 10
"""How many a run saves, that says nothing of it."""


def kill_and_recover(run: StudyRun, steps: int, folder: Path) -> KillRecovery | None:
    """Train a run again in a folder of its own, kill a worker after half of its steps, and measure.

    Args:
        run: of which it is a copy.
        steps: that it takes.
        folder: where this was done before, that is the answer.
    Returns:
        None: the run was over before it could be killed.
    """
    found = read_recovery(folder)
    if found is not None or run.recipe is None:
        return found
    folder.mkdir(parents=True, exist_ok=True)
    (folder / METRICS).unlink(missing_ok=True)
    recipe = _with_checkpoints(run.recipe, steps)
    copy = replace(run, folder=folder, recipe=recipe)
    path = write_resolved_recipe(copy, recipe)
    words = ["train", str(path), "--set", f'run_dir="{folder.resolve() / "run"}"']
    found = _measure(copy, words, str(path), folder / "run", steps // 2)
    if found is not None:
        found.keep(folder)
    return found


def _with_checkpoints(recipe: Recipe, steps: int) -> Recipe:
    if recipe.checkpoint.every_steps:
        return recipe
    every = max(1, steps // _CHECKPOINTS)
    return recipe.replace(checkpoint=recipe.checkpoint.replace(every_steps=every))


def _measure(run: StudyRun, words: Sequence[str], mark: str, made: Path, after: int) -> KillRecovery | None:
    assert run.recipe is not None, "it can run"
    victim, records = common_options.processes_for(run.recipe, None, 1) - 1, _MetricsTail(made / METRICS)
    with _RunningJob(run_command(run, words), run.folder / "first.log") as job:
        if records.first(lambda record: _is_step(record, after), job) is None:
            return None
        killed_at = _kill(victim, mark)
        if killed_at is None:
            return None
        records.first(lambda record: False, job)  # a step that was under way may end after the kill
        code = job.poll()
    return (
        _recovery_by_resume(run, made, records, killed_at)
        if code
        else _recovery_without_restart(records, killed_at)
    )


def _recovery_without_restart(records: _MetricsTail, killed_at: float) -> KillRecovery | None:
    """Of a job that has ended well; None: its last step was done before the kill."""
    done = max(int(r["step"]) for r in records.known if _is_step(r, 0) and r["time"] <= killed_at)
    beyond = [r for r in records.known if _is_new_step(r, done, killed_at)]
    return KillRecovery("goes on", beyond[0]["time"] - killed_at, 0) if beyond else None


def _recovery_by_resume(run: StudyRun, made: Path, records: _MetricsTail, killed_at: float) -> KillRecovery:
    """Of a job that has ended badly, or was ended as it hung."""
    done = max(int(record["step"]) for record in records.known if _is_step(record, 0))
    with _RunningJob(run_command(run, ["train", "--resume", str(made)]), run.folder / "resumed.log") as job:
        next_step = records.first(lambda record: _is_new_step(record, done, killed_at), job)
    if next_step is None:
        return KillRecovery("lost", None, 0)
    starts = [r for r in records.known if r["event"] == "run"]
    again = done + 1 - int(starts[-1]["step"])
    return KillRecovery("resumed", next_step["time"] - killed_at, max(0, again))


def _is_new_step(record: Mapping[str, Any], done: int, killed_at: float) -> bool:
    return _is_step(record, done + 1) and bool(record["time"] > killed_at)


def _is_step(record: Mapping[str, Any], at_least: int) -> bool:
    return record["event"] == "step" and int(record["step"]) >= at_least


def _kill(rank: int, mark: str) -> float | None:
    """SIGKILL to a rank of the job whose command names `mark`; when that was, or None: there is none."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            variables = (process / "environ").read_bytes().split(b"\0")
            if mark.encode() in words and f"RANK={rank}".encode() in variables:
                before = time.time()  # afterwards the job may have gone on for a while
                os.kill(int(process.name), signal.SIGKILL)
                return before
    return None


class _RunningJob:
    """A job while it is looked at; it ends with the block."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command, self._log = command, log

    def __enter__(self) -> subprocess.Popen[bytes]:
        environ = {**process_environment(), "PACELINE_FORK_SERVER": "none"}  # processes show whose they are
        with self._log.open("wb") as stream:
            self._job = subprocess.Popen(
                self._command, stdout=stream, stderr=stream, env=environ, start_new_session=True
            )
        return self._job

    def __exit__(self, *error: object) -> None:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # the second one does not save
            if self._job.poll() is None:
                self._job.send_signal(number)
                with suppress(subprocess.TimeoutExpired):
                    self._job.wait(20)


class _MetricsTail:
    """What a run has written so far."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self.known: list[Mapping[str, Any]] = []

    def first(
        self, wanted: Callable[[Mapping[str, Any]], bool], job: subprocess.Popen[bytes]
    ) -> Mapping[str, Any] | None:
        """The first record that is wanted, once it is there; None: the job ended without it."""
        expires = time.monotonic() + _DEADLINE_SECONDS
        looked = 0
        while time.monotonic() < expires:
            ended = job.poll() is not None
            self.look()
            for record in self.known[looked:]:
                if wanted(record):
                    return record
            looked = len(self.known)
            if ended:
                return None
            time.sleep(_POLL_SECONDS)
        return None

    def look(self) -> None:
        """Read what is new."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as stream:
            stream.seek(self._read)
            text = stream.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            with suppress(ValueError):  # the end of a job may cut a line short
                self.known.append(json.loads(line))
