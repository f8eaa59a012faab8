"""Cohorts: drawn without replacement by key, dealt to ranks in blocks, trained on clients' own samples."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline import Task
from paceline.errors import DataError, TaskError
from paceline.federated.cohorts import ClientOrder, CohortWork, build_order_of_clients, read_labels
from paceline.recipe import Recipe
from tests.recipes import recipe_of


def own_recipe(num_passes: int = 1, **federated: Any) -> Recipe:
    return recipe_of(f"sync=federated:{num_passes}", batch={}, federated=federated)


def samples(n: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(n)).view(n, 1), torch.arange(n) % 3)


def task_of(data: Any = None, **settings: Any) -> Task:
    return Task(nn.Linear(1, 1), data, lambda model, batch: None, **settings)


def order_of(num_samples: int = 60, num_passes: int = 1, **federated: Any) -> ClientOrder:
    return build_order_of_clients(own_recipe(num_passes, **federated), task_of(samples(num_samples)))


@pytest.mark.capability("Q6")
@pytest.mark.parametrize(("cohort", "size"), [(4, 4), (0.25, 5), (1.0, 20)])
def test_a_cohort_is_drawn_without_replacement_and_every_client_equally_often(cohort: Any, size: int) -> None:
    order, counts = order_of(clients=20, cohort=cohort), Counter[int]()
    for round_number in range(300):
        members = order.cohort(round_number)
        assert [member.position for member in members] == [*range(size)]
        clients = [member.client for member in members]
        assert clients == sorted(set(clients)) and members == order.cohort(round_number)
        counts.update(clients)
    expected = 300 * size / 20
    assert all(abs(counts[client] - expected) <= 5 * expected**0.5 for client in range(20))


@pytest.mark.capability("Q6")
def test_a_poisson_cohort_takes_each_client_by_chance_and_can_be_empty() -> None:
    order = order_of(clients=20, cohort="poisson:0.1")
    sizes = [len(order.cohort(round_number)) for round_number in range(500)]
    assert abs(np.mean(sizes) - 2.0) < 0.3 and min(sizes) == 0 and max(sizes) > 4


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("cohort", [7, "poisson:0.4"])
def test_ranks_have_blocks_of_positions_that_make_up_the_cohort(num_ranks: int, cohort: Any) -> None:
    order = order_of(clients=20, cohort=cohort, batch=2)
    for round_number in range(20):
        works = [CohortWork(order).part(rank, num_ranks) for rank in range(num_ranks)]
        assert [m for work in works for m in work.members(round_number)] == [*order.cohort(round_number)]
        batches = [batch for work in works for batch in work.micro_batches(round_number)]
        assert len(batches) == sum(work.num_micro_batches(round_number) for work in works)
        read = np.concatenate([batch.indices for batch in batches]) if batches else np.zeros(0)
        own = [order.clients.indices[m.client] for m in order.cohort(round_number)]
        assert sorted(read) == sorted(np.concatenate(own) if own else [])


def test_local_steps_replace_passes_and_full_takes_all_samples() -> None:
    ten = order_of(clients=6, cohort=6, batch=4)
    assert (
        ten.batch_sizes(0, 0) == [4, 4, 2]
        and order_of(60, 2, clients=6, cohort=6, batch=4).num_samples(0) == 20
    )
    stepped = order_of(clients=6, cohort=6, batch=4, local_steps=5)
    assert stepped.batch_sizes(0, 0) == [4, 4, 2, 4, 4] and stepped.num_samples(0, 0) == 18
    assert order_of(clients=6, cohort=6, full=True, local_steps=1).batch_sizes(3, 0) == [10]
    # Rounds in which clients read as many samples as there are.
    assert CohortWork(order_of(clients=6, cohort=2)).steps_per_epoch == 3
    assert CohortWork(order_of(60, 3, clients=6, cohort=2)).steps_per_epoch == 1


def test_clients_of_the_task_are_kept_apart_and_one_may_have_no_samples() -> None:
    own = task_of(clients={"north": samples(3), "empty": samples(0), "south": samples(5)})
    order = build_order_of_clients(own_recipe(clients=3, cohort=3, partition="natural"), own)
    assert len(own.data) == 8 and order.clients.names == ["north", "empty", "south"]
    assert [len(indices) for indices in order.clients.indices] == [3, 0, 5]
    assert order.batch_sizes(0, 1) == []
    with pytest.raises(DataError, match=r"has 3 clients, and federated\.clients = 100") as caught:
        build_order_of_clients(own_recipe(partition="natural"), own)
    assert caught.value.next_step == "set federated.clients = 3"
    with pytest.raises(DataError, match="names no clients"):
        build_order_of_clients(own_recipe(partition="natural"), task_of(samples(9)))
    with pytest.raises(TaskError, match="has no loss"):
        Task(nn.Linear(1, 1), samples(3))


def test_labels_are_the_last_column_the_targets_or_the_last_item_of_each_sample() -> None:
    class Targets(list[int]):
        targets = (2, 0, 1)

    assert read_labels(samples(4), required=False).tolist() == [0, 1, 2, 0]
    assert read_labels(torch.utils.data.Subset(samples(9), [4, 8]), required=False).tolist() == [1, 2]
    assert read_labels(Targets(range(3)), required=False).tolist() == [2, 0, 1]
    assert read_labels([(0.5, "cat"), (0.1, "dog")], required=True).tolist() == ["cat", "dog"]
    assert read_labels([(0.5, "cat")], required=False) is None
    with pytest.raises(DataError, match="needs a label for each sample"):
        read_labels([torch.zeros(2)], required=True)
