"""Sinks that write in a thread of the job, and the writers of the sinks that are readers."""

import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from paceline.observe import Sink, SinkSite, StepStats
from paceline.observe.background_sink import BackgroundSink, UnopenedWriter
from paceline.observe.sinks import GuardedSink
from paceline.recipe.registry import parse_word
from paceline.recipe.registry.sink_specs import SinkSpec
from paceline.testing.contracts import SinkContract
from paceline.testing.contracts.sink_contract import make_step

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


def guarded(word: str, site: SinkSite) -> Sink:
    """A writer as the process of the sinks calls it."""
    spec, argument = parse_word(SinkSpec, word)
    if spec.library:
        pytest.importorskip(spec.library)
    return GuardedSink(word, UnopenedWriter(lambda: spec.load()(site, argument)), site.warn)


class TestCsv(SinkContract):
    def sink(self, site: SinkSite) -> Sink:
        return guarded("csv", site)


class TestTensorBoard(SinkContract):
    def sink(self, site: SinkSite) -> Sink:
        return guarded("tensorboard", site)


class TestWandb(SinkContract):
    def sink(self, site: SinkSite) -> Sink:
        return guarded("wandb", site)


class TestMlflow(SinkContract):
    def sink(self, site: SinkSite) -> Sink:
        return guarded("mlflow", site)


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
