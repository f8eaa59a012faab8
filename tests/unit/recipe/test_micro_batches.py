"""Into how many micro-batches a batch is cut: one a rank unless something else is asked, in equal shares."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.cli.common_options import processes_for
from paceline.data import KeyedOrder
from paceline.data.work import LockstepWork
from paceline.errors import RecipeError, StrategyError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, max_sharers, num_micro_batches
from paceline.recipe.support import fill_replicas, num_sharers
from paceline.session.build import build_session
from paceline.session.start_warnings import uneven_shares_warning
from paceline.task import Loss, Task


def recipe(batch: dict[str, Any], strategy: str = "ddp", **changes: Any) -> Recipe:
    return Recipe(task="digits", steps=3, batch=batch, strategy=strategy, **changes)


@pytest.mark.parametrize(
    ("batch", "strategy", "processes", "number"),
    [
        ({}, "ddp", 1, 1),
        ({}, "ddp", 3, 3),
        ({}, "ddp", 40, 32),  # refused: a rank would have nothing
        ({"size": 2}, "ddp", 1, 1),
        ({"accumulation": 4}, "ddp", 1, 4),
        ({"accumulation": 4}, "ddp", 3, 12),
        ({"shards": 5}, "ddp", 3, 5),
        ({}, "shard=2 zero=1", 4, 4),
        ({}, "lanes=2", 2, 4),
        ({}, "tensor=2", 4, 2),
        ({}, "pipeline=2", 4, 16),
        ({"size": 7}, "pipeline=2", 4, 6),
        ({"accumulation": 1}, "pipeline=2", 4, 2),
        ({}, "pipeline=2 lanes=2", 1, 8),
        ({}, "servers=1 sync=server-async", 3, 2),
        ({}, "sync=local:4", 2, 2),
    ],
)
def test_the_default_follows_from_batch_ranks_and_strategy(
    batch: dict[str, Any], strategy: str, processes: int, number: int
) -> None:
    assert num_micro_batches(recipe(batch, strategy), processes) == number


@pytest.mark.parametrize(("batch", "number"), [({}, 8), ({"size": 3}, 3), ({"shards": 6}, 6)])
def test_a_reproducible_run_has_one_number_for_any_processes(batch: dict[str, Any], number: int) -> None:
    chosen = recipe(batch, reproducible=True)
    assert {num_micro_batches(chosen, processes) for processes in (1, 2, 3, 8)} == {number}
    with pytest.raises(RecipeError, match=r"batch\.accumulation: expected batch\.shards with reproducible"):
        recipe({"accumulation": 2}, reproducible=True)


def samples(chosen: Recipe, num_samples: int, processes: int, step: int) -> list[int]:
    """How many samples each rank has in a step."""
    order, shards = KeyedOrder(num_samples, chosen.batch.size, 1), num_micro_batches(chosen, processes)
    works = [LockstepWork(order, shards, 1, rank, processes) for rank in range(processes)]
    return [sum(len(micro_batch.indices) for micro_batch in work.micro_batches(step)) for work in works]


@pytest.mark.capability("A4")
@pytest.mark.parametrize("accumulation", [None, 1, 2, 3])
def test_shares_of_ranks_differ_by_at_most_one_sample(accumulation: int | None) -> None:
    """Of full batches, and of the smaller last one of an epoch: 46 samples on 3 ranks are 15, 15, 16."""
    for size, processes in product((46, 32, 13), (1, 2, 3, 4)):
        chosen = recipe({"size": size, "accumulation": accumulation})
        for step in range(3):
            found = samples(chosen, 2 * size + size // 2 + 1, processes, step)
            assert max(found) - min(found) <= 1
            assert sum(found) == (size if step < 2 else size // 2 + 1)
    assert sorted(samples(recipe({"size": 46}), 46, 3, 0)) == [15, 15, 16]


def test_a_number_of_the_user_is_kept_and_its_cost_is_said() -> None:
    """The twin: whole shards are dealt, so that what is computed does not depend on the ranks."""
    chosen = recipe({"size": 46, "shards": 4})
    assert sorted(samples(chosen, 46, 3, 0)) == [11, 12, 23]
    (text,) = uneven_shares_warning(4, 3, max_sharers(chosen).limit_key)
    assert text.startswith("warning: batch.shards = 4 is no multiple of the 3 ranks") and "1.5 times" in text
    (default,) = uneven_shares_warning(8, 3, max_sharers(recipe({}, reproducible=True)).limit_key)
    assert "by default, with reproducible" in default and "1.1 times" in default
    assert list(uneven_shares_warning(6, 3, "batch.shards")) == []
    assert list(uneven_shares_warning(7, 2, max_sharers(recipe({"size": 7})).limit_key)) == []


@pytest.mark.parametrize(
    ("batch", "changes", "says"),
    [
        ({"size": 4}, {}, "replicas=5 is more than batch.size=4"),
        ({"size": 8, "accumulation": 2}, {}, "replicas=5 is more than batch.size / batch.accumulation=4"),
        ({"shards": 3}, {}, "replicas=5 is more than batch.shards=3"),
        ({"size": 4}, {"reproducible": True}, "more than batch.shards (by default, with reproducible)=4"),
    ],
)
def test_a_refusal_names_what_the_user_wrote(
    batch: dict[str, Any], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(StrategyError) as caught:
        processes_for(recipe(batch, **changes), 5, 1)
    assert says in caught.value.what and ("batch.shards" in caught.value.what) == ("shards" in says)


def test_a_batch_of_four_trains_as_it_is() -> None:
    assert processes_for(recipe({"size": 4}), 1, 1) == 1
    assert num_sharers(fill_replicas(recipe({}).strategy, 4)) == 4


class Normed(nn.Module):
    """A norm over the batch, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({}, ["BatchNorm statistics and dropout masks depend on the number of micro-batches (now 1,"]),
        ({"shards": 1}, []),
        ({"shards": 8}, ["BatchNorm1d computes its statistics over only 4 samples"]),
        ({"sync_batchnorm": True}, ["dropout masks depend on the number of micro-batches (now 1,"]),
    ],
)
def test_what_depends_on_the_number_is_said_when_a_session_is_built(
    batch: dict[str, Any], says: list[str]
) -> None:
    def loss(model: nn.Module, x: list[Tensor]) -> Loss:
        return Loss(model(x[0]).square().sum(), len(x[0]))

    told: list[str] = []
    chosen, task = recipe(batch), Task(model=Normed(), data=TensorDataset(torch.ones(64, 2)), loss=loss)
    build_session(chosen, task, Cluster.single(), torch.device("cpu"), warn=told.append).close()
    found = [text.removeprefix("warning: ") for text in told if "micro-batch" in text]
    assert len(found) == len(says) and all(
        text.startswith(said) for text, said in zip(found, says, strict=True)
    )
