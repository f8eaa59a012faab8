"""The sinks of the package, and one that raises, keep the contract of sinks."""

import io
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from paceline.observe import Sink, SinkSite, StepStats
from paceline.observe.progress import build_progress
from paceline.observe.sinks import GuardedSink, build_json_lines, build_text_log
from paceline.testing.contracts import SinkContract
from paceline.testing.contracts.sink_contract import make_step


class TestJsonLines(SinkContract):
    def sink(self, site: SinkSite) -> Sink:
        return build_json_lines(site, "")


class TestTextLog(SinkContract):
    def sink(self, site: SinkSite) -> Sink:
        return build_text_log(site, "")


class TestProgress(SinkContract):
    def sink(self, site: SinkSite) -> Sink:
        sink = build_progress(replace(site, console=Console(file=io.StringIO())), "")
        assert sink is not None
        return sink


def test_a_run_without_a_console_has_no_progress(tmp_path: Any) -> None:
    assert build_progress(SinkSite(run_dir=tmp_path), "") is None


class Broken:
    """Raises in every method that the case names."""

    def __init__(self, *methods: str) -> None:
        self.methods, self.calls = methods, list[str]()

    def _called(self, method: str) -> None:
        self.calls.append(method)
        if method in self.methods:
            raise OSError(f"no connection in {method}")

    def step(self, stats: StepStats) -> None:
        self._called("step")

    def event(self, name: str, record: Mapping[str, Any]) -> None:
        self._called("event")

    def close(self) -> None:
        self._called("close")


class TestGuardedBroken(SinkContract):
    def sink(self, site: SinkSite) -> Sink:
        return GuardedSink("broken", Broken("step", "event", "close"), warn=lambda text: None)


@pytest.mark.parametrize("method", ["step", "event", "close"])
def test_the_first_error_of_a_sink_is_one_warning_and_the_end_of_it(method: str) -> None:
    warnings: list[str] = []
    broken = Broken(method)
    sink = GuardedSink("tensorboard", broken, warnings.append)
    for _ in range(3):
        sink.event("checkpoint", {})
        sink.step(make_step(0))
    sink.close()
    assert len(warnings) == 1
    assert "the sink 'tensorboard' failed" in warnings[0]
    assert f"OSError: no connection in {method}" in warnings[0]
    assert broken.calls[-1] == "close"
    assert broken.calls.count(method) == (2 if method == "close" else 1)


def test_a_sink_that_does_not_raise_receives_everything_and_no_warning() -> None:
    whole = Broken()
    sink = GuardedSink("whole", whole, pytest.fail)
    sink.event("run", {})
    sink.step(make_step(0))
    sink.close()
    assert whole.calls == ["event", "step", "close"]


def test_an_interrupt_passes_through() -> None:
    """Ctrl-C is no error of the sink."""

    class Interrupted(Broken):
        def step(self, stats: StepStats) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        GuardedSink("x", Interrupted(), pytest.fail).step(make_step(0))
