"""The sinks that need a library are written by a process beside the run; nothing there changes the run."""

from __future__ import annotations

import csv
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from paceline.errors import MissingExtraError
from paceline.observe.sinks import JsonLinesSink, Sink, SinkSite
from paceline.observe.step_stats import StepStats
from paceline.recipe import Recipe
from paceline.recipe.registry.sink_specs import SINK_SPECS, SinkSpec
from paceline.session import companion_processes
from paceline.session.callback import Callback
from paceline.session.companion_processes import check_library
from paceline.session.fit_loop import Result
from paceline.session.session import Session
from paceline.session.train_rank import train
from paceline.watch.run_tail import records_size
from paceline.watch.sink_process import SinkFollower, SinkJob
from paceline.watch.tracker_writers import CSV
from tests.unit.watch.records import append, run_record, step_record

SECONDS = 120.0
READERS = {spec.word: spec.library for spec in SINK_SPECS if spec.is_reader}
INSTALLED = [word for word, library in READERS.items() if not library or find_spec(library)]


def recipe(folder: Path, *sinks: str, **changes: Any) -> Recipe:
    values: dict[str, Any] = {
        "task": "digits",
        "steps": 4,
        "options": {"model": "mlp", "hidden": [8]},
        "batch": {"size": 8, "shards": 2},
        "checkpoint": {"every_steps": 2},
        "evaluate": {"every_steps": 2},
        "reproducible": True,
        "run_dir": str(folder),
        "log": {"sinks": ("jsonl", *sinks), "level": "error"},
    }
    return Recipe(**{**values, **changes})


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / CSV).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def wait_for(condition: Callable[[], object]) -> None:
    expires = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < expires
        time.sleep(0.05)


# -- the libraries -----------------------------------------------------------------------------------------

SCRIPT = """
import json, sys
from paceline.recipe import Recipe
from paceline.session import companion_processes
from paceline.session.train_rank import train

companion_processes.SINK_SECONDS = 240.0
values = json.loads(sys.argv[1])
train(Recipe(**values))
train(Recipe(**values | {"steps": 6}), resume=values["run_dir"] + "/checkpoints/step-00000002")
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


@dataclass(frozen=True)
class ResumedRun:
    """A run of 4 steps that was resumed from step 2 and ended at step 6, so that two steps are taken twice.

    Args:
        steps: the steps of `metrics.jsonl` that count, by number of steps taken.
        evaluations: the evaluations that count.
    """

    folder: Path
    modules: set[str]
    stderr: str
    steps: Mapping[int, dict[str, Any]]
    evaluations: Mapping[int, dict[str, Any]]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> ResumedRun:
    folder = tmp_path_factory.mktemp("sinks") / "run"
    values = recipe(folder, *INSTALLED).model_dump(mode="json", exclude_unset=True)
    words = [sys.executable, "-c", SCRIPT, json.dumps(values)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    steps = {record["step"] + 1: record for record in records if record["event"] == "step"}
    evaluations = {record["step"]: record for record in records if record["event"] == "evaluation"}
    assert list(steps) == [1, 2, 3, 4, 5, 6] and list(evaluations) == [2, 4, 6]
    assert sum(record["event"] == "step" for record in records) == 8
    return ResumedRun(folder, set(json.loads(done.stdout.splitlines()[-1])), done.stderr, steps, evaluations)


def check_numbers(run: ResumedRun, losses: list[tuple[int, Any]], accuracies: list[tuple[int, Any]]) -> None:
    """Each step and evaluation once, with the numbers of `metrics.jsonl`."""
    assert sorted(losses) == [(n, pytest.approx(record["loss"], rel=1e-6)) for n, record in run.steps.items()]
    assert sorted(accuracies) == [
        (n, pytest.approx(record["metrics"]["accuracy"], rel=1e-6)) for n, record in run.evaluations.items()
    ]


@pytest.mark.timeout(700)
def test_the_job_imports_no_library_of_a_sink_and_nothing_is_left_out(resumed: ResumedRun) -> None:
    assert not resumed.modules & {library for library in READERS.values() if library}
    assert "paceline" in resumed.modules and "sink" not in resumed.stderr


@pytest.mark.capability("P2")
@pytest.mark.timeout(700)
def test_csv_reads_back_every_number_at_every_level_of_the_log(resumed: ResumedRun) -> None:
    """A column that an evaluation brings is added to the rows before it."""
    rows = rows_of(resumed.folder)
    losses = [(int(row["step"]), float(row["train/loss"])) for row in rows if row["train/loss"]]
    check_numbers(
        resumed,
        losses,
        [(int(row["step"]), float(row["eval/accuracy"])) for row in rows if row["eval/accuracy"]],
    )
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6]
    assert not list(resumed.folder.glob(".metrics*"))  # no temporary file is left


@pytest.mark.timeout(700)
def test_tensorboard_reads_back_every_number(resumed: ResumedRun) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(resumed.folder / "tensorboard"))
    read.Reload()
    events = read.Scalars("train/loss")
    check_numbers(
        resumed,
        [(event.step, event.value) for event in events],
        [(event.step, event.value) for event in read.Scalars("eval/accuracy")],
    )
    assert [event.wall_time for event in events] == [record["time"] for record in resumed.steps.values()]
    assert "recipe/text_summary" in read.Tags()["tensors"]


@pytest.mark.timeout(700)
def test_mlflow_reads_back_every_number(resumed: ResumedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(resumed.folder / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("paceline")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["batch.size"] == "8"
    check_numbers(
        resumed,
        [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "train/loss")],
        [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "eval/accuracy")],
    )


@pytest.mark.timeout(700)
def test_wandb_reads_back_every_number(resumed: ResumedRun) -> None:
    pytest.importorskip("wandb")
    rows, configured = list[dict[str, Any]](), set[str]()
    written = sorted((resumed.folder / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(written) == 2 and len({path.name for path in written}) == 1
    for path in written:
        for record in wandb_records(path):
            row = {
                ".".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            rows += [row] if row else []
            configured |= {".".join(one.nested_key) or one.key for one in record.run.config.update}
    check_numbers(
        resumed,
        [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row],
        [(row["step"], row["eval/accuracy"]) for row in rows if "eval/accuracy" in row],
    )
    assert "batch.size" in configured


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of W&B's own schema; the file is a log of LevelDB.

    It has blocks of 32 KiB, in which a record can be in several fragments.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, parts = path.read_bytes(), b""
    position = 7  # after the header of the file
    while position + 7 <= len(data):
        left = 2**15 - position % 2**15
        if left < 7:  # too short for a fragment
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or its last fragment
            yield Record.FromString(parts)
            parts = b""


READ_TRACKIO = """
import json
from trackio.sqlite_storage import SQLiteStorage

