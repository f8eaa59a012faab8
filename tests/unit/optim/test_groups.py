"""What an optimizer writes into its groups survives a resume; what the recipe gave does not come back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import CheckpointError
from paceline.job.cluster import Cluster
from paceline.optim import UserOptimizer
from paceline.recipe import Recipe, Strategy
from paceline.session import Session
from paceline.state.optimizer_state import ParamGroupState
from paceline.state.train_state import TrainState
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session


class ScheduleFree(UserOptimizer):
    """As schedule-free SGD (Defazio et al. 2024, arXiv:2405.15682): the sum of weights is the group's."""

    def update(self, params: Sequence[Tensor], grads: Sequence[Tensor], step: int) -> None:
        self.group["weight_sum"] = self.group.get("weight_sum", 0.0) + self.group["lr"] ** 2
        self.group["gain"] *= 0.7
        share = self.group["lr"] ** 2 / self.group["weight_sum"]
        for p, g in zip(params, grads, strict=True):
            z = self.state[p].setdefault("z", p.clone())
            z -= self.group["gain"] * g
            p.lerp_(z, share)


def session(cluster: Cluster, strategy: str = "replicas=all", optimizer: Any = None) -> Session:
    def task() -> Task:
        torch.manual_seed(0)
        data = torch.randn(12, 4)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        return Task(
            model,
            data,
            lambda m, x: Loss(m(x).square().sum(), len(x)),
            optimizer=optimizer or (lambda m: ScheduleFree(m.named_parameters(), lr=0.3, gain=1.0)),
        )

    recipe = Recipe(task="own", steps=8, batch={"size": 6, "shards": 2}, strategy=Strategy.parse(strategy))
    return build_test_session(cluster, recipe, task)


def resumed(cluster: Cluster, strategy: str) -> tuple[list[float], list[float]]:
    """Losses of the last four steps, straight and after a resume."""
    straight = session(cluster, strategy)
    rounds = straight.rounds()
    first = [next(rounds).loss for _ in range(4)]
    snapshot = straight.snapshot()
    tensors = {name: t.clone() for name, t in snapshot.tensors().items()}
    scalars = json.loads(json.dumps(snapshot.scalars()))
    again = session(cluster, strategy)
    again.restore(tensors, scalars)
    assert first
    return [stats.loss for stats in rounds], [stats.loss for stats in again.rounds()]


@pytest.mark.capability("J13", "N2")
@pytest.mark.parametrize(
    "processes, strategy", [(1, "replicas=1"), (2, "replicas=2"), (2, "replicas=1 shard=2 zero=1")]
)
def test_a_rule_that_keeps_numbers_in_its_group_resumes_where_it_stopped(
    processes: int, strategy: str
) -> None:
    for straight, again in run_ranks(resumed, processes, strategy):
        assert again == straight and len(again) == 4


def optimizer_of(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, **options)


def test_only_what_changed_is_kept() -> None:
    optimizer = optimizer_of(momentum=0.9)
    memory = ParamGroupState(optimizer)
    assert memory.changed() == [{}]
    optimizer.param_groups[0]["lr"] = 0.01  # the schedule's
    optimizer.param_groups[0] |= {"initial_lr": 0.1, "k": 3, "momentum": 0.8}
    assert memory.changed() == [{"k": 3, "momentum": 0.8}]


def test_a_resume_with_another_recipe_trains_with_that() -> None:
    """The weight decay is the new recipe's, the counter that of the run."""
    old, new = optimizer_of(weight_decay=0.1), optimizer_of(weight_decay=0.2)
    before, after = ParamGroupState(old), ParamGroupState(new)
    old.param_groups[0]["k"] = 3
    new.param_groups[0]["stray"] = 1
    after.restore(before.changed())
    group = new.param_groups[0]
    assert group["weight_decay"] == 0.2 and group["k"] == 3 and "stray" not in group


@pytest.mark.parametrize("value", [torch.ones(2), [1.0], {"a": 1}], ids=["tensor", "list", "dict"])
def test_what_cannot_be_saved_is_refused_at_the_first_save(value: Any) -> None:
    optimizer = optimizer_of()
    state = TrainState(nn.Linear(1, 1), optimizer)
    optimizer.param_groups[0]["memory"] = value
    with pytest.raises(CheckpointError, match=r"in group\['memory'\]"):
        state.groups.changed()


def test_betas_that_a_scheduler_moves_are_kept_and_stay_a_tuple() -> None:
    """`OneCycleLR` moves the momentum by default."""
    old, new = (torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=0.1) for _ in range(2))
    before, after = ParamGroupState(old), ParamGroupState(new)
    torch.optim.lr_scheduler.OneCycleLR(old, 0.1, 20)
    moved = old.param_groups[0]["betas"]
    assert moved != new.param_groups[0]["betas"]
    after.restore(json.loads(json.dumps(before.changed())))
    assert new.param_groups[0]["betas"] == moved and type(moved) is tuple


def test_a_list_that_grows_in_place_is_seen() -> None:
    optimizer = optimizer_of()
    optimizer.param_groups[0]["history"] = []
    memory = ParamGroupState(optimizer)
    assert memory.changed() == [{}]
    optimizer.param_groups[0]["history"].append(1.0)
    with pytest.raises(CheckpointError, match="list"):
        memory.changed()
