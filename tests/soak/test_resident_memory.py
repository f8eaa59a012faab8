"""Resident memory of whole runs: layouts that are chosen for memory take less of it than replicas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hostile.jobs import end_of, prepare, start

LARGEST_RATIO = {"replicas=1 shard=2 zero=3": 1.0, "replicas=1 pipeline=2": 0.7}
"""The aim is 0.7 for both. ZeRO-3 was measured at 0.90 to 0.96 (docs/howto/layouts.md)."""


def resident_bytes(folder: Path, strategy: str) -> float:
    """Return the proportional memory of both ranks together, after a save, with three layers of 5,000."""
    folder.mkdir()
    prepare(folder)
    (folder / "large.toml").write_text(
        'task = "digits"\nsteps = 24\n[options]\nhidden = [5000, 5000, 5000]\n'
        '[batch]\nsize = 16\nshards = 2\n[checkpoint]\nevery_steps = 6\n[optimizer]\nname = "adamw"\n'
    )
    words = ("train", "large.toml", "-n", "2", "--strategy", strategy)
    with start(folder, *words) as job:
        try:
            end = end_of(job, seconds=1200)
        finally:
            job.kill()
    assert end.code == 0, end.err
    (metrics,) = folder.glob("runs/*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    last = {row["rank"]: row["proportional_bytes"] for row in rows if row.get("event") == "ranks"}
    return float(sum(last.values()))


@pytest.mark.soak
@pytest.mark.timeout(4000)
def test_sharded_parameters_and_stages_take_less_than_replicas(tmp_path: Path) -> None:
    replicas = resident_bytes(tmp_path / "replicas", "replicas=2")
    for number, (strategy, ratio) in enumerate(LARGEST_RATIO.items()):
        assert resident_bytes(tmp_path / str(number), strategy) <= ratio * replicas, strategy
