"""Replicas that agree in every step end where one process ends, whatever their shares and last batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from paceline import Loss, Task
from paceline.comm import BucketReducer
from paceline.data.work import LockstepWork
from paceline.errors import TaskError
from paceline.job.cluster import Cluster
from paceline.models import GPT, GPTConfig
from paceline.parallel.state_hash import state_sha256
from paceline.recipe import Recipe, Strategy
from paceline.session import Components
from paceline.testing import run_ranks
from paceline.testing.parity import Trajectory, build_test_session, make_task, run_oracle, run_strategy
from paceline.testing.planted_faults import PLANTED_FAULTS
from tests.marks import soak_param
from tests.parity.training_runs import each_case

STEPS = 24
MLP = {"model": "mlp", "hidden": [48, 32]}
SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9}
ADAMW = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1, "clip_norm": 1.0}


def digits(**changes: object) -> Recipe:
    settings: dict[str, object] = {
        "task": "digits",
        "options": MLP,
        "steps": STEPS,
        "batch": {"size": 46, "shards": 4},
        "optimizer": SGD,
    }
    return Recipe(**(settings | changes))


def worst(recipe: Recipe, ranks: list[Trajectory], **oracle: object) -> float:
    reference = run_oracle(recipe, STEPS, **oracle)
    return max(end.distance(reference) for end in ranks)


@pytest.mark.capability("A2", "A4", "A6", "I1", "J1")
@pytest.mark.parametrize("world", [soak_param(1), soak_param(2), 3, 4])
def test_sgd_ends_where_the_full_batch_ends(world: int) -> None:
    """46 samples in 4 shards: shares are unequal on every number of ranks but one."""
    recipe = digits()
    ends = run_ranks(run_strategy, world, recipe)
    assert worst(recipe, ends, shards=1) <= 1e-6
    assert all(end.distance(ends[0]) == 0.0 for end in ends), "replicas differ"


@pytest.mark.capability("A2", "J2", "J11")
@pytest.mark.parametrize("world", [soak_param(2), 3])
def test_adamw_with_a_clip_ends_where_the_full_batch_ends(world: int) -> None:
    recipe = digits(optimizer=ADAMW, schedule={"decay": "cosine", "warmup_steps": 5})
    assert worst(recipe, run_ranks(run_strategy, world, recipe), shards=1) <= 1e-5


def double_task() -> Task:
    task = make_task(digits())
    model = task.model.double()

    def loss(model: nn.Module, batch: object) -> Loss:
        x, y = batch
        total = F.cross_entropy(model(x.double()), y, reduction="sum")
        return Loss(total, len(y))

    return replace(task, model=model, loss=loss)


@pytest.mark.capability("A2")
def test_in_float64_the_difference_is_that_of_float64() -> None:
    recipe = digits()
    ends = run_ranks(partial(run_strategy, task=double_task), 3, recipe)
    assert worst(recipe, ends, task=double_task, shards=1) <= 1e-12


@pytest.mark.capability("A2")
def test_a_broken_reduction_is_far_from_the_oracle() -> None:
    """The mutation twin of the tests above: with one part broken they fail by orders of magnitude."""
    recipe = digits(batch={"size": 47, "shards": 4})
    faults = ("sum-instead-of-mean", "mean-of-means", "same-data", "bucket-not-reduced")
    cases = [(recipe, None, PLANTED_FAULTS[fault].components(2)) for fault in faults]
    reference = run_oracle(recipe, STEPS)
    for fault, *ends in zip(faults, *run_ranks(each_case, 2, run_strategy, cases), strict=True):
        assert max(end.distance(reference) for end in ends) > 1e-4, fault


@pytest.mark.capability("A10")
@pytest.mark.parametrize("shards", [soak_param(1), soak_param(2), 8])
def test_accumulated_micro_batches_are_one_batch(shards: int) -> None:
    recipe = digits(batch={"size": 46, "shards": shards})
    assert run_oracle(recipe, STEPS, shards=1).distance(run_strategy(Cluster.single(), recipe)) <= 1e-6


@pytest.mark.capability("A10", "G14")
def test_one_all_reduce_a_bucket_however_many_micro_batches() -> None:
    def calls(cluster: Cluster, shards: int) -> int:
        session = build_test_session(cluster, digits(batch={"size": 46, "shards": shards}))
        num_steps = len(list(session.rounds()))
        found = session.net.ledger.rows["all_reduce", "replica"].calls
        assert isinstance(session.rule.reduction, BucketReducer)
        assert found == num_steps * session.rule.reduction.num_buckets
        return found

    for few, many in run_ranks(each_case, 2, calls, [(2,), (8,)]):
        assert few == many


class Odd(nn.Module):
    """Tied weights, a branch that only some samples take, a parameter nobody uses, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.tied = nn.Linear(64, 64)
        self.tied.weight = self.first.weight
        self.rare = nn.Linear(64, 10)
        self.head = nn.Linear(64, 10)
        self.unused = nn.Parameter(torch.ones(7))
        self.frozen = nn.Parameter(torch.ones(64), requires_grad=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.tied(torch.tanh(self.first(x * self.frozen)))
        out = self.head(h)
        return out + self.rare(h) if bool((y == 3).any()) else out


def odd_task() -> Task:
    def loss(model: nn.Module, batch: object) -> Loss:
        x, y = batch
        return Loss(F.cross_entropy(model(x, y), y, reduction="sum"), len(y))

    torch.manual_seed(0)
    return replace(make_task(digits()), model=Odd(), loss=loss, initialize=None, held_out=None)


@pytest.mark.capability("A2")
@pytest.mark.parametrize("world", [soak_param(1), 3])
def test_tied_unused_frozen_and_rarely_used_parameters(world: int) -> None:
    """With weight decay, a parameter without a gradient must not decay: None is not zero."""
    recipe = digits(
        batch={"size": 6, "shards": 3},
        optimizer={"name": "adamw", "lr": 1e-3, "weight_decay": 0.5, "decay_on": "all"},
    )
    ends = run_ranks(partial(run_strategy, task=odd_task), world, recipe)
    assert worst(recipe, ends, task=odd_task) <= 1e-5
    assert torch.equal(ends[0].parameters["unused"], torch.ones(7))
    assert torch.equal(ends[0].parameters["frozen"], torch.ones(64))
    assert "tied.weight" not in ends[0].parameters


def padded_task() -> Task:
    """Every sample has its own number of items: the loss is a token mean, not a sample mean."""

    def loss(model: nn.Module, batch: object) -> Loss:
        x, lengths = batch
        mask = torch.arange(16) < lengths[:, None]
        error = (model(x).squeeze(-1) - x.sum(-1)) ** 2
        return Loss((error * mask).sum(), mask.sum())

    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    data = [(torch.rand(16, 8, generator=g), 1 + i * i % 16) for i in range(97)]
    return Task(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), data, loss)


