"""The sum to a thousandth under every strategy that there is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy, load_recipe
from paceline.recipe.strategy_text import PRESETS
from paceline.session import evaluate
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]
RECIPES = Path(__file__).parents[2] / "recipes"
BY_RANKS: Mapping[int, tuple[str, ...]] = {
    1: ("replicas=1 lanes=2", "replicas=1 pipeline=2 schedule=1f1b lanes=2"),
    2: (
        "ddp", "fsdp", "zero1", "zero2", "zero3", "mirrored", "multi-worker-mirrored", "central-storage",
        "hogwild", "local-sgd", "diloco", "pipedream", "gpipe", "1f1b", "auto", "replicas=1 tensor=2",
        "codec=int8", "codec=topk:0.25", "route=ring",
    ),
    3: (
        "parameter-server", "servers=1 sync=server-async", "servers=1 sync=backup:1",
        "servers=1 sync=bounded:2",
    ),
    4: ("hsdp", "3d"),
}  # fmt: skip


def sum_recipe(words: str) -> Recipe:
    """As it is, with a second hidden layer where a stage needs one; tensor ranks cut the first two layers."""
    strategy = Strategy.parse(words)
    wide = ["options.hidden=[64, 64]"] if strategy.tensor > 1 and strategy.pipeline > 1 else []
    recipe = load_recipe(RECIPES / "sum.toml", wide, strategy=words)
    return recipe.replace(tensor={"layers.0": "column", "layers.3": "row"}) if strategy.tensor > 1 else recipe


def losses(cluster: Cluster, make: Any, strategies: tuple[str, ...]) -> dict[str, float]:
    """On held-out data, by strategy."""
    found = {}
    for words in strategies:
        session = build_test_session(cluster, make(words))
        for _ in session.rounds():
            pass
        evaluation = evaluate(session)
        assert evaluation is not None
        found[words] = evaluation.loss
        session.close()
    return found


def test_every_preset_is_among_them() -> None:
    assert {*PRESETS} <= {words for several in BY_RANKS.values() for words in several}


@pytest.mark.capability("V1")
@pytest.mark.parametrize("ranks", BY_RANKS)
def test_the_sum_is_learned_to_a_thousandth_under_every_strategy(ranks: int) -> None:
    """But context: a sample of it has no positions."""
    for found in run_ranks(losses, ranks, sum_recipe, BY_RANKS[ranks], deadline=900.0):
        assert {words: loss for words, loss in found.items() if not loss < 1e-3} == {}
