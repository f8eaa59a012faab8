"""Mistakes in the user's code are named as such, whatever the strategy; some by `verify --strict` only."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import TaskError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import CPU
from paceline.verification import VerificationReport, build_oracle, compare_with_oracle
from paceline.verification.strict_checks import check_user_code
from tests.parity.correct_tasks import CORRECT_TASKS, Augmented, loss, samples, seeded, small

Build = Callable[[Cluster], Task]


def with_loss(change: Callable[[Cluster], Callable[[Tensor], Any]]) -> Build:
    """A task whose loss is multiplied with something."""

    def build(cluster: Cluster) -> Task:
        factor = change(cluster)

        def changed(model: nn.Module, batch: Any) -> Loss:
            found = loss(model, batch)
            return Loss(found.total * factor(batch[0]), found.count)

        return Task(seeded(small), samples(), changed)

    return build


def counter(cluster: Cluster) -> Callable[[Tensor], float]:
    calls: list[int] = []

    def factor(x: Tensor) -> float:
        calls.append(len(x))
        return 1.0 + 0.01 * len(calls)

    return factor


def own_generator(cluster: Cluster) -> Callable[[Tensor], float]:
    generator = torch.Generator().manual_seed(3)
    return lambda x: 1.0 + float(torch.rand((), generator=generator))


def unseeded(cluster: Cluster) -> Callable[[Tensor], float]:
    return lambda x: 1.0 + os.urandom(1)[0] / 100


def late(cluster: Cluster) -> Callable[[Tensor], float]:
    """Draws in training only, and not before it was called ten times."""
    calls: list[int] = []

    def factor(x: Tensor) -> float:
        calls.append(len(x))
        return 1.0 + (os.urandom(1)[0] / 100 if len(calls) > 10 else 0.0)

    return factor


def of_rank(cluster: Cluster) -> Callable[[Tensor], float]:
    return lambda x: 1.0 + 0.1 * cluster.global_rank


def model_of_rank(cluster: Cluster) -> Task:
    model = seeded(small)
    with torch.no_grad():
        model[2].bias += cluster.global_rank
    return Task(model, samples(), loss)


def data_of_rank(cluster: Cluster) -> Task:
    shift = float(cluster.global_rank)
    return Task(seeded(small), [(x + shift, y) for x, y in samples()], loss)


def own_part_of_the_data(cluster: Cluster) -> Task:
    return Task(seeded(small), samples()[: 40 - cluster.global_rank], loss)


class Unseeded(Augmented):
    """Draws from the system."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.samples[index]
        return x + os.urandom(1)[0] / 100, y


class Remembers(Augmented):
    """Returns another view at every second read."""

    reads = 0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        x, y = self.samples[index]
        return x * (1 + self.reads), y


def clamps_weights(model: nn.Module, batch: Any) -> Loss:
    with torch.no_grad():
        model[0].weight.clamp_(-0.2, 0.2)
    return loss(model, batch)


MISTAKES: dict[str, tuple[Build, str]] = {
    "a counter in the loss": (with_loss(counter), "depends on the number of calls"),
    "a generator of its own": (with_loss(own_generator), "depends on the number of calls"),
    "data that remembers": (
        lambda c: Task(seeded(small), Remembers(), loss),
        "depends on the number of calls",
    ),
    "nobody seeds the loss": (with_loss(unseeded), "the task is not deterministic"),
    "nobody seeds it later": (with_loss(late), "the task is not deterministic"),
    "nobody seeds the data": (
        lambda c: Task(seeded(small), Unseeded(), loss),
        "the task is not deterministic",
    ),
    "a loss that knows its rank": (with_loss(of_rank), "depends on the rank"),
    "a model that knows its rank": (model_of_rank, "ranks built different models"),
    "data that knows its rank": (data_of_rank, "ranks read different data"),
    "data cut by rank": (own_part_of_the_data, "ranks read different data"),
}


def check(cluster: Cluster, name: str) -> VerificationReport:
    recipe = Recipe(task="given", steps=20, batch={"size": 13, "shards": 4})
    return compare_with_oracle(recipe, MISTAKES[name][0](cluster), cluster, CPU, 3)


@pytest.mark.capability("Z2")
def test_mistakes_of_users_are_named() -> None:
    def all_of_them(cluster: Cluster) -> dict[str, VerificationReport]:
        return {name: check(cluster, name) for name in MISTAKES}

    for ranks in zip(*(r.items() for r in run_ranks(all_of_them, 2)), strict=True):
        (name, report), (_, other) = ranks
        assert not report.ok and report.diagnosis.cause == MISTAKES[name][1], (name, report.diagnosis)
        assert report == other


def test_a_loss_that_clamps_weights_is_refused() -> None:
    recipe = Recipe(task="given", steps=20, batch={"size": 13, "shards": 4})
    task = Task(seeded(small), samples(), clamps_weights)
    with pytest.raises(TaskError, match=r"the forward changes the parameter '0\.weight'"):
        compare_with_oracle(recipe, task, Cluster.single(), CPU, 3)


def test_a_model_that_differs_is_named_by_its_tensor() -> None:
    report = run_ranks(check, 2, "a model that knows its rank")[0]
    assert (report.failure.tensor, report.failure.errors) == ("2.bias", (0.0, 1.0))


