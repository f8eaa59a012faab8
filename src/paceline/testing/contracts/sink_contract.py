"""The contract of sinks: they accept every step and event of a run, and neither change nor end it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from paceline.observe.sinks import Sink, SinkSite
from paceline.observe.step_stats import PHASES, StepStats


def make_step(step: int, loss: float = 0.5) -> StepStats:
    """Return the record of a step of 32 samples that took 0.2 s."""
    return StepStats(
        step=step,
        epoch=0,
        loss=loss,
        metrics={"accuracy": 0.75},
        num_samples=32,
        num_items=32.0,
        grad_norm=1.25,
        lr=1e-3,
        applied=True,
        loss_scale=1.0,
        stops=0,
        seconds=0.2,
        phases=dict.fromkeys(PHASES, 0.04),
        sent_bytes=4096.0,
    )


class SinkContract(ABC):
    """Tests of a sink of your own; the site has no console."""

    @abstractmethod
    def sink(self, site: SinkSite) -> Sink:
        """Return a new sink for the run of `site`."""

    @pytest.fixture
    def site(self, tmp_path: Path) -> SinkSite:
        """A run of ten steps."""
        return SinkSite(run_dir=tmp_path, last_step=10, warn=pytest.fail)

    def test_a_run_leaves_its_records_as_they_are(self, site: SinkSite) -> None:
        """Every sink receives the same objects, so none may change them."""
        sink = self.sink(site)
        records: list[tuple[str, dict[str, Any]]] = [
            ("run", {"step": 0, "num_steps": 10, "versions": {"python": "3.11"}}),
            ("evaluation", {"step": 2, "loss": 0.4, "metrics": {"accuracy": 0.8}, "num_samples": 64}),
            ("checkpoint", {"step": 2, "path": "checkpoints/step-00000002"}),
            ("end", {"step": 2, "stopped": False}),
        ]
        steps = [make_step(0), make_step(1)]
        records_before, steps_before = deepcopy(records), deepcopy(steps)
        sink.event(*records[0])
        for stats in steps:
            sink.step(stats)
        for record in records[1:]:
            sink.event(*record)
        sink.close()
        assert records == records_before and steps == steps_before

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_numbers_that_are_not_finite_are_accepted(self, value: float, site: SinkSite) -> None:
        sink = self.sink(site)
        sink.step(make_step(0, loss=value))
        sink.event("evaluation", {"step": 1, "loss": value, "metrics": {"accuracy": value}})
        sink.close()

    def test_an_event_that_no_schema_knows_is_accepted(self, site: SinkSite) -> None:
        """Callbacks may send events of their own."""
        sink = self.sink(site)
        sink.event("no-such-event", {"text": "x", "table": {"a": 1}, "list": [1, None]})
        sink.close()

    def test_a_run_that_fails_at_once_closes_it(self, site: SinkSite) -> None:
        """No step, no event; a second `close` changes nothing."""
        sink = self.sink(site)
        sink.close()
        sink.close()

    def test_it_prints_nothing(self, site: SinkSite, capfd: pytest.CaptureFixture[str]) -> None:
        """The standard output belongs to the command and to the user's own code."""
        sink = self.sink(site)
        sink.event("run", {"step": 0})
        sink.step(make_step(0))
        sink.close()
        assert capfd.readouterr() == ("", "")