print(json.dumps(SQLiteStorage.get_logs("paceline", "run"), default=str))
"""


@pytest.mark.timeout(700)
def test_trackio_reads_back_every_number(resumed: ResumedRun) -> None:
    if find_spec("trackio") is None:
        pytest.skip("needs paceline[trackio]")
    # Its import reads where its data are.
    environ = {**os.environ, "TRACKIO_DIR": str(resumed.folder / "trackio")}
    done = subprocess.run(
        [sys.executable, "-c", READ_TRACKIO],
        env=environ,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    rows = json.loads(done.stdout.splitlines()[-1])
    check_numbers(
        resumed,
        [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row],
        [(row["step"], row["eval/accuracy"]) for row in rows if "eval/accuracy" in row],
    )


# -- what goes wrong ---------------------------------------------------------------------------------------

_INIT = "import time\n\nSettings = dict\n\n\ndef init(**options):\n"
FAULTY = {
    "raises": f"{_INIT}    raise ConnectionError('the tracking server is gone')\n",
    "hangs": f"{_INIT}    time.sleep(600)\n",
}


class WhenStepsAreTaken(Callback):
    """Calls functions between two steps and at the end."""

    def __init__(self, at_step: Callable[[int], object], at_end: Callable[[], object]) -> None:
        self._at_step, self._at_end = at_step, at_end

    def on_step(self, session: Session, stats: StepStats) -> None:
        self._at_step(stats.step)

    def on_end(self, session: Session, result: Result) -> None:
        self._at_end()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the weights of a run without such sinks."""
    result = train(recipe(tmp_path_factory.mktemp("plain") / "run"))
    assert result.sha256 is not None
    return result.sha256


