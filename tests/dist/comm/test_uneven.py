"""Ranks with different numbers of batches: nobody hangs, and the average is over those that contribute."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.data import LockstepWork, MicroBatch
from paceline.recipe import BatchRecipe, OptimizerRecipe, Recipe, RuntimeRecipe
from paceline.session import Components, build_session
from paceline.sync import PendingUpdate, UpdatePart
from paceline.task import Loss, Task
from paceline.testing import run_ranks

BATCH = 4  # samples in a micro-batch
NUM_BATCHES = (7, 10)  # of the two ranks
UNEVEN = (2 * BATCH * max(NUM_BATCHES), max(NUM_BATCHES), 2, 2 * BATCH)  # samples, steps, shards, batch


@dataclass(frozen=True)
class FirstRunsOut(LockstepWork):
    """Replica 0 has nothing left after its last batch, as if its data had ended."""

    def micro_batches(self, step: int) -> tuple[MicroBatch, ...]:
        return super().micro_batches(step) if step < NUM_BATCHES[self.replica_rank] else ()

    def num_micro_batches(self, step: int) -> int:
        return len(self.micro_batches(step))


@dataclass(frozen=True)
class Both(LockstepWork):
    """The oracle: one process that runs what the two ranks run."""

    def micro_batches(self, step: int) -> tuple[MicroBatch, ...]:
        return tuple(u for u in super().micro_batches(step) if step < NUM_BATCHES[u.shard])

    def num_micro_batches(self, step: int) -> int:
        return len(self.micro_batches(step))


def make_task(num_samples: int) -> Task:
    """A regression with BatchNorm, so that buffers have to agree, too."""
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(num_samples, 6, generator=draw)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=0.3), nn.Tanh(), nn.Linear(8, 1))
    return Task(model, TensorDataset(torch.arange(num_samples), x, x.sum(1, keepdim=True)), squared_error)


def squared_error(model: nn.Module, batch: Sequence[Tensor]) -> Loss:
    _, x, y = batch
    if len(x) == 1:
        model.eval()  # BatchNorm needs two samples for a variance
    error = model(x) - y
    model.train()
    return Loss(error.square().sum(), len(x))


def diluted(parts: dict[str, UpdatePart]) -> dict[str, UpdatePart]:
    """The twin: divides as if the rank that ran out had contributed a batch of zeros."""
    right = parts["divide"]

    def divide(record: PendingUpdate) -> None:
        agreed, record.tally = record.tally, replace(record.tally, count=2.0 * BATCH)
        right(record)
        record.tally = agreed

    return {**parts, "divide": divide}


def train(
    cluster, components: Components, num_samples: int, steps: int, shards: int, size: int
) -> dict[str, Any]:
    recipe = Recipe(
        task="in memory",
        steps=steps,
        batch=BatchRecipe(size=size, shards=shards),
        optimizer=OptimizerRecipe(name="sgd", lr=0.05, momentum=0.9),
        runtime=RuntimeRecipe(device="cpu", deadline_seconds=20.0),
    )
    session = build_session(
        recipe, make_task(num_samples), cluster, torch.device("cpu"), components=components
    )
    used = [i for step in range(steps) for u in session.work.micro_batches(step) for i in u.indices.tolist()]
    stats = list(session.rounds())
    return {
        "used": used,
        "items": [s.num_items for s in stats],
        "losses": [s.loss for s in stats],
        "state": {name: t.clone() for name, t in session.state.model.state_dict().items()},
    }


def assert_parity(ranks: list[dict[str, Any]], oracle: dict[str, Any]) -> None:
    for found in ranks:
        assert found["items"] == oracle["items"]
        assert found["losses"] == pytest.approx(oracle["losses"], rel=1e-5)
        for name, value in oracle["state"].items():
            assert torch.equal(found["state"][name], ranks[0]["state"][name]), name
            assert (found["state"][name] - value).abs().max() <= 1e-6, name


@pytest.mark.capability("A12")
def test_seven_and_ten_batches_end_together_and_average_who_contributed() -> None:
    ranks = run_ranks(train, 2, Components(work=FirstRunsOut), *UNEVEN)
    (oracle,) = run_ranks(train, 1, Components(work=Both), *UNEVEN)
    assert_parity(ranks, oracle)
    assert [len(rank["used"]) for rank in ranks] == [BATCH * n for n in NUM_BATCHES]
    used = [i for rank in ranks for i in rank["used"]]
    assert sorted(used) == sorted(set(oracle["used"]))
    assert sum(oracle["items"]) == BATCH * sum(NUM_BATCHES) == len(used)


@pytest.mark.capability("A12")
def test_the_comparison_sees_an_average_over_a_rank_that_had_nothing() -> None:
    ranks = run_ranks(train, 2, Components(work=FirstRunsOut, update=diluted), *UNEVEN)
    (oracle,) = run_ranks(train, 1, Components(work=Both), *UNEVEN)
    assert ranks[0]["items"] == oracle["items"]
    with pytest.raises(AssertionError):
        assert_parity(ranks, oracle)


@pytest.mark.capability("A12", "A4")
@pytest.mark.parametrize("num_samples", [9, 10, 15, 19])
def test_a_tail_with_fewer_samples_than_ranks_leaves_some_without_a_micro_batch(num_samples: int) -> None:
    sizes = (num_samples, 2 * -(-num_samples // 8), 4, 8)  # two epochs; a tail of 1, 2, 7 or 3 samples
    ranks = run_ranks(train, 4, Components(), *sizes)
    (oracle,) = run_ranks(train, 1, Components(), *sizes)
    assert_parity(ranks, oracle)
    assert sorted(i for rank in ranks for i in rank["used"]) == sorted([*range(num_samples)] * 2)
    assert sum(oracle["items"]) == 2 * num_samples
