"""The sinks `tensorboard`, `wandb` and `mlflow`: the numbers of a run, written by these libraries.

A library is imported and called in the thread of `BackgroundSink` only. Steps count as the steps taken, so
that an evaluation lies at the step after which it was made. Everything is written into the run folder unless
the environment names a server, and a resumed run continues its record.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.errors import MissingExtraError
from paceline.job.cluster import process_environment
from paceline.observe.background_sink import BackgroundSink, scalars_of_evaluation, scalars_of_step
from paceline.observe.sinks import Sink, SinkSite
from paceline.observe.step_stats import StepStats

_BATCH = 200
"""Numbers that are sent to MLflow together; its limit is 1,000."""
_MLFLOW_PARAM_LENGTH = 500
_START_SECONDS = 300.0  # of the process of W&B; its own 30 s are not enough on a busy host


def build_tensorboard(site: SinkSite, argument: object) -> Sink:
    """Build the sink that writes event files into `tensorboard/`.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """
    return _in_background("tensorboard", site, lambda: _TensorBoardWriter(site))


def build_wandb(site: SinkSite, argument: str | None) -> Sink:
    """Build the sink that writes a run of Weights & Biases into `wandb/`; offline unless `WANDB_MODE` is set.

    Args:
        argument: name of the project; None: "paceline".
    Raises:
        MissingExtraError: wandb is not installed.
    """
    return _in_background("wandb", site, lambda: _WandbWriter(site, argument or "paceline"))


def build_mlflow(site: SinkSite, argument: str | None) -> Sink:
    """Build the sink that writes a run of MLflow into `mlflow/`, or to `MLFLOW_TRACKING_URI` if that is set.

    Args:
        argument: name of the experiment; None: "paceline".
    Raises:
        MissingExtraError: mlflow is not installed.
    """
    return _in_background("mlflow", site, lambda: _MlflowWriter(site, argument or "paceline"))


def _in_background(library: str, site: SinkSite, open_writer: Callable[[], Sink]) -> BackgroundSink:
    # Looked for here and not in the thread, so that a missing library ends the run before its first step.
    # A folder `wandb/` in the working directory is a spec too, but one without an origin.
    spec = find_spec(library)
    if spec is None or spec.origin is None:
        raise MissingExtraError(
            f'log.sinks has "{library}", which needs {library}, which is not installed.',
            next_step=f"pip install 'paceline[{library}]'",
        )
    return BackgroundSink(library, open_writer, warn=site.warn)


class _TensorBoardWriter:
    def __init__(self, site: SinkSite) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run hides what was written from there on before.
        purge = site.first_step + 1 if site.first_step else None
        self._writer = SummaryWriter(str(site.run_dir / "tensorboard"), purge_step=purge)
        rows = "".join(f"| {key} | {value} |\n" for key, value in site.recipe.items())
        self._writer.add_text("recipe", f"| key | value |\n|---|---|\n{rows}", site.first_step)

    def step(self, stats: StepStats) -> None:
        self._write(stats.step + 1, scalars_of_step(stats))

    def event(self, name: str, record: Mapping[str, Any]) -> None:
        if name == "evaluation":
            self._write(record["step"], scalars_of_evaluation(record))

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)


class _WandbWriter:
    def __init__(self, site: SinkSite, project: str) -> None:
        import wandb

        # A word that W&B does not know is an error of its own, which names the words.
        mode: Any = process_environment().get("WANDB_MODE") or "offline"
        self._run = wandb.init(
            project=project,
            name=site.run_dir.resolve().name,
            id=_remembered(site.run_dir / "wandb-run-id", lambda: uuid.uuid4().hex[:8]),
            resume="allow",
            dir=str(site.run_dir),
            mode=mode,
            config=dict(site.recipe),
            # The standard output belongs to the command, and this thread must not touch its signals.
            settings=wandb.Settings(silent=True, console="off", x_service_wait=_START_SECONDS),
        )
        # A roll-back goes to earlier steps, which W&B's own counter refuses.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._exit_code = 1

    def step(self, stats: StepStats) -> None:
        self._run.log({**scalars_of_step(stats), "step": stats.step + 1})

    def event(self, name: str, record: Mapping[str, Any]) -> None:
        if name == "evaluation":
            self._run.log({**scalars_of_evaluation(record), "step": record["step"]})
        elif name == "run":
            self._run.summary.update({f"run/{key}": value for key, value in _plain(record).items()})
        elif name == "end":
            self._exit_code = 0

    def close(self) -> None:
        self._run.finish(exit_code=self._exit_code)


class _MlflowWriter:
    def __init__(self, site: SinkSite, experiment: str) -> None:
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        from mlflow import environment_variables
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        allow: Any = getattr(environment_variables, "MLFLOW_ALLOW_FILE_STORE", None)
        if allow is not None:  # MLflow 3 refuses its file store without it
            allow.set(True)

        self._metric = Metric
        local = (site.run_dir / "mlflow").resolve().as_uri()
        self._client = MlflowClient(tracking_uri=process_environment().get("MLFLOW_TRACKING_URI") or local)
        self._run_id = _remembered(
            site.run_dir / "mlflow-run-id", lambda: self._create_run(experiment, site.run_dir)
        )
        self._client.update_run(self._run_id, status="RUNNING")
        known = self._client.get_run(self._run_id).data.params
        # A parameter of MLflow cannot change; a resumed run keeps those that it began with.
        params = [
            Param(key, str(value)[:_MLFLOW_PARAM_LENGTH])
            for key, value in site.recipe.items()
            if key not in known
        ]
        for start in range(0, len(params), 100):  # the limit of one call
            self._client.log_batch(self._run_id, params=params[start : start + 100])
        self._pending: list[Any] = []
        self._status = "FAILED"

    def _create_run(self, experiment: str, run_dir: Path) -> str:
        found = self._client.get_experiment_by_name(experiment)
        experiment_id = self._client.create_experiment(experiment) if found is None else found.experiment_id
        return str(self._client.create_run(experiment_id, run_name=run_dir.resolve().name).info.run_id)

    def step(self, stats: StepStats) -> None:
        self._write(stats.step + 1, scalars_of_step(stats))

    def event(self, name: str, record: Mapping[str, Any]) -> None:
        if name == "evaluation":
            self._write(record["step"], scalars_of_evaluation(record))
            self._flush()
        elif name == "run":
            for key, value in _plain(record).items():
                self._client.set_tag(self._run_id, f"run.{key}", value)
        elif name == "end":
            self._status = "KILLED" if record.get("stopped") else "FINISHED"

    def close(self) -> None:
        self._flush()
        self._client.set_terminated(self._run_id, status=self._status)

    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._pending += [self._metric(name, float(value), now, step) for name, value in scalars.items()]
        if len(self._pending) >= _BATCH:
            self._flush()

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        if pending:
            self._client.log_batch(self._run_id, metrics=pending)


def _plain(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if isinstance(value, (str, int, float))}


def _remembered(path: Path, create: Callable[[], str]) -> str:
    """Return the text of a file, which is written first if there is none: a resumed run has the same id."""
    if path.exists():
        return path.read_text(encoding="utf-8").strip()
    text = create()
    path.write_text(f"{text}\n", encoding="utf-8")
    return text
