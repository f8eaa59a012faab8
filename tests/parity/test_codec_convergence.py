"""What codecs cost in loss on real digits: over two seeds, with error feedback and without.

Five seeds, twice the epochs and a second task: benchmarks/codec_losses.py.
"""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch

from paceline.comm.collectives import CodedCollective, Collective
from paceline.job.cluster import Cluster
from paceline.parallel.session_context import Components
from paceline.recipe import Recipe, Strategy
from paceline.session.evaluation import evaluate
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session

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
        pieces: Any = Components(collective=forget) if word == FORGETS else None
        for seed in SEEDS:
            session = build_test_session(cluster, recipe(word.partition(",")[0], seed), pieces=pieces)
            for _ in session.rounds():
                pass
            answer = evaluate(session)
            session.close()
            assert answer is not None
            losses.append(answer.loss)
    return found


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
