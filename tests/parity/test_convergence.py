"""Training on digits learns under every strategy and codec.

Codecs over five seeds, twice the epochs and a second task: benchmarks/codec_losses.py."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.comm.collectives import CodedCollective, Collective
from paceline.job.cluster import Cluster
from paceline.parallel.session_context import Components
from paceline.recipe import Recipe, Strategy, load_recipe
from paceline.session import evaluate
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from tests.marks import soak_param

RECIPE = Path(__file__).parents[2] / "recipes" / "digits.toml"
SHORT = ["steps=40", "epochs=", "schedule.warmup_steps=0", "evaluate.every_steps=", "run_dir="]
BY_RANKS: Mapping[int, tuple[str, ...]] = {
    2: (
        "shard=2 zero=1", "shard=2 zero=2", "replicas=1 tensor=2", "replicas=1 pipeline=2 sync=pipedream",
        "central-storage", "sync=hogwild", "sync=gossip:2", "sync=diloco:4",
    ),
    3: (
        "servers=1 sync=server-async", "servers=1 sync=bounded:2", "servers=1 sync=backup:1",
        "servers=2 sync=server",
    ),
    4: ("replicas=2 shard=2 zero=3", "replicas=4 sync=local:4"),
}  # fmt: skip
FURTHER: Mapping[int, tuple[str, ...]] = {
    2: ("replicas=2", "shard=2 zero=3", "replicas=1 pipeline=2 schedule=1f1b", "sync=local:4"),
    3: ("servers=1 sync=server",),
    4: ("replicas=2 pipeline=2",),
}


def losses(cluster: Cluster, strategies: tuple[str, ...]) -> dict[str, tuple[float, float]]:
    """Before and after training, on held-out data, by strategy."""
    found = {}
    for words in strategies:
        session = build_test_session(cluster, load_recipe(RECIPE, SHORT, strategy=words))
        before = evaluate(session)
        list(session.rounds())
        after = evaluate(session)
        assert before is not None and after is not None and session.state.step == 40
        found[words] = before.loss, after.loss
        session.close()
    return found


@pytest.mark.capability("Z1", clause="one unchanged script passes under at least 12 modes")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", BY_RANKS)
@pytest.mark.parametrize("modes", [BY_RANKS, soak_param(FURTHER)], ids=["some", "the others"])
def test_one_recipe_learns_in_every_mode(modes: Mapping[int, tuple[str, ...]], ranks: int) -> None:
    for found in run_ranks(losses, ranks, modes[ranks], deadline=300.0):
        assert {words: pair for words, pair in found.items() if not pair[1] < 0.5 * pair[0]} == {}


SEEDS = (1, 2)
FORGETS = "topk:0.01, no feedback"


def recipe(codec: str, seed: int) -> Recipe:
    """Plain SGD, whose steps add up to the sum of the gradients: what is sent late is not lost."""
    keys: dict[str, Any] = {
        "options": {"model": "mlp", "hidden": [64]},
        "epochs": 20,
        "batch": {"size": 64, "shards": 2},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "schedule": {"decay": "cosine", "warmup_steps": 50},
    }
    return Recipe(
        task="digits", seed=seed, strategy=Strategy(replicas=2, route="native", codec=codec), **keys
    )


def forget(path: Collective) -> Collective:
    """Keep nothing of what coding loses."""
    if isinstance(path, CodedCollective):
        path.codec.needs_error_feedback = False
    return path


def held_out_losses(cluster: Cluster, words: list[str]) -> dict[str, list[float]]:
    """Of every codec, by seed."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {word: [] for word in words}
    for word, losses in found.items():
        components: Any = Components(collective=forget) if word == FORGETS else None
        for seed in SEEDS:
            session = build_test_session(cluster, recipe(word.partition(",")[0], seed), components=components)
            list(session.rounds())
            answer = evaluate(session)
            session.close()
            assert answer is not None
            losses.append(answer.loss)
    return found


@pytest.mark.soak
@pytest.mark.capability("H1", "H4", "H5")
@pytest.mark.timeout(600)
def test_a_codec_costs_no_loss_while_what_it_drops_is_sent_later() -> None:
    words = ["fp32", "int8", "topk:0.01", "topk:0.01+int4", FORGETS]
    found = run_ranks(held_out_losses, 2, words, deadline=560.0)[0]
    mean = {word: statistics.fmean(losses) for word, losses in found.items()}
    ratio = {word: loss / mean["fp32"] for word, loss in mean.items()}
    assert ratio["int8"] < 1.01
    assert ratio["topk:0.01"] < 1.02 and ratio["topk:0.01+int4"] < 1.02
    assert min(found[FORGETS]) > 1.5 * max(found["fp32"])
