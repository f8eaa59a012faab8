"""One rank of a trial, of the look at the task before the first one, or of the test after the last one.

The folder says what to do: `trial.json` is written by the coordinator, `resolved.toml` is the recipe of the
trial, and the study's `task.pkl`, if there is one, has the function that builds the task. The run itself is
that of `paceline train`, in the same folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.job.cluster import Cluster
from paceline.job.launcher_reports import LEAVING
from paceline.launch.outcome import STOPPED_EXIT_CODE
from paceline.launch.worker_guard import guard
from paceline.observe.file_writing import publish_json
from paceline.recipe.recipe import Recipe
from paceline.recipe.recipe_loading import load_recipe

REQUEST, RESULT, RESOLVED, TASK = "trial.json", "result.json", "resolved.toml", "task.pkl"


def run_trial(cluster: Cluster, folder: Path) -> None:
    """Do what the folder says, as one rank, and exit."""
    with guard(cluster):
        request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
        recipe = load_recipe(folder / RESOLVED)
        recipe = recipe.replace(runtime=recipe.runtime.replace(threads=request["threads"]))
        code = _WORK[request["work"]](recipe, _read_task(folder.parent), folder, request)
        cluster.enter_phase(LEAVING, recipe.runtime.setup_deadline_seconds)
    sys.exit(code)


def save_task(study: Path, task: Any) -> None:
    """Write a function that builds the task, and the search path of modules, to the folder of a study."""
    import cloudpickle

    (study / TASK).write_bytes(cloudpickle.dumps((sys.path, cloudpickle.dumps(task))))


def _read_task(study: Path) -> Any:
    path = study / TASK
    if not path.exists():
        return None
    import cloudpickle

    # before unpickling the function: modules of the caller's script are imported by name
    sys.path[:], pickled = cloudpickle.loads(path.read_bytes())
    return cloudpickle.loads(pickled)


def _train(recipe: Recipe, task: Any, folder: Path, request: Mapping[str, Any]) -> int:
    from rich.console import Console

    from paceline.session.train_rank import train

    result = train(
        recipe.replace(run_dir=str(folder)),
        task,
        resume=folder if request["resumes"] else None,
        console=Console(),
        until=request["until"],
    )
    return STOPPED_EXIT_CODE if result.stopped else 0


def _look_at_task(recipe: Recipe, task: Any, folder: Path, request: Mapping[str, Any]) -> int:
    """Write the number of training samples and the names of metrics, of an evaluation of a few samples."""
    from paceline.session.evaluation import evaluate
    from paceline.session.start_rank import join

    evaluation = recipe.evaluate.replace(max_samples=recipe.evaluate.batch)
    with join(recipe.replace(evaluate=evaluation), task) as session:
        measured = evaluate(session)
        if session.is_first:
            metrics = ["loss", *(measured.metrics if measured is not None else ())]
            publish_json(folder / RESULT, {"samples": len(session.task.data), "metrics": metrics})
    return 0


def _test(recipe: Recipe, task: Any, folder: Path, request: Mapping[str, Any]) -> int:
    """Evaluate the weights of a run on the test set, and write the scores."""
    from paceline.session.saved_run import open_run

    with open_run(request["run"], task, cluster=Cluster.from_env()) as opened:
        source = opened.task.test
        scores: dict[str, Any] = {}
        if source is not None:
            result = opened.evaluate(source)
            scores = {"loss": result.loss, **result.metrics}
        if opened.session.is_first:
            publish_json(folder / RESULT, scores)
    return 0


_WORK: Mapping[str, Callable[[Recipe, Any, Path, Mapping[str, Any]], int]] = {
    "train": _train,
    "look": _look_at_task,
    "test": _test,
}
