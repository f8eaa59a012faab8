"""Another optimizer for each group of parameters: as in a plain loop, and saved with all that it knows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import ByGroup, Loss, Task
from paceline.errors import StrategyError, TaskError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session

pytestmark = pytest.mark.capability("J18")
STEPS, SIZE, CLIP = 12, 12, 0.5
STRATEGIES = ("replicas=2", "replicas=1 shard=2 zero=1", "replicas=1 shard=2 zero=3", "replicas=1 pipeline=2")


def optimizers(model: Any) -> list[torch.optim.Optimizer]:
    first, last = model[0], model[2]
    return [
        torch.optim.AdamW(first.parameters(), lr=0.02, weight_decay=0.1),
        torch.optim.SGD(last.parameters(), lr=0.1, momentum=0.9),
    ]


def task() -> Task:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))
    x = torch.randn(SIZE * STEPS, 6)

    def loss(model: nn.Module, batch: Tensor) -> Loss:
        return Loss((model(batch) - batch.square().sum(1)).square().sum(), len(batch))

    return Task(model, list(x), loss, optimizer=lambda model: ByGroup(*optimizers(model)))


def recipe(words: str = "replicas=1") -> Recipe:
    return Recipe(
        task="own",
        steps=STEPS,
        batch={"size": SIZE, "shards": 4, "shuffle": False},
        schedule={"decay": "cosine"},
        optimizer={"clip_norm": CLIP},
        strategy=Strategy.parse(words),
    )


def plain(first: int = 0, last: int = 2) -> dict[str, Tensor]:
    """Two optimizers of PyTorch, of these two layers, and their rates set by hand."""
    made = task()
    several = optimizers({0: made.model[first], 2: made.model[last]})
    rates = [one.param_groups[0]["lr"] for one in several]
    for step in range(STEPS):
        batch = torch.stack(made.data[SIZE * step : SIZE * (step + 1)])
        loss = made.loss(made.model, batch)
        made.model.zero_grad()
        (loss.total / loss.count).backward()
        nn.utils.clip_grad_norm_(made.model.parameters(), CLIP)
        for one, rate in zip(several, rates, strict=True):
            one.param_groups[0]["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / STEPS))
            one.step()
    return {name: p.detach() for name, p in made.model.named_parameters()}


def trained(cluster: Cluster, strategies: Sequence[str]) -> list[dict[str, Tensor]]:
    ends = []
    for words in strategies:
        session = build_test_session(cluster, recipe(words), task)
        for _ in session.rounds():
            pass
        ends.append({name: t.clone() for name, t in session.snapshot().tensors().items()})
    return ends


def distance(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return max(float((found[f"model/{name}"] - p).abs().max()) for name, p in right.items())


def test_each_group_has_its_own_rule_under_every_layout() -> None:
    right = plain()
    for found in run_ranks(trained, 2, STRATEGIES):
        for words, end in zip(STRATEGIES, found, strict=True):
            assert distance(end, right) <= 1e-5, words
            assert {"optimizer/0.weight/exp_avg", "optimizer/2.weight/momentum_buffer"} <= end.keys()


def test_rules_that_have_changed_places_end_elsewhere() -> None:
    """The mutation twin."""
    (found,) = trained(Cluster.single(), ["replicas=1"])
    assert distance(found, plain()) <= 1e-6 and distance(found, plain(2, 0)) > 1e-2


def test_a_run_goes_on_with_what_each_of_them_knows() -> None:
    whole = trained(Cluster.single(), ["replicas=1"])[0]
    first, second = (
        build_test_session(Cluster.single(), recipe(), task),
        build_test_session(Cluster.single(), recipe(), task),
    )
    for _ in first.rounds():
        if first.state.step == 5:
            break
    second.state.load(first.state.tensors(), first.state.scalars())
    for _ in second.rounds():
        pass
    assert all(torch.equal(t, whole[name]) for name, t in second.snapshot().tensors().items())


class ByTheNorm(torch.optim.SGD):
    """Its update of a value depends on the whole tensor."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad / p.grad.norm()


def refused(cluster: Cluster) -> str:
    def own() -> Task:
        made = task()
        first, last = made.model[0], made.model[2]
        several = torch.optim.SGD(first.parameters(), lr=0.1), ByTheNorm(last.parameters(), lr=0.1)
        return replace(made, optimizer=lambda _: ByGroup(*several))

    with pytest.raises(StrategyError) as error:
        build_test_session(cluster, recipe("replicas=1 shard=2 zero=1"), own)
    return str(error.value)


def test_one_that_does_not_suit_the_strategy_is_named() -> None:
    assert all("ByTheNorm needs a whole tensor" in said for said in run_ranks(refused, 2))


def test_a_parameter_has_one_optimizer() -> None:
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(TaskError, match="one is in the groups of two"):
        ByGroup(torch.optim.SGD([p], lr=0.1), torch.optim.Adam([p]))