@pytest.mark.parametrize("fault", FAULTY)
def test_a_library_that_raises_or_hangs_changes_no_weight_and_holds_nothing(
    fault: str,
    tmp_path: Path,
    undisturbed: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It is one warning, and another sink of the run has everything."""
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").write_text(FAULTY[fault], "utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(companion_processes, "SINK_SECONDS", 0.5 if fault == "hangs" else SECONDS)
    run = tmp_path / "run"
    callback = WhenStepsAreTaken(
        lambda step: None, lambda: wait_for(lambda: (run / CSV).exists() and len(rows_of(run)) == 6)
    )
    if find_spec("wandb") is None:
        monkeypatch.syspath_prepend(tmp_path)
    result = train(recipe(run, "wandb", "csv"), callbacks=[callback])
    assert result.sha256 == undisturbed and result.steps == 4
    warnings = [line for line in capfd.readouterr().err.splitlines() if "sink" in line]
    assert len(warnings) == 1 and "the sink 'wandb'" in warnings[0]
    expected = {
        "raises": "failed and is off from now on: ConnectionError: the tracking server is gone",
        "hangs": "has not written everything: it was still at the start of its library after 0.5 s",
    }
    assert expected[fault] in warnings[0]
    assert [row["step"] for row in rows_of(run)] == ["1", "2", "2", "3", "4", "4"]


def find_companion() -> int | None:
    """The number of the process of the sinks that this process has started."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
        if b"paceline.watch.sink_process" in words and parent == os.getpid():
            return int(folder.name)
    return None


def test_a_process_of_the_sinks_that_is_killed_is_one_warning(
    tmp_path: Path, undisturbed: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def kill(step: int) -> None:
        if step == 1:
            pid = find_companion()
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    result = train(recipe(tmp_path / "run", "csv"), callbacks=[WhenStepsAreTaken(kill, lambda: None)])
    assert result.sha256 == undisturbed and find_companion() is None
    warnings = [line for line in capfd.readouterr().err.splitlines() if "sink" in line]
    assert len(warnings) == 1
    assert "the process of the sinks (csv) was killed by signal 9" in warnings[0]


def test_after_a_crash_of_the_job_the_last_records_are_written(tmp_path: Path) -> None:
    """The process that started it is gone, and nothing has written the end of the run."""
    append(tmp_path, *(step_record(step) for step in range(2)))
    start = records_size(tmp_path)
    append(tmp_path, run_record(step=2), *(step_record(step) for step in range(2, 5)))
    job = SinkJob(("csv",), start, parent=2**22, end_seconds=SECONDS, site={"run_dir": str(tmp_path)})
    words = [sys.executable, "-m", "paceline.watch.sink_process"]
    text = json.dumps(asdict(job))
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [row["step"] for row in rows_of(tmp_path)] == ["3", "4", "5"]


# -- the reader --------------------------------------------------------------------------------------------


class Notes:
    """A sink that keeps what it receives."""

    def __init__(self) -> None:
        self.noted: list[Any] = []
        self.is_closed = False

    def step(self, stats: StepStats) -> None:
        self.noted.append((stats.step, stats.loss))

    def event(self, name: str, record: Mapping[str, Any]) -> None:
        self.noted.append(name)

    def close(self) -> None:
        self.is_closed = True


def test_it_passes_on_the_records_of_one_start_of_the_run(tmp_path: Path) -> None:
    """Over full files, past lines that are damaged, and with the numbers that JSON has not."""
    lines = JsonLinesSink(tmp_path / "metrics.jsonl", rotate_bytes=1500)
    for step in range(9):
        lines.event("step", step_record(step))
    start = records_size(tmp_path)
    lines.event("run", run_record(step=9))
    for step in range(9, 20):
        lines.event("step", step_record(step, loss=float("inf") if step == 12 else 1.0))
        if step == 11:
            append(tmp_path, end="no record\n")
    lines.event("end", {"step": 20, "stopped": False, "time": 1050.0})
    lines.event("run", run_record(step=20))
    lines.event("step", step_record(20))
    lines.close()
    notes, warnings, opened = Notes(), list[str](), list[SinkSite]()

    def open_sink(site: SinkSite) -> Sink:
        opened.append(site)
        return notes

    site = SinkSite(run_dir=tmp_path, warn=warnings.append)
    follower = SinkFollower("notes", open_sink, site, start, Event())
    follower.start()
    follower.join(SECONDS)
    assert follower.is_complete and follower.num_steps == 20 and notes.is_closed and not warnings
    infinity = float("inf")
    losses = [(step, infinity if step == 12 else 1.0) for step in range(9, 20)]
    assert notes.noted == ["run", *losses, "end"]
    assert opened[0].now() == 1050.0  # when the last one was written


@pytest.mark.parametrize("library", [library for library in READERS.values() if library])
def test_a_missing_library_is_an_error_that_names_the_extra(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(companion_processes, "find_spec", lambda name: None)
    (spec,) = (spec for spec in SINK_SPECS if spec.library == library)
    with pytest.raises(MissingExtraError) as caught:
        check_library(spec)
    assert caught.value.next_step == f"pip install 'paceline[{library}]'"


def test_a_folder_of_that_name_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B writes into a folder `wandb`, which Python can import as an empty package."""
    (tmp_path / "mlflow_").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtraError):
        check_library(SinkSpec(word="x", build="x:y", library="mlflow_"))


def test_sinks_by_name_always_have_jsonl() -> None:
    words = ("tensorboard", "wandb", "trackio:mine", "mlflow:mine", "csv")
    assert Recipe(task="digits", steps=1, log={"sinks": words}).log.sinks == ("jsonl", *words)
