"""The writers of the sinks `csv`, `tensorboard`, `wandb`, `trackio` and `mlflow`, each by its own library.

They run in `paceline.watch.sink_process`, which imports a library only to write with it; the job never does.
Steps count as the steps taken, so that an evaluation lies at the step after which it was made. Everything is
written into the run folder unless the environment names a server, and a resumed run continues its record.

Invariant: a resumed run leaves no step twice. CSV and TensorBoard drop the steps that are taken again; W&B,
Trackio and MLflow cannot take a value back, so there such a step keeps its first value.
"""

from __future__ import annotations

import csv
import logging
import os
import re
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from paceline.job.cluster import change_environment, process_environment
from paceline.observe.sinks import Sink, SinkSite
from paceline.observe.step_stats import StepStats

CSV = "metrics.csv"
_BATCH = 200
"""Numbers that are sent to MLflow together; its limit is 1,000."""
_MLFLOW_PARAM_LENGTH = 500
_NOT_IN_MLFLOW_NAMES = re.compile(r"[^\w./ -]")
_START_SECONDS = 300.0  # of the process of W&B; its own 30 s are not enough on a busy host
_FLUSH_SECONDS = 2  # of TensorBoard; a process that is killed loses that much


def open_csv(site: SinkSite, argument: object) -> Sink:
    """Open `metrics.csv`."""
    return CsvWriter(site)


def open_tensorboard(site: SinkSite, argument: object) -> Sink:
    """Open a new event file in `tensorboard/`."""
    return _TensorBoardWriter(site)


def open_wandb(site: SinkSite, argument: str | None) -> Sink:
    """Open a run of Weights & Biases in `wandb/`; offline unless `WANDB_MODE` is set.

    Args:
        argument: name of the project; None: "paceline".
    """
    return _RunWriter(site, "wandb", _start_wandb(site, argument or "paceline"))


def open_trackio(site: SinkSite, argument: str | None) -> Sink:
    """Open a run of Trackio in `trackio/`; local unless `TRACKIO_SPACE_ID` or `TRACKIO_SERVER_URL` is set.

    Args:
        argument: name of the project; None: "paceline".
    """
    return _RunWriter(site, "trackio", _start_trackio(site, argument or "paceline"))


def open_mlflow(site: SinkSite, argument: str | None) -> Sink:
    """Open a run of MLflow in `mlflow/`, or at `MLFLOW_TRACKING_URI` if that is set.

    Args:
        argument: name of the experiment; None: "paceline".
    """
    return _MlflowWriter(site, argument or "paceline")


def scalars_of_step(stats: StepStats) -> dict[str, float]:
    """Return the numbers of a step that trackers show, by name; rates of groups if there are several."""
    rates = stats.rates if len(stats.rates) > 1 else {}
    return {
        "train/loss": stats.loss,
        **{f"train/{name}": value for name, value in stats.metrics.items()},
        "train/grad_norm": stats.grad_norm,
        "train/lr": stats.lr,
        # Not below "train/lr": the file store of MLflow has a file of that name.
        **{f"train/lr_{name}": value for name, value in rates.items()},
        "train/samples_per_second": stats.samples_per_second,
        "train/seconds": stats.seconds,
        "train/epoch": float(stats.epoch),
    }