@pytest.mark.capability("A6")
@pytest.mark.parametrize("world", [2, 3])
def test_shards_with_unequal_numbers_of_tokens_are_weighted_by_tokens(world: int) -> None:
    recipe = digits(batch={"size": 12, "shards": 3}, optimizer={"name": "sgd", "lr": 0.01})
    ends = run_ranks(partial(run_strategy, task=padded_task), world, recipe)
    assert worst(recipe, ends, task=padded_task, shards=1) <= 1e-6


@pytest.mark.capability("A12", "A4", "A5")
@pytest.mark.parametrize("world", [2, 3])
def test_an_epoch_that_does_not_divide_uses_every_sample_once(world: int) -> None:
    """97 samples, batches of 12 in 3 shards: the last step has one sample, and ranks without any."""

    def seen(cluster: Cluster) -> list[int]:
        session = build_test_session(
            cluster, digits(steps=None, epochs=1, batch={"size": 12, "shards": 3}), padded_task
        )
        mine = [int(i) for micro_batch in session.micro_batches() for i in micro_batch.indices]
        total = sum(stats.num_samples for stats in session.rounds())
        assert total == 97
        return mine

    found = [i for mine in run_ranks(seen, world) for i in mine]
    assert sorted(found) == list(range(97))


@pytest.mark.capability("A2")
def test_reduction_sum_is_mean_times_count() -> None:
    """SGD on the sum with rate lr / B is SGD on the mean with rate lr."""
    mean = digits(optimizer={"name": "sgd", "lr": 0.046})
    by_sum = digits(
        optimizer={"name": "sgd", "lr": 0.001}, batch={"size": 46, "shards": 4, "reduction": "sum"}
    )
    reference = run_oracle(mean, STEPS, shards=1)
    assert max(end.distance(reference) for end in run_ranks(run_strategy, 2, by_sum)) <= 1e-6


