"""Sinks with a thread of their own: csv and the thread always, trackers where they are installed."""

import csv
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import MissingExtraError
from paceline.observe import Sink, SinkSite, StepStats
from paceline.observe.background_sink import BackgroundSink
from paceline.observe.csv_sink import CSV, build_csv
from paceline.recipe import Recipe
from paceline.session import tracker_sinks
from paceline.session.tracker_sinks import build_mlflow, build_tensorboard, build_wandb
from paceline.testing.contracts import SinkContract
from paceline.testing.contracts.sink_contract import make_step

RECIPE = {"seed": 3, "optimizer.name": "adamw", "optimizer.lr": 0.01}
EVALUATION = {"step": 3, "loss": 0.25, "metrics": {"accuracy": 0.875}, "num_samples": 64, "num_items": 64.0}
END = {"step": 3, "stopped": False}


class Writer:
    """Notes what it receives, in which thread; waits for `gate` first."""

    def __init__(self, gate: threading.Event | None = None, fails: bool = False) -> None:
        self.gate, self.fails = gate, fails
        self.noted: list[Any] = []
        self.threads: set[int] = set()

    def _note(self, what: Any) -> None:
        if self.gate is not None:
            assert self.gate.wait(60)
        self.threads.add(threading.get_ident())
        self.noted.append(what)
        if self.fails:
            raise ConnectionError("the tracking server is gone")

    def step(self, stats: StepStats) -> None:
        self._note(stats.step)

    def event(self, name: str, record: Mapping[str, Any]) -> None:
        self._note((name, record))

    def close(self) -> None:
        self.noted.append("close")


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Opened at the end, so that no thread is left waiting."""
    gate = threading.Event()
    yield gate
    gate.set()


@pytest.fixture(autouse=True)
def leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """W&B keeps a service process for the next run of a process; MLflow's file store needs a variable."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


class TestBackground(SinkContract):
    def sink(self, site: SinkSite) -> Sink:
        return BackgroundSink("x", Writer, warn=site.warn)


class TestCsv(SinkContract):
    def sink(self, site: SinkSite) -> Sink:
        return build_csv(site, "")


class TestTensorBoard(SinkContract):
    def sink(self, site: SinkSite) -> Sink:
        pytest.importorskip("tensorboard")
        return build_tensorboard(site, None)


class TestWandb(SinkContract):
    def sink(self, site: SinkSite) -> Sink:
        pytest.importorskip("wandb")
        return build_wandb(site, None)


class TestMlflow(SinkContract):
    def sink(self, site: SinkSite) -> Sink:
        pytest.importorskip("mlflow")
        return build_mlflow(site, None)


# -- the thread --------------------------------------------------------------------------------------------


def test_everything_is_written_in_order_by_another_thread_before_close_returns() -> None:
    writer = Writer()
    sink = BackgroundSink("x", lambda: writer, warn=pytest.fail)
    sink.event("run", {"step": 0})
    for step in range(500):
        sink.step(make_step(step))
    sink.event("checkpoint", {"step": 500})  # not among the events that it asked for
    sink.event("end", END)
    sink.close()
    assert writer.noted == [("run", {"step": 0}), *range(500), ("end", END), "close"]
    assert threading.get_ident() not in writer.threads and len(writer.threads) == 1


def test_a_writer_that_hangs_holds_up_no_step_and_no_end(gate: threading.Event) -> None:
    """The queue is bounded, evaluations have room when steps have none, and `close` has a deadline."""
    warnings: list[str] = []
    writer = Writer(gate)
    sink = BackgroundSink("x", lambda: writer, warn=warnings.append, capacity=10, flush_seconds=0.05)
    for step in range(1000):
        sink.step(make_step(step))
    sink.event("evaluation", EVALUATION)
    sink.close()
    assert len(warnings) == 1 and "the sink 'x' has not written everything" in warnings[0]
    assert "still writing after 0.05 s" in warnings[0] and not writer.noted
    gate.set()
    sink._thread.join(60)
    assert 10 <= len(writer.noted) <= 13 and writer.noted[-2:] == [("evaluation", EVALUATION), "close"]


def test_steps_for_which_a_writer_was_too_slow_are_counted(gate: threading.Event) -> None:
    warnings: list[str] = []
    sink = BackgroundSink("x", lambda: Writer(gate), warn=warnings.append, capacity=10)
    for step in range(100):
        sink.step(make_step(step))
    gate.set()
    sink.close()
    assert len(warnings) == 1 and "it was too slow for" in warnings[0]


