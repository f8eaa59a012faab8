"""Optimizers that a user brings, over parts of tensors: those that may end where one process ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from paceline import Loss, Task
from paceline.errors import StrategyError
from paceline.job.cluster import Cluster
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from tests.marks import soak_param
from tests.recipes import recipe_of
from tests.unit.optim.test_compatibility import ACCEPTED, KNOWN, Lars, Make, Signs


def task_with(make: Make) -> Callable[[], Task]:
    def build() -> Task:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        data = list(torch.rand(32, 6, generator=torch.Generator().manual_seed(4)))

        def loss(model: nn.Module, x: Tensor) -> Loss:
            return Loss((model(x).view(-1) - x.sum(1)).square().sum(), len(x))

        return Task(model, data, loss, optimizer=lambda model: make(list(model.parameters())))

    return build


sum_recipe = partial(recipe_of, task="sum", steps=3, batch={"size": 8, "shards": 4})


@pytest.mark.capability("A11", "J13")
def test_it_is_asked_where_a_rank_updates_parts_and_only_there() -> None:
    def said(cluster: Cluster, strategy: str, make: Make) -> str:
        try:
            session = build_test_session(cluster, sum_recipe(strategy), task_with(make))
            list(session.rounds())
        except StrategyError as error:
            return error.what
        return ""

    assert run_ranks(said, 2, "replicas=2", Lars) == ["", ""]
    assert run_ranks(said, 2, "replicas=1 shard=2 zero=1", Signs) == ["", ""]
    for strategy in ("replicas=1 shard=2 zero=1", "replicas=1 shard=2 zero=3"):
        for text in run_ranks(said, 2, strategy, Lars):
            assert text.startswith("Lars needs a whole tensor")


@pytest.mark.capability("A11", "J13")
@pytest.mark.parametrize("strategy", [soak_param("replicas=1 shard=2 zero=1"), "replicas=1 shard=2 zero=3"])
def test_every_elementwise_optimizer_of_torch_ends_where_one_process_ends(strategy: str) -> None:
    def end(cluster: Cluster, of: str, name: str) -> Tensor | str:
        session = build_test_session(cluster, sum_recipe(of), task_with(ACCEPTED[name]))
        try:
            list(session.rounds())
        except KeyError as error:
            return f"KeyError: {error}"
        whole = session.snapshot().tensors()
        return torch.cat(
            [whole[n].detach().reshape(-1).clone() for n in sorted(whole) if n.startswith("model/")]
        )

    def ends(cluster: Cluster, of: str) -> dict[str, Tensor | str]:
        return {name: end(cluster, of, name) for name in KNOWN}

    (right,) = run_ranks(ends, 1, "replicas=1")
    for found in run_ranks(ends, 2, strategy):
        failed = {name: text for name, text in found.items() if isinstance(text, str)}
        assert not failed
        distances = {name: float((found[name] - right[name]).abs().max()) for name in KNOWN}
        assert max(distances.values()) < 1e-5, distances