@pytest.mark.capability("A1")
def test_two_runs_with_one_seed_have_equal_bits_and_the_loss_falls() -> None:
    recipe = digits(optimizer=ADAMW | {"lr": 3e-3}, steps=120)
    first, second = (run_strategy(Cluster.single(), recipe) for _ in range(2))
    assert first.distance(second) == 0.0
    assert first.losses[0] > 2.0 and sum(first.losses[-10:]) / 10 < 0.6
    other = run_strategy(Cluster.single(), digits(optimizer=ADAMW | {"lr": 3e-3}, steps=120, seed=2))
    assert first.distance(other) > 1e-3


@pytest.mark.capability("G3")
def test_replicas_that_start_apart_are_made_equal() -> None:
    def start(cluster: Cluster) -> Trajectory:
        def task() -> Task:
            built = double_task()
            with torch.no_grad():
                for p in built.model.parameters():
                    p.add_(cluster.global_rank)
            return replace(built, initialize=None)

        return run_strategy(cluster, digits(steps=1), task)

    ends = run_ranks(start, 3)
    assert all(end.distance(ends[0]) == 0.0 for end in ends)


def ready_order_differs(cluster: Cluster) -> Trajectory:
    """Tiny buckets: every parameter its own, launched in one order whatever backward does."""
    components = Components(
        reducer=lambda tensors, parts, sums, _, **how: BucketReducer(tensors, parts, sums, 1, **how)
    )
    recipe = digits(batch={"size": 6, "shards": 3}, optimizer={"name": "sgd", "lr": 0.01})
    return run_strategy(cluster, recipe, odd_task, components)


@pytest.mark.capability("G10")
def test_one_bucket_a_parameter_gives_the_same_parameters() -> None:
    recipe = digits(batch={"size": 6, "shards": 3}, optimizer={"name": "sgd", "lr": 0.01})
    assert worst(recipe, run_ranks(ready_order_differs, 3), task=odd_task) <= 1e-6


STEPS_UNEVEN, SIZE, LR = 20, 110, 0.2
DEALT = partial(LockstepWork, shares=(1, 10))  # of eleven shards
VOCABULARY, CONTEXT, PAD = 17, 12, -100


def recipe() -> Recipe:
    return Recipe(
        task="own",
        steps=STEPS_UNEVEN,
        batch={"size": SIZE, "shards": 11, "shuffle": False},
        optimizer={"name": "sgd", "lr": LR},
    )


def regression() -> Task:
    """The first ten samples of every batch are unlike the others."""
    torch.manual_seed(2)
    x = torch.randn(2 * SIZE, 6, dtype=torch.float64)
    x[torch.arange(2 * SIZE) % SIZE < 10] += 1.0
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))

    def loss(model: nn.Module, batch: Tensor) -> Loss:
        return Loss((model(batch) - batch.square().sum(1)).square().sum(), len(batch))

    return Task(model.double(), list(x), loss)


def padded() -> Task:
    """Sequences of 1 to 11 next tokens; what is behind them is no item, and the first ten are the longest."""
    torch.manual_seed(3)
    lengths = torch.where(torch.arange(2 * SIZE) % SIZE < 10, 11, 1 + torch.arange(2 * SIZE) % 4)
    text = torch.randint(VOCABULARY, (2 * SIZE, CONTEXT))
    behind = torch.arange(CONTEXT) > lengths[:, None]

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Loss:
        tokens_BT, next_BT = batch
        logits = model(tokens_BT).flatten(0, 1)
        total = F.cross_entropy(logits, next_BT.flatten(), ignore_index=PAD, reduction="sum")
        return Loss(total, (next_BT != PAD).sum())

    data = list(zip(text[:, :-1], text.masked_fill(behind, PAD)[:, 1:], strict=True))
    model = GPT(GPTConfig(VOCABULARY, CONTEXT, layers=1, heads=2, width=16))
    return Task(model.double(), data, loss)


