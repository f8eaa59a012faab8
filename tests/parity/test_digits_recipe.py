"""The recipe of digits as it is, trained by one argument in every way: all of them learn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from paceline.job.cluster import Cluster
from paceline.recipe import load_recipe
from paceline.session import evaluate
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session

RECIPE = Path(__file__).parents[2] / "recipes" / "digits.toml"
SHORT = ["steps=40", "epochs=", "schedule.warmup_steps=0", "evaluate.every_steps=", "run_dir="]
BY_RANKS: Mapping[int, tuple[str, ...]] = {
    2: (
        "replicas=2", "shard=2 zero=1", "shard=2 zero=2", "shard=2 zero=3", "replicas=1 tensor=2",
        "replicas=1 pipeline=2 schedule=1f1b", "replicas=1 pipeline=2 sync=pipedream", "central-storage",
        "sync=hogwild", "sync=gossip:2", "sync=local:4", "sync=diloco:4",
    ),
    3: (
        "servers=1 sync=server", "servers=1 sync=server-async", "servers=1 sync=bounded:2",
        "servers=1 sync=backup:1", "servers=2 sync=server",
    ),
    4: ("replicas=2 shard=2 zero=3", "replicas=2 pipeline=2", "replicas=4 sync=local:4"),
}  # fmt: skip


def losses(cluster: Cluster, strategies: tuple[str, ...]) -> dict[str, tuple[float, float]]:
    """Before and after training, on held-out data, by strategy."""
    found = {}
    for words in strategies:
        session = build_test_session(cluster, load_recipe(RECIPE, SHORT, strategy=words))
        before = evaluate(session)
        for _ in session.rounds():
            pass
        after = evaluate(session)
        assert before is not None and after is not None and session.state.step == 40
        found[words] = before.loss, after.loss
        session.close()
    return found


@pytest.mark.capability("Z1", clause="one unchanged script passes under at least 12 modes")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", BY_RANKS)
def test_one_recipe_learns_in_every_mode(ranks: int) -> None:
    for found in run_ranks(losses, ranks, BY_RANKS[ranks], deadline=300.0):
        assert {words: pair for words, pair in found.items() if not pair[1] < 0.5 * pair[0]} == {}
