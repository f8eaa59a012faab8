"""What runs the runs of a study: jobs in worker slots of this and other machines, or the user's function."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.errors import DataError
from paceline.job.cpu_count import num_cores
from paceline.launch.fork_client import fork_server
from paceline.observe.file_writing import publish_json
from paceline.observe.sinks import METRICS, rotated_files
from paceline.recipe.recipe import Recipe, to_toml
from paceline.report.run_files import CHECKPOINTS, RECIPE, is_run_folder
from paceline.report.run_reader import read_run
from paceline.search.objective import Objective
from paceline.search.study_log import Lease
from paceline.search.study_runner import TrialRun
from paceline.search.trial_rank import REQUEST, RESOLVED, RESULT
from paceline.search.worker_slots import RunEnd, RunSlot, SlotRequest, WorkerSlot

PRELOADED = (
    "paceline.cli.main",
    "paceline.cli.tune",
    "paceline.search.trial_rank",
    "paceline.session.train_rank",
)
_LOOK, _TEST, _VALUE = "look", "test", "value.json"


class JobExecutor:
    """Runs that are jobs.

    Args:
        study: folder of the study.
        objective: reads the results.
        slots: by number; others may join. Number 0 is one of this machine.
        sharing: number of jobs among which the cores are divided. It does not depend on the number of slots,
            since the number of threads can change the bits of a sum.
    """

    def __init__(
        self, study: Path, objective: Objective, slots: MutableMapping[int, RunSlot], sharing: int
    ) -> None:
        self._study, self._objective, self._sharing = study.resolve(), objective, sharing
        self.slots = slots

    @classmethod
    @contextmanager
    def open(
        cls, study: Path, objective: Objective, workers: int, sharing: int, environ: Mapping[str, str]
    ) -> Iterator[JobExecutor]:
        """Start a fork server, unless the variables name one, and the slots; end them with the block."""
        with fork_server(PRELOADED, environ) as variables:
            environ = {**environ, **variables}
            slots: dict[int, RunSlot] = {number: WorkerSlot(environ) for number in range(max(1, workers))}
            try:
                yield cls(study, objective, slots, sharing)
            finally:
                for slot in slots.values():
                    slot.close()

    def execute(self, run: TrialRun, lease: Lease) -> RunEnd:
        """Run until a rung or the end, from the last checkpoint if there is one."""
        folder = run.folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        resumes = is_run_folder(folder) and any((folder / CHECKPOINTS).glob("step-*/manifest.json"))
        if not resumes:  # an attempt without a checkpoint starts again, so its measurements would count twice
            for path in (folder / METRICS, folder / RECIPE, *rotated_files(folder / METRICS)):
                path.unlink(missing_ok=True)
        request = {"work": "train", "until": lease.until, "resumes": resumes}
        return self._send(folder, run.recipe, run.processes, request, lease)

    def is_complete(self, run: TrialRun) -> bool:
        """Return whether the run has been trained to its end."""
        return is_complete_run(run.folder)

    def rung_value(self, run: TrialRun) -> tuple[int, float]:
        """Return the step and the metric of the last evaluation."""
        return self._objective.curve(read_run(run.folder))[-1]

    def value(self, run: TrialRun) -> float | None:
        """Return the objective of a complete run."""
        return self._objective.value(read_run(run.folder))

    def look(self, recipe: Recipe, processes: int) -> Mapping[str, Any]:
        """Return the number of training samples and the metrics of the task; measured once in a study.

        Raises:
            DataError: the task cannot be built or evaluated.
        """
        result = self._study / _LOOK / RESULT
        if not result.exists():
            self._work("look", recipe, processes, {})
        return json.loads(result.read_text(encoding="utf-8"))

    def test(self, run: TrialRun) -> Mapping[str, float]:
        """Return the scores of a run on the test set."""
        self._work("test", run.recipe, 1, {"run": str(run.folder.resolve())})
        return json.loads((self._study / _TEST / RESULT).read_text(encoding="utf-8"))

    def stop(self) -> None:
        """Let runs save and end."""
        for slot in [*self.slots.values()]:
            slot.stop()

    def _work(self, work: str, recipe: Recipe, processes: int, more: Mapping[str, Any]) -> None:
        folder = self._study / work
        folder.mkdir(parents=True, exist_ok=True)
        request = {"work": work, "until": None, "resumes": False, **more}
        end, reason = self._send(folder, recipe, processes, request, Lease(-1, work, None))
        if end != "done":
            raise DataError(
                f"the {'task cannot be evaluated' if work == _LOOK else 'test set cannot be evaluated'}:"
                f" {reason or end}",
                where=str(folder / "logs"),
                next_step="train the recipe alone first: paceline train RECIPE",
            )

    def _send(
        self, folder: Path, recipe: Recipe, processes: int, request: Mapping[str, Any], lease: Lease
    ) -> RunEnd:
        threads = recipe.runtime.threads or max(1, num_cores() // (self._sharing * processes))
        (folder / RESOLVED).write_text(to_toml(recipe), encoding="utf-8")
        publish_json(folder / REQUEST, {**request, "threads": threads})
        slot = self.slots.get(lease.slot)
        if slot is None:
            return "lost", "its worker has left"
        return slot.run(
            SlotRequest(
                folder=str(folder),
                processes=processes,
                threads=threads,
                servers=recipe.strategy.servers if request["work"] == "train" else 0,
                pauses=request["until"] is not None,
                grace_seconds=recipe.checkpoint.grace_seconds,
                stuck_seconds=recipe.runtime.deadline_seconds,
            ),
            lease.number,
        )


def is_complete_run(folder: Path) -> bool:
    """Return whether a folder holds a run that was trained to its end."""
    return is_run_folder(folder) and read_run(folder).status == "finished"


def find_complete_runs(study: Path, identity_of_text: Callable[[str], str]) -> dict[str, Path]:
    """Return the complete runs of a study's folder, or of a folder of studies, by identity.

    Args:
        identity_of_text: of a resolved recipe.
    Raises:
        DataError: the folder does not exist.
    """
    if not study.is_dir():
        raise DataError(
            f"the folder '{study}' does not exist", where="--reuse", next_step="name a study's folder"
        )
    paths = sorted([*study.glob(f"*/{RESOLVED}"), *study.glob(f"*/*/{RESOLVED}")])
    complete = [path for path in paths if is_complete_run(path.parent)]
    return {identity_of_text(path.read_text(encoding="utf-8")): path.parent for path in complete}


class FunctionExecutor:
    """Runs that are calls of the user's function in threads of this process.

    Args:
        function: `function(recipe) -> float`; an exception is a trial that failed.
    """

    def __init__(self, function: Callable[[Recipe], float]) -> None:
        self._function = function

    def execute(self, run: TrialRun, lease: Lease) -> RunEnd:
        """Call the function, and write its value to the folder of the run."""
        # in a thread, whose future keeps whatever the user's function raises
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(lambda: float(self._function(run.recipe)))
        error = call.exception()
        if error is not None:
            return "failed", traceback.format_exception_only(error)[-1].strip()
        value = call.result()
        publish_json(run.folder / _VALUE, {"value": value if math.isfinite(value) else None})
        (run.folder / RESOLVED).write_text(to_toml(run.recipe), encoding="utf-8")
        return "done", ""

    def is_complete(self, run: TrialRun) -> bool:
        """Return whether the function has returned a value."""
        return (run.folder / _VALUE).exists()

    def rung_value(self, run: TrialRun) -> tuple[int, float]:
        """Return nothing: a function has no rungs, which the plan has checked."""
        raise AssertionError("a function has no rungs")

    def value(self, run: TrialRun) -> float | None:
        """Return the value; NaN if it was not finite."""
        value = json.loads((run.folder / _VALUE).read_text(encoding="utf-8"))["value"]
        return math.nan if value is None else value

    def test(self, run: TrialRun) -> Mapping[str, float]:
        """Return nothing: the function has its own data."""
        return {}

    def stop(self) -> None:
        """Do nothing: a call of Python cannot be interrupted."""
