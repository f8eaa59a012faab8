"""What activations cost: recomputed in segments under several layouts, and of one micro-batch at a time."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from paceline import Loss, Task
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.testing import run_ranks
from paceline.testing.parity import Trajectory, build_test_session, run_strategy
from tests.peak import peak_bytes
from tests.texts import SMALL_TEXT

GPT = {"text": SMALL_TEXT, "context": 32, "layers": 4, "heads": 2, "width": 16, "dropout": 0.2}
GPT |= {"train_tokens": 20_000, "held_out_tokens": 2048}
STRATEGIES = (
    "replicas=1 shard=2 zero=3 route=native",
    "replicas=1 pipeline=2 schedule=1f1b",
    "replicas=1 tensor=2",
)


def gpt(strategy: str, how: str) -> Recipe:
    return Recipe(
        task="byte-gpt",
        options=GPT,
        steps=4,
        batch={"size": 8, "shards": 4},
        optimizer={"name": "adamw", "lr": 1e-3},
        memory={"recompute": how},
        strategy=Strategy.parse(strategy),
    )


def under_all(cluster: Cluster) -> list[Trajectory]:
    return [run_strategy(cluster, gpt(words, "segments")) for words in STRATEGIES]


@pytest.mark.capability("L1")
def test_segments_give_the_same_bits() -> None:
    plain = run_strategy(Cluster.single(), gpt("replicas=1", "none"))
    assert run_strategy(Cluster.single(), gpt("replicas=1", "segments")).distance(plain) == 0.0


@pytest.mark.soak
@pytest.mark.capability("L1", "D10")
def test_segments_end_where_one_process_ends_that_keeps_everything() -> None:
    """With dropout."""
    plain = run_strategy(Cluster.single(), gpt("replicas=1", "none"))
    for found in run_ranks(under_all, 2):
        for words, end in zip(STRATEGIES, found, strict=True):
            assert end.losses == pytest.approx(plain.losses, rel=1e-5), words


SMALL, TIMES, WIDTH = 512, 8, 64


def wide() -> Task:
    """Its activations are far larger than parameters and samples."""
    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    data = torch.randn(SMALL * TIMES, 1).expand(-1, WIDTH)

    def loss(model: nn.Module, batch: torch.Tensor) -> Loss:
        return Loss(model(batch.contiguous()).square().sum(), len(batch))

    return Task(nn.Sequential(*layers), data, loss)


def step_bytes(size: int, accumulation: int) -> int:
    """The most that tensors of one step take, beside what stays."""
    recipe = Recipe(
        task="own",
        steps=3,
        batch={"size": size, "accumulation": accumulation},
        optimizer={"name": "sgd", "lr": 1e-3},
    )
    session = build_test_session(Cluster.single(), recipe, wide)
    rounds = session.rounds()
    next(rounds)  # what is allocated once is there now
    return peak_bytes(partial(next, rounds))


@pytest.mark.capability("A10")
def test_accumulation_takes_the_activations_of_one_micro_batch() -> None:
    """Eight micro-batches take hardly more than one; the same samples at once take several times as much."""
    one, eight, at_once = step_bytes(SMALL, 1), step_bytes(SMALL * TIMES, TIMES), step_bytes(SMALL * TIMES, 1)
    assert eight <= 1.1 * one and at_once >= 4 * one, (one, eight, at_once)