TASKS = {"regression": regression, "padded language model": padded}


def plain(make: Callable[[], Task]) -> dict[str, Tensor]:
    """Full batches, and nothing of ours but the task."""
    task = make()
    optimizer = torch.optim.SGD(task.model.parameters(), lr=LR)
    for step in range(STEPS_UNEVEN):
        batch: Any = default_collate([task.data[(SIZE * step + i) % len(task.data)] for i in range(SIZE)])
        loss = task.loss(task.model, batch)
        optimizer.zero_grad()
        (loss.total / loss.count).backward()
        optimizer.step()
    return {name: p.detach() for name, p in task.model.named_parameters()}


def ends(cluster: Cluster, components: Components) -> dict[str, dict[str, Tensor]]:
    return {
        name: run_strategy(cluster, recipe(), make, components).parameters for name, make in TASKS.items()
    }


@pytest.fixture(scope="module")
def right() -> dict[str, dict[str, Tensor]]:
    return {name: plain(make) for name, make in TASKS.items()}


def distances(found: dict[str, dict[str, Tensor]], right: dict[str, dict[str, Tensor]]) -> list[float]:
    return [max(float((found[name][n] - p).abs().max()) for n, p in right[name].items()) for name in TASKS]


@pytest.mark.capability("A6")
def test_shares_of_ten_and_a_hundred_end_where_a_plain_loop_ends(right: Any) -> None:
    for found in run_ranks(ends, 2, Components(work=DEALT)):
        assert max(distances(found, right)) <= 1e-12


@pytest.mark.capability("A6")
def test_a_mean_of_means_ends_elsewhere(right: Any) -> None:
    """The mutation twin."""
    rule = PLANTED_FAULTS["mean-of-means"].components(2).rule
    for found in run_ranks(ends, 2, Components(work=DEALT, rule=rule)):
        assert min(distances(found, right)) > 1e-3


def build(*between: nn.Module, draws: bool = False) -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), *between, nn.Tanh(), nn.Linear(4, 1))

    def loss(model: nn.Module, x: Tensor) -> Loss:
        noise = random.random() + float(np.random.random()) if draws else 1.0
        return Loss((model(x) - noise).square().sum(), len(x))

    return Task(model, list(torch.randn(19, 5)), loss)


def recipe_short(strategy: str, *, reproducible: bool = True, shards: int = 4) -> Recipe:
    """Steps of 8, 8 and 3 samples."""
    return Recipe(
        task="own",
        epochs=2,
        batch={"size": 8, "shards": shards},
        reproducible=reproducible,
        strategy=Strategy.parse(strategy),
        runtime={"deadline_seconds": 40, "bucket_bytes": 64},
    )


def hashes(cluster: Cluster, strategies: tuple[str, ...], draws: bool) -> dict[str, str]:
    found = {}
    for strategy in strategies:
        session = build_test_session(cluster, recipe_short(strategy), lambda: build(draws=draws))
        list(session.rounds())
        found[strategy] = state_sha256(session.snapshot().tensors())
        session.close()
    return found


@pytest.mark.capability("I10")
def test_short_tails_and_foreign_draws_keep_the_bits() -> None:
    """In the last step of an epoch a rank of four has no samples; the loss may draw from any generator."""
    ways = ("replicas=4 route=native", "replicas=4", "replicas=2 shard=2 zero=1 route=native")
    cases = [(ways, False), (ways, True)]
    alone = run_ranks(each_case, 1, hashes, [(("replicas=1",), draws) for _, draws in cases])[0]
    for rank in run_ranks(each_case, 4, hashes, cases):
        for found, right in zip(rank, alone, strict=True):
            assert {*found.values()} == {*right.values()}


def test_a_norm_over_one_sample_is_one_sentence() -> None:
    def said(cluster: Cluster) -> str:
        one_each = recipe_short("replicas=2", reproducible=False, shards=8)
        session = build_test_session(cluster, one_each, lambda: build(nn.BatchNorm1d(4)))
        with pytest.raises(TaskError, match="has too few values for a norm over the batch"):
            list(session.rounds())
        session.abort()
        session.close()
        return "said"

    assert run_ranks(said, 2) == ["said"] * 2
