"""A server whose workers code: what coding loses stays with a worker, so who runs which part is laid down."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.sync.server.server_policies import BoundedStaleness, WorkerPush
from paceline.testing import run_ranks
from paceline.testing.parity import Trajectory, build_test_session, whole_trajectory

DIGITS = {
    "task": "digits",
    "options": {"model": "mlp", "hidden": [32]},
    "steps": 6,
    "batch": {"size": 48, "shards": 6},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "strategy": Strategy.parse("servers=1 sync=server codec=topk:0.1"),
}


def to_whoever_asks(policy: BoundedStaleness, worker: int) -> int | None:
    """The next part in order, as before parts had workers."""
    part = min({*range(policy._num_workers)} - policy._handed_out)
    policy._handed_out.add(part)
    return part


def trained(cluster: Cluster, folder: Path, late: int, *, anybody: bool) -> Trajectory:
    """The end of a run in which one worker comes to the first step when another has pushed already."""
    has_come, push, own = folder / f"{late}-{anybody}", BoundedStaleness.push, BoundedStaleness._own_part

    def told(policy: BoundedStaleness, worker: int, found: WorkerPush) -> Any:
        has_come.touch()
        return push(policy, worker, found)

    session = build_test_session(cluster, Recipe(**DIGITS))
    BoundedStaleness.push = told
    if anybody:
        BoundedStaleness._own_part = to_whoever_asks
    try:
        while cluster.global_rank == late and not has_come.exists():
            time.sleep(0.01)
        return whole_trajectory([stats.loss for stats in session.rounds()], session)
    finally:
        BoundedStaleness.push, BoundedStaleness._own_part = push, own
        session.close()


def apart(cluster: Cluster, folder: Path) -> list[float]:
    """How far runs end from each other in which other workers are late; then where anybody has any part."""
    found = []
    for anybody in (False, True):
        one, other = (trained(cluster, folder, late, anybody=anybody) for late in (1, 2))
        found.append(one.distance(other))
    return found


@pytest.mark.timeout(240)
@pytest.mark.capability("H4", "I3")
def test_a_coded_run_under_a_server_ends_equally_whoever_comes_first(tmp_path: Path) -> None:
    """And the twin, whose parts go to whoever asks, does not."""
    for same, other in run_ranks(apart, 3, tmp_path):
        assert same == 0.0 < 1e-4 < other
