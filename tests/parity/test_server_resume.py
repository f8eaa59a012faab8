"""A run under a server that goes on from a checkpoint: ranks agree, and it is the run without a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.storage import StorageFolder
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.session import checkpointing
from paceline.session.fit_loop import hash_and_compare
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session

pytestmark = [pytest.mark.timeout(600), pytest.mark.capability("N2", "B3")]
STRATEGIES = (
    "servers=1 replicas=2 sync=server",
    "servers=1 replicas=2 sync=server codec=topk:0.1",
    "servers=2 replicas=1 sync=server",
)


def digits(strategy: str, optimizer: str) -> Recipe:
    """Rounds of one step."""
    settings: dict[str, Any] = {
        "task": "digits",
        "options": {"model": "mlp", "hidden": [24, 15]},
        "steps": 8,
        "batch": {"size": 46, "shards": 6},
        "optimizer": {"name": optimizer, "lr": 1e-3},
        "strategy": Strategy.parse(strategy),
    }
    return Recipe(**settings)


def hashes(cluster: Cluster, recipe: Recipe, run_dir: Path) -> tuple[list[str], list[str]]:
    """After each round of a run that is saved in the middle, and of one that goes on from there."""
    found = []
    for goes_on in (False, True):
        session, seen, name = build_test_session(cluster, recipe), list[str](), "step-00000004"
        if goes_on:
            checkpointing.restore_checkpoint(session, StorageFolder(str(run_dir / "checkpoints")), name)
        saver = checkpointing.build_saver(session, run_dir, print)
        for _ in session.rounds():
            seen.append(hash_and_compare(session, []))  # an error, where ranks differ
            if session.state.step == 4:
                saver.wait_published(saver.save())
        session.close()
        found.append(seen)
    return found[0], found[1]


@pytest.mark.parametrize("optimizer", ["adamw", "rmsprop"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_agree_after_a_resume(strategy: str, optimizer: str, tmp_path: Path) -> None:
    """A worker updates nothing: what a checkpoint had of an optimizer is the server's."""
    for whole, rest in run_ranks(hashes, 3, digits(strategy, optimizer), tmp_path):
        assert len(whole) == 8 and rest == whole[4:]
