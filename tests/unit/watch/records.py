"""Records as a run writes them, in files that a test can cut, rotate and damage."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.observe.step_stats import PHASES, StepStats, build_rank_records


def run_record(step: int = 0, num_steps: int = 100, ranks: int = 2) -> dict[str, Any]:
    numbers = {"parameters": 10, "gradient_bytes": 40, "tally_bytes": 8, "threads": 1, "pid": 0}
    texts = {"task": "digits", "strategy": "replicas=2", "devices": "cpu", "precision": "fp32", "host": "far"}
    more = {"versions": {}, "ordered": True, "num_steps": num_steps, "ranks": ranks}
    return {"event": "run", "step": step, "time": 1000.0, **numbers, **texts, **more}


def step_record(step: int, loss: float | str = 1.0, seconds: float = 0.5, **metrics: float) -> dict[str, Any]:
    stats = StepStats(
        step, 0, 0.0, metrics, 8, 8.0, 2.0, 0.1, True, 1.0, 0, seconds, dict.fromkeys(PHASES, 0.1), 0.0
    )
    return {**stats.record(), "loss": loss, "time": 1000.0 + step, "rank": 0}


def rank_records(step: int, seconds: tuple[float, ...]) -> list[dict[str, Any]]:
    """One window of two rounds; of each rank the seconds of a round, half of them in backward."""
    rows = {
        rank: [[s, 0.0, 0.0, s / 2, 0.0, 0.0, 0.0, 0.0, 64.0, s, 5e5, 1e6]] * 2
        for rank, s in enumerate(seconds)
    }
    return [{"event": "ranks", "time": 1000.0, **record} for record in build_rank_records(step, rows)]


def append(folder: Path, *records: Mapping[str, Any], end: str = "\n") -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n".join(json.dumps(record) for record in records) + end)