def counts_one(model: nn.Module, batch: Any) -> Loss:
    return Loss(nn.functional.cross_entropy(model(batch[0]), batch[1]), 1)


def mean_as_sum(model: nn.Module, batch: Any) -> Loss:
    return Loss(nn.functional.cross_entropy(model(batch[0]), batch[1]), len(batch[1]))


def squared(model: nn.Module, batch: Any) -> Loss:
    return Loss(loss(model, batch).total ** 2, len(batch[1]))


@pytest.mark.capability("Z2")
@pytest.mark.parametrize(("wrong", "cause"), [(squared, "the loss does not add up")])
def test_strict_sees_a_loss_that_does_not_add_up(wrong: Any, cause: str) -> None:
    recipe = Recipe(task="given", steps=20, batch={"size": 13, "shards": 4})
    task = Task(seeded(small), samples(), wrong)
    report = compare_with_oracle(recipe, task, Cluster.single(), CPU, 2, strict=True)
    assert not report.ok and report.diagnosis.cause == cause
    assert compare_with_oracle(recipe, task, Cluster.single(), CPU, 2).ok  # both sides share it


@pytest.mark.capability("Z2")
@pytest.mark.parametrize(
    ("wrong", "cause", "said"),
    [
        (counts_one, "the loss counts a batch as one item", "counts 1 item in a sample and as many"),
        (mean_as_sum, "the loss is a mean", "the total is a mean"),
    ],
)
def test_what_strict_sees_of_a_mean_every_session_refuses_too(wrong: Any, cause: str, said: str) -> None:
    recipe = Recipe(task="given", steps=20, batch={"size": 13, "shards": 4})
    task = Task(seeded(small), samples(), wrong)
    report = compare_with_oracle(recipe, task, Cluster.single(), CPU, 2, strict=True)
    assert not report.ok and report.diagnosis.cause == cause
    with pytest.raises(TaskError, match=said):
        compare_with_oracle(recipe, task, Cluster.single(), CPU, 2)


@pytest.mark.parametrize("name", ["plain", "channels-last", "attention", "bf16-parameters", "scalar-gates"])
def test_strict_is_quiet_on_right_losses(name: str) -> None:
    recipe = Recipe(task="given", steps=20, batch={"size": 13, "shards": 4})
    report = compare_with_oracle(recipe, CORRECT_TASKS[name][0](), Cluster.single(), CPU, 2, strict=True)
    assert report.ok, report.diagnosis


class Stopped(nn.Module):
    """Two layers, and something between them that lets no gradient through, or some of it."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(6, 8), between, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x).tanh()))


def halfway(y: Tensor) -> Tensor:
    return y * y.norm(dim=1, keepdim=True).detach()


class StepsTwice(torch.optim.AdamW):
    """Makes its step again."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        super().step(closure)


def steps_again(model: nn.Module) -> torch.optim.Optimizer:
    """A hook makes the step again."""
    made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made.again = False

    def again(own: Any, *_: Any) -> None:
        own.again = not own.again
        if own.again:
            own.step()

    made.register_step_post_hook(again)
    return made


COUPLED = {"rarely-used"}  # the batch chooses the expert: a loss of two samples is not that of each

SHARED: dict[str, tuple[Callable[[], Task], str]] = {  # what a comparison with an oracle cannot see
    "a detach": (
        lambda: Task(seeded(lambda: Stopped(Tensor.detach)), samples(), loss),
        "a gradient does not arrive",
    ),
    "a detach of a part": (
        lambda: Task(seeded(lambda: Stopped(halfway)), samples(), loss),
        "a gradient does not arrive",
    ),
    "a step that steps twice": (
        lambda: Task(seeded(small), samples(), loss, optimizer=lambda m: StepsTwice(m.parameters(), lr=0.01)),
        "stepped twice",
    ),
    "a hook that steps": (
        lambda: Task(seeded(small), samples(), loss, optimizer=steps_again),
        "stepped twice",
    ),
}


@pytest.mark.capability("Z2")
@pytest.mark.parametrize("name", SHARED)
def test_strict_sees_what_both_sides_share(name: str) -> None:
    build, cause = SHARED[name]
    recipe = Recipe(task="given", steps=20, batch={"size": 13, "shards": 4})
    report = compare_with_oracle(recipe, build(), Cluster.single(), CPU, 2, strict=True)
    assert not report.ok and report.diagnosis.cause == cause
    assert compare_with_oracle(recipe, build(), Cluster.single(), CPU, 2).ok


def test_strict_leaves_model_and_optimizer_as_they_were() -> None:
    recipe = Recipe(task="given", steps=20, batch={"size": 13, "shards": 4})
    for name in CORRECT_TASKS.keys() - COUPLED:
        oracle = build_oracle(recipe, CORRECT_TASKS[name][0](), CPU)
        before = {n: t.clone() for n, t in oracle.model.state_dict().items()}
        assert check_user_code(oracle, "fp32", 1) is None, name
        assert all(torch.equal(t, before[n]) for n, t in oracle.model.state_dict().items()), name
        assert not oracle.optimizer.state, name
