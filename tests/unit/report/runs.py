"""Run folders as a run leaves them, written by the sinks that runs use, with numbers that are chosen."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.observe import PHASES, JsonLinesSink, StepStats
from paceline.observe.process_info import process_start_ticks
from paceline.report import RecordedRun, read_run
from paceline.testing.contracts.sink_contract import make_step

GRADIENT_BYTES, TALLY_BYTES = 4_000, 80


def stats(step: int, loss: float = 1.0, **changes: Any) -> StepStats:
    values = {"metrics": {"accuracy": 0.5}, "seconds": 0.5, "sent_bytes": 0.0}
    return replace(make_step(step, loss), **(values | {"phases": dict.fromkeys(PHASES, 0.1)} | changes))


def start(step: int = 0, num_steps: int = 10, **changes: Any) -> dict[str, Any]:
    """A `run` record of this very process."""
    values: dict[str, Any] = {
        "schema": 1,
        "step": step,
        "num_steps": num_steps,
        "task": "digits",
        "strategy": "replicas=2 sync=every-step",
        "ordered": False,
        "ranks": 2,
        "devices": "cpu",
        "threads": 1,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_start": process_start_ticks(os.getpid()),
        "versions": {"paceline": "0"},
        "parameters": 1000,
        "gradient_bytes": GRADIENT_BYTES,
        "tally_bytes": TALLY_BYTES,
        "tokens_per_sample": 0,
    }
    return {**values, **changes}


def rank_record(rank: int, **changes: Any) -> dict[str, Any]:
    """Ten rounds of one rank: 10 seconds, of which 4 are communication."""
    values: dict[str, Any] = {
        "step": 9,
        "rank": rank,
        "rounds": 10,
        "seconds": 10.0,
        "slowest_seconds": 1.5,
        "phases": dict(zip(PHASES, (0.5, 2.0, 2.5, 4.0, 0.5), strict=True)),
        "waiting_seconds": 1.0,
        "exposed_seconds": 4.0,
        "hidden_seconds": 4.0,
        "sent_bytes": 10.0 * (GRADIENT_BYTES + TALLY_BYTES),
        "cpu_seconds": 6.0,
        "peak_bytes": 2.0**28,
    }
    return {**values, **changes}


def write(
    folder: Path, *records: StepStats | tuple[str, dict[str, Any]], recipe: str = 'task = "digits"\n'
) -> RecordedRun:
    """A run folder with these records, read."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.toml").write_text(recipe)
    sink = JsonLinesSink(folder / "metrics.jsonl")
    for record in records:
        if isinstance(record, StepStats):
            sink.step(record)
        else:
            sink.event(*record)
    sink.close()
    return read_run(folder)


def steps(first: int, end: int, loss: float = 1.0) -> Sequence[StepStats]:
    """The steps from first to end - 1."""
    return [stats(step, loss) for step in range(first, end)]


def evaluation(step: int, loss: float) -> tuple[str, dict[str, Any]]:
    return "evaluation", {"step": step, "loss": loss, "metrics": {}, "num_samples": 5, "num_items": 5.0}
