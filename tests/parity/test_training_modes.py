"""Modules that the task has put into evaluation mode stay in it, under every runner and after evaluations."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paceline.job.cluster import Cluster
from paceline.models.training_mode import describe_modes, enter_training, evaluating
from paceline.recipe import Recipe, Strategy
from paceline.session import Session, fit
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from paceline.verification import compare_with_oracle

STEPS, SIZE, RATE = 5, 12, 0.05
X = torch.randn(48, 6, generator=torch.Generator().manual_seed(3)) * 2 + 1


class Trunk(nn.Module):
    """A trunk that nobody trains, before a head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 2)
        self.trunk[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.head(torch.tanh(self.body(self.trunk(x))))
        return hidden


class OwnTrain(Trunk):
    """A model whose own `train()` keeps the trunk in evaluation mode."""

    def train(self, mode: bool = True) -> OwnTrain:
        super().train(mode)
        self.trunk.eval()
        return self


def put_into_eval() -> nn.Module:
    model = Trunk()
    model.trunk.eval()
    return model


def build(make: Callable[[], nn.Module]) -> Task:
    torch.manual_seed(0)

    def loss(model: nn.Module, x: Tensor) -> Loss:
        return Loss((model(x) - x[:, :2]).square().sum(), len(x))

    def links(model: nn.Module) -> list[nn.Module]:
        return [*model.trunk, nn.Sequential(model.body, nn.Tanh()), model.head]

    return Task(make(), list(X), loss, held_out=list(X[:8]), stages=links)


def recipe(strategy: str) -> Recipe:
    return Recipe(
        task="own",
        steps=STEPS,
        batch={"size": SIZE, "shuffle": False, "shards": 4},
        optimizer={"name": "sgd", "lr": RATE},
        evaluate={"every_steps": 2},
        precision={"compute": "fp32"},
        strategy=Strategy.parse(strategy),
    )


def plain_loop(make: Callable[[], nn.Module]) -> dict[str, Tensor]:
    task = build(make)
    model, optimizer = task.model, torch.optim.SGD(task.model.parameters(), RATE)
    if isinstance(model, OwnTrain):
        model.train()
    for step in range(STEPS):
        start = step % 4 * SIZE
        loss = task.loss(model, X[start : start + SIZE])
        optimizer.zero_grad()
        (loss.total / loss.count).backward()
        optimizer.step()
    return model.state_dict()


def distance(session: Session, right: dict[str, Tensor]) -> float:
    """The largest difference after training with evaluations in between; what counts batches must be 0."""
    fit(session)
    found = session.complete().state_dict()
    session.close()
    assert found["trunk.1.num_batches_tracked"] == 0
    return max(float((found[name] - value).abs().max()) for name, value in right.items())


def distances(cluster: Cluster, strategies: tuple[str, ...]) -> dict[str, float]:
    found = {}
    for make in (put_into_eval, OwnTrain):
        right = plain_loop(make)
        for strategy in strategies:
            session = build_test_session(cluster, recipe(strategy), lambda make=make: build(make))
            found[f"{make.__name__} {strategy}"] = distance(session, right)
    return found


@pytest.mark.capability("A6")
def test_a_trunk_in_evaluation_mode_is_that_of_the_plain_loop_under_every_runner() -> None:
    alone = distances(Cluster.single(), ("replicas=1", "replicas=1 lanes=2", "replicas=1 pipeline=2 lanes=2"))
    ways = ("replicas=2", "replicas=1 shard=2 zero=3", "replicas=1 pipeline=2 schedule=1f1b")
    for found in (alone, *run_ranks(distances, 2, ways)):
        assert max(found.values()) < 1e-6, found


def test_verification_keeps_the_modes_in_its_plain_copy() -> None:
    for make in (put_into_eval, OwnTrain):
        report = compare_with_oracle(
            recipe("replicas=1"), build(make), Cluster.single(), torch.device("cpu"), 2
        )
        assert report.ok, report.failure


def test_without_its_marks_a_trunk_is_trained() -> None:
    """The twin: what the modes were made of is what keeps them."""
    session = build_test_session(Cluster.single(), recipe("replicas=1"), lambda: build(put_into_eval))
    for module in session.state.model.modules():
        module.__dict__["_paceline_stays_in_evaluation"] = False
    session.state.model.eval()
    next(session.rounds())
    assert session.state.model.trunk[1].num_batches_tracked > 0
    session.close()


def test_a_line_names_what_stays_in_evaluation_mode() -> None:
    assert "'trunk' and 3 more modules stay in evaluation" in describe_modes(put_into_eval())
    pretrained = Trunk().eval()
    assert "the whole model in evaluation mode" in describe_modes(pretrained)
    assert all(module.training for module in enter_training(pretrained).modules())
    assert describe_modes(Trunk()) == describe_modes(pretrained) == ""


def test_copies_keep_the_modes_and_an_evaluation_leaves_no_trace() -> None:
    model = copy.deepcopy(enter_training(put_into_eval()))
    model.body.eval()  # by a callback, during training
    before = {name: module.training for name, module in model.named_modules()}
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert before == {name: module.training for name, module in model.named_modules()}
    model.eval()  # by a callback that forgot to undo it
    enter_training(model)
    assert model.body.training and not model.trunk[1].training