def scalars_of_evaluation(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an evaluation, by name."""
    metrics = record.get("metrics", {})
    return {"eval/loss": record["loss"], **{f"eval/{name}": value for name, value in metrics.items()}}


class CsvWriter:
    """A CSV file with the steps taken in the first column, and one column for each number.

    A row has the numbers of a step or of an evaluation; the other cells are empty. If a number appears that
    has no column yet, the file is written anew with that column.

    Args:
        site: a resumed run continues the file, without the rows after the step at which it begins.
    """

    def __init__(self, site: SinkSite) -> None:
        self._path = site.run_dir / CSV
        self._columns = ["step"]
        if self._path.exists():
            with self._path.open(newline="", encoding="utf-8") as file:
                self._columns = next(csv.reader(file), self._columns)
            self._rewrite(self._columns, lambda row: _is_before(row, site.first_step))
        self._file: TextIO = self._path.open("a", newline="", encoding="utf-8")

    def step(self, stats: StepStats) -> None:
        """Write the numbers of one step, after which `step` steps were taken."""
        self._write(stats.step + 1, scalars_of_step(stats))

    def event(self, name: str, record: Mapping[str, Any]) -> None:
        """Write the numbers of an evaluation."""
        if name == "evaluation":
            self._write(record["step"], scalars_of_evaluation(record))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        row = {"step": step, **scalars}
        if new := [name for name in row if name not in self._columns]:
            self._file.close()
            self._rewrite([*self._columns, *new])
            self._file = self._path.open("a", newline="", encoding="utf-8")
        elif not self._file.tell():
            self._rows(self._file).writeheader()
        self._rows(self._file).writerow(row)
        self._file.flush()

    def _rewrite(
        self, columns: list[str], keeps: Callable[[Mapping[str, str]], bool] = lambda row: True
    ) -> None:
        """Write the file anew, with other columns or fewer rows; a crash leaves the old one."""
        with self._path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if keeps(row)]
        self._columns = columns
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with temporary.open("w", newline="", encoding="utf-8") as file:
            self._rows(file).writeheader()
            self._rows(file).writerows({k: v for k, v in row.items() if k in columns} for row in rows)
        temporary.replace(self._path)

    def _rows(self, file: TextIO) -> csv.DictWriter:
        return csv.DictWriter(file, self._columns, lineterminator="\n")


def _is_before(row: Mapping[str, str], first_step: int) -> bool:
    """Return whether a row stays when a run begins at a step; one that a crash cut short does not."""
    step = row.get("step") or ""
    return step.isdecimal() and int(step) <= first_step


class _TensorBoardWriter:
    """An event file, written by TensorBoard alone: the `SummaryWriter` of PyTorch would import torch."""

    def __init__(self, site: SinkSite) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._now = event_pb2.Event, summary_pb2.Summary, site.now
        self._writer = EventFileWriter(str(site.run_dir / "tensorboard"), flush_secs=_FLUSH_SECONDS)
        if site.first_step:  # a resumed run hides what was written from there on before
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            event = self._event(step=site.first_step + 1, wall_time=site.now(), session_log=start)
            self._writer.add_event(event)
        rows = "".join(f"| {key} | {value} |\n" for key, value in site.recipe.items())
        text = tensor_pb2.TensorProto(
            dtype="DT_STRING",
            string_val=[f"| key | value |\n|---|---|\n{rows}".encode()],
            tensor_shape=tensor_shape_pb2.TensorShapeProto(
                dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)]
            ),
        )
        kind = summary_pb2.SummaryMetadata(
            plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
        )
        self._add(
            site.first_step, [self._summary.Value(tag="recipe/text_summary", metadata=kind, tensor=text)]
        )

    def step(self, stats: StepStats) -> None:
        self._write(stats.step + 1, scalars_of_step(stats))

    def event(self, name: str, record: Mapping[str, Any]) -> None:
        if name == "evaluation":
            self._write(record["step"], scalars_of_evaluation(record))

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._add(step, [self._summary.Value(tag=name, simple_value=v) for name, v in scalars.items()])

    def _add(self, step: int, values: list[Any]) -> None:
        summary = self._summary(value=values)
        self._writer.add_event(self._event(step=step, wall_time=self._now(), summary=summary))


class _WrittenSteps:
    """The last step and the last evaluation that a tracker has received, in a file of the run folder.

    Args:
        path: of the file, which a resumed run reads first.
    """

    def __init__(self, path: Path) -> None:
        words = path.read_text("utf-8").split() if path.exists() else []
        self._before = {
            kind: int(word) for kind, word in zip(("train", "eval"), words, strict=False) if word.isdecimal()
        }
        self._last = {"train": 0, "eval": 0, **self._before}
        self._file = path.open("w", encoding="utf-8")
        self.store()

    def is_new(self, kind: str, step: int) -> bool:
        """Return whether a step was not written before this start of the run."""
        return step > self._before.get(kind, 0)

    def add(self, kind: str, step: int) -> None:
        """Count a step that was passed on; `store` follows when it is written."""
        self._last[kind] = max(self._last[kind], step)

    def store(self) -> None:
        """Write the file."""
        self._file.seek(0)
        self._file.write(f"{self._last['train']:020d} {self._last['eval']:020d}\n")
        self._file.flush()


class _TrackedRun(NamedTuple):
    """A run of W&B or Trackio.

    Args:
        log: writes numbers at a step.
        describe: adds values about the whole run.
        finish: ends it, with an exit code.
    """

    log: Callable[[dict[str, float], int], object]
    describe: Callable[[dict[str, Any]], object]
    finish: Callable[[int], object]


def _start_wandb(site: SinkSite, project: str) -> _TrackedRun:
    import wandb

    # A word that W&B does not know is an error of its own, which names the words.
    mode: Any = process_environment().get("WANDB_MODE") or "offline"
    run = wandb.init(
        project=project,
        name=site.run_dir.resolve().name,
        id=_remembered(site.run_dir / "wandb-run-id", lambda: uuid.uuid4().hex[:8]),
        resume="allow",
        dir=str(site.run_dir),
        mode=mode,
        config=dict(site.recipe),
        # This thread must not touch signals.
        settings=wandb.Settings(silent=True, console="off", x_service_wait=_START_SECONDS),
    )
    # A roll-back goes to earlier steps, which W&B's own counter refuses.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")

    def finish(exit_code: int) -> None:
        run.finish(exit_code=exit_code)
        wandb.teardown()  # its process, which would wait for another run

    return _TrackedRun(lambda scalars, step: run.log({**scalars, "step": step}), run.summary.update, finish)


def _start_trackio(site: SinkSite, project: str) -> _TrackedRun:
    change_environment({"TRACKIO_DIR": str((site.run_dir / "trackio").resolve())})  # read by its import
    import trackio

    # What it samples of the machine, the system sampler of a run has (`log.sample_seconds`).
    run = trackio.init(
        project=project,
        name=site.run_dir.resolve().name,
        resume="allow",
        config=dict(site.recipe),
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return _TrackedRun(run.log, run.config.update, lambda exit_code: run.finish())


class _RunWriter:
    """The writer of W&B and Trackio."""

    def __init__(self, site: SinkSite, library: str, run: _TrackedRun) -> None:
        self._run, self._exit_code = run, 1
        self._written = _WrittenSteps(site.run_dir / f"{library}-steps")

    def step(self, stats: StepStats) -> None:
        self._write("train", stats.step + 1, scalars_of_step(stats))

    def event(self, name: str, record: Mapping[str, Any]) -> None:
        if name == "evaluation":
            self._write("eval", record["step"], scalars_of_evaluation(record))
        elif name == "run":
            self._run.describe({f"run/{key}": value for key, value in _plain(record).items()})
        elif name == "end":
            self._exit_code = 0

    def close(self) -> None:
        self._run.finish(self._exit_code)

    def _write(self, kind: str, step: int, scalars: dict[str, float]) -> None:
        if self._written.is_new(kind, step):
            self._run.log(scalars, step)
            self._written.add(kind, step)
            self._written.store()


class _MlflowWriter:
    def __init__(self, site: SinkSite, experiment: str) -> None:
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        from mlflow import environment_variables
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        allow: Any = getattr(environment_variables, "MLFLOW_ALLOW_FILE_STORE", None)
        if allow is not None:  # MLflow 3 refuses its file store without it
            allow.set(True)

        self._metric, self._now = Metric, site.now
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
        self._written = _WrittenSteps(site.run_dir / "mlflow-steps")
        self._pending: list[Any] = []
        self._status = "FAILED"

    def _create_run(self, experiment: str, run_dir: Path) -> str:
        found = self._client.get_experiment_by_name(experiment)
        experiment_id = self._client.create_experiment(experiment) if found is None else found.experiment_id
        return str(self._client.create_run(experiment_id, run_name=run_dir.resolve().name).info.run_id)

    def step(self, stats: StepStats) -> None:
        self._write("train", stats.step + 1, scalars_of_step(stats))

    def event(self, name: str, record: Mapping[str, Any]) -> None:
        if name == "evaluation":
            self._write("eval", record["step"], scalars_of_evaluation(record))
            self._flush()
        elif name == "run":
            for key, value in _plain(record).items():
                self._client.set_tag(self._run_id, f"run.{key}", value)
        elif name == "end":
            self._status = "KILLED" if record.get("stopped") else "FINISHED"

    def close(self) -> None:
        self._flush()
        self._client.set_terminated(self._run_id, status=self._status)

    def _write(self, kind: str, step: int, scalars: Mapping[str, float]) -> None:
        if not self._written.is_new(kind, step):
            return
        time = int(self._now() * 1000)
        self._pending += [
            self._metric(_NOT_IN_MLFLOW_NAMES.sub("_", name), float(value), time, step)
            for name, value in scalars.items()
        ]
        self._written.add(kind, step)
        if len(self._pending) >= _BATCH:
            self._flush()

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        if pending:
            self._client.log_batch(self._run_id, metrics=pending)
            self._written.store()


def _plain(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if isinstance(value, (str, int, float))}


def _remembered(path: Path, create: Callable[[], str]) -> str:
    """Return the text of a file, which is written first if there is none: a resumed run has the same id."""
    if path.exists():
        return path.read_text(encoding="utf-8").strip()
    text = create()
    path.write_text(f"{text}\n", encoding="utf-8")
    return text