@pytest.mark.parametrize("when", ["opening", "writing"])
def test_errors_of_a_writer_are_one_warning(when: str) -> None:
    warnings: list[str] = []

    def broken() -> Sink:
        if when == "opening":
            raise ConnectionError("the tracking server is gone")
        return Writer(fails=True)

    sink = BackgroundSink("x", broken, warn=warnings.append)
    for step in range(20):
        sink.step(make_step(step))
    sink.close()
    assert len(warnings) == 1
    assert "the sink 'x' failed" in warnings[0] and "the tracking server is gone" in warnings[0]


# -- csv ---------------------------------------------------------------------------------------------------


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def send_run(sink: Sink, first: int = 0, last: int = 3) -> None:
    sink.event("run", {"step": first, "strategy": "replicas=2", "versions": {"torch": "2"}})
    for step in range(first, last):
        sink.step(make_step(step, loss=1 / (step + 1)))
    sink.event("evaluation", {**EVALUATION, "step": last})
    sink.event("end", {**END, "step": last})
    sink.close()


def test_csv_has_a_row_for_each_step_and_evaluation_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    """A column that an evaluation brings is added to the rows before it."""
    send_run(build_csv(SinkSite(run_dir=tmp_path, warn=pytest.fail), ""))
    send_run(build_csv(SinkSite(run_dir=tmp_path, first_step=3, warn=pytest.fail), ""), 3, 5)
    rows = rows_of(tmp_path / CSV)
    assert [row["step"] for row in rows] == ["1", "2", "3", "3", "4", "5", "5"]
    assert [float(row["train/loss"]) for row in rows if row["train/loss"]] == [1 / n for n in range(1, 6)]
    assert [row["eval/accuracy"] for row in rows] == ["", "", "", "0.875", "", "", "0.875"]
    assert {row["train/accuracy"] for row in rows if row["train/loss"]} == {"0.75"}
    assert not list(tmp_path.glob(".*"))  # no temporary file is left


# -- the trackers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "library"),
    [(build_tensorboard, "tensorboard"), (build_wandb, "wandb"), (build_mlflow, "mlflow")],
)
def test_a_missing_library_is_an_error_that_names_the_extra(
    build: Callable[..., Sink], library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_sinks, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError) as caught:
        build(SinkSite(run_dir=tmp_path), None)
    assert caught.value.next_step == f"pip install 'paceline[{library}]'"


def test_a_folder_of_that_name_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B writes into a folder `wandb`, which Python can import as an empty package."""
    (tmp_path / "mlflow_").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtraError):
        tracker_sinks._in_background("mlflow_", SinkSite(run_dir=tmp_path), Writer)


def test_tensorboard_reads_back_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    send_run(build_tensorboard(SinkSite(run_dir=tmp_path, recipe=RECIPE, warn=pytest.fail), None))
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    losses = [(event.step, event.value) for event in read.Scalars("train/loss")]
    assert losses == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert [(event.step, event.value) for event in read.Scalars("eval/accuracy")] == [(3, 0.875)]
    assert {f"train/{name}" for name in ("loss", "accuracy", "lr", "grad_norm")} <= set(
        read.Tags()["scalars"]
    )
    assert "recipe/text_summary" in read.Tags()["tensors"]


def test_mlflow_reads_back_every_number_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    site = SinkSite(run_dir=tmp_path, recipe=RECIPE, warn=pytest.fail)
    send_run(build_mlflow(site, "first"))
    send_run(build_mlflow(site, "first"), 3, 5)
    client = MlflowClient(tracking_uri=(tmp_path / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("first")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params == {key: str(value) for key, value in RECIPE.items()}
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((m.step, m.value) for m in history) == [(n, 1 / n) for n in range(1, 6)]


def test_wandb_writes_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    send_run(build_wandb(SinkSite(run_dir=tmp_path, recipe=RECIPE, warn=pytest.fail), "first"))
    (written,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    names = names_in_wandb_file(written)
    assert {"train/loss", "eval/accuracy", "optimizer.lr"} <= names


def names_in_wandb_file(path: Path) -> set[str]:
    """The keys of history and configuration, in the records of W&B's own schema.

    The file is a log of LevelDB: blocks of 32 KiB, in which a record can be in several fragments.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, names, parts = path.read_bytes(), set[str](), b""
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
            record, parts = Record.FromString(parts), b""
            items = [*record.history.item, *record.run.config.update, *record.config.update]
            names |= {item.key or ".".join(item.nested_key) for item in items}
    return names


def test_sinks_by_name_always_have_jsonl() -> None:
    words = ("tensorboard", "wandb", "mlflow:mine", "csv")
    recipe = Recipe(task="digits", steps=1, log={"sinks": words})
    assert recipe.log.sinks == ("jsonl", *words)
