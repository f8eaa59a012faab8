"""Clients of a group as one batched computation: the steps of clients alone, on any number of processes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline import Loss, Task
from paceline.errors import StrategyError, TaskError
from paceline.federated.vectorized_clients import PlainSGD
from paceline.job.cluster import Cluster
from paceline.models import MLP
from paceline.recipe import Recipe
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, Trajectory, build_test_session, run_strategy
from paceline.verification import compare_with_oracle
from tests.marks import soak_param
from tests.parity.training_runs import each_case
from tests.recipes import recipe_of

SGD = {"name": "sgd", "lr": 0.1}
RAGGED = (3, 200, 15, 15, 42, 10, 7, 200, 1, 15)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The bits of one thread, in this process as well."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def recipe(vectorize: int, clients: int = len(RAGGED), passes: int = 2, **settings: Any) -> Recipe:
    federated = {"clients": clients, "cohort": clients, "partition": "natural", "vectorize": vectorize}
    federated |= settings.pop("federated", {})
    defaults: dict[str, Any] = {"steps": 3, "batch": {}, "optimizer": SGD, "federated": federated}
    return recipe_of(f"sync=federated:{passes}", **(defaults | settings))


def loss(model: nn.Module, batch: Any) -> Loss:
    x, y = batch
    logits = model(x)
    return Loss(F.cross_entropy(logits, y, reduction="sum"), len(x), {"right": (logits.argmax(1) == y).sum()})


def ragged_task(dtype: torch.dtype, model: nn.Module | None = None, sizes: tuple[int, ...] = RAGGED) -> Task:
    """Clients whose sizes leave tails, with labels that a client has only some of."""
    generator = torch.Generator().manual_seed(5)

    def draw(number: int, n: int) -> TensorDataset:
        x = torch.randn(n, 6, generator=generator, dtype=torch.float64) + number % 3
        return TensorDataset(x.to(dtype), (x.sum(1) > number % 3).long() + number % 2)

    torch.manual_seed(2)
    sources = {f"site-{number}": draw(number, n) for number, n in enumerate(sizes)}
    return Task(model or MLP(6, (8,), 4).to(dtype), loss=loss, clients=sources)


CASES: dict[str, dict[str, Any]] = {
    "SGD": {},
    "groups of four, and FedProx with a clip": {
        "federated": {"proximal": 0.1, "vectorize": 4, "clip_norm": 0.3},
        "optimizer": {**SGD, "clip_norm": 0.5},
    },
    "decay, a clip of values and FedAdam": {
        "optimizer": {**SGD, "l2": 0.01, "clip_value": 0.02},
        "outer": {"name": "adam", "lr": 0.05},
    },
    "local steps of a Poisson cohort": {
        "federated": {"cohort": "poisson:0.5", "local_steps": 5, "batch": 4, "vectorize": 3}
    },
    "all samples at once, equal weights": {"federated": {"full": True, "local_steps": 2, "weights": "equal"}},
}


def both(case: dict[str, Any], dtype: torch.dtype) -> tuple[Trajectory, Trajectory]:
    make = partial(ragged_task, dtype)
    alone = {**case, "federated": {**case.get("federated", {}), "vectorize": 0}}
    return run_strategy(Cluster.single(), recipe(0, **alone), make), run_strategy(
        Cluster.single(), recipe(10, **case), make
    )


@pytest.mark.capability("Q2")
@pytest.mark.parametrize("name", CASES)
def test_a_group_takes_the_steps_of_clients_alone(name: str) -> None:
    """In float64 to the rounding of a sum, also the losses; clients of 1, 3 and 200 samples with tails."""
    plain, batched = both(CASES[name], torch.float64)
    assert batched.distance(plain) <= 1e-12
    assert batched.losses == pytest.approx(plain.losses, rel=1e-12)


def test_float32_differs_by_rounding() -> None:
    plain, batched = both({}, torch.float32)
    assert 0.0 < batched.distance(plain) <= 1e-5


@pytest.mark.capability("Q2")
def test_a_step_that_forgets_the_size_of_a_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: the tails of clients are divided by the size of a whole batch."""
    plain_step = PlainSGD.step

    def step(self: PlainSGD, weights: Any, gradients: Any, counts: Any, start: Any) -> None:
        plain_step(self, weights, gradients, 10.0, start)

    monkeypatch.setattr(PlainSGD, "step", step)
    plain, batched = both({}, torch.float64)
    assert batched.distance(plain) > 1e-3


def final_state(cluster: Cluster, case: dict[str, Any]) -> dict[str, Tensor]:
    return run_strategy(cluster, recipe(3, **case), partial(ragged_task, torch.float32)).parameters


@pytest.mark.capability("Q2")
@pytest.mark.parametrize("world", [soak_param(2), 3])
def test_a_group_has_the_same_bits_on_any_number_of_processes_and_the_oracle_agrees(world: int) -> None:
    """Groups of three positions are dealt whole, so ten clients are four groups on two and three ranks."""
    settings = {"reproducible": True}
    alone = final_state(Cluster.single(), settings)
    for state in (ranks[0] for ranks in run_ranks(each_case, world, final_state, [(settings,)])):
        assert all(torch.equal(state[name], value) for name, value in alone.items())
    task = ragged_task(torch.float32)
    report = compare_with_oracle(recipe(3, **settings), task, Cluster.single(), CPU, 3)
    assert report.ok and report.steps == 3, report.failure


class Branching(nn.Linear):
    """A module that decides by a value of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if float(self.weight.detach().sum()) > 0 else 1.0)


class Counting(nn.Linear):
    """A module that replaces a buffer."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return super().forward(x)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ((nn.Linear(6, 4), nn.BatchNorm1d(4)), r"cannot run '1' \(BatchNorm1d\)"),
        ((nn.Linear(6, 4), nn.Dropout(0.5)), r"cannot run '1' \(Dropout\)"),
        ((Branching(6, 4),), r"cannot run '0' \(Branching\)"),
        ((Counting(6, 4),), "writes to the buffer '0.calls'"),
        ((MLP(6, (8,), 4, dropout=0.3),), r"\(KeyedDropout\) would draw one mask for all clients"),
    ],
)
def test_models_that_torch_func_cannot_run_are_refused_by_name(layers: Any, words: str) -> None:
    task = partial(ragged_task, torch.float32, nn.Sequential(*layers), (8, 9))
    session = build_test_session(Cluster.single(), recipe(2, clients=2), task)
    with pytest.raises(TaskError, match=words) as caught:
        next(session.rounds())
    assert "federated.vectorize = 0" in caught.value.next_step


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [({"name": "adamw"}, "the optimizer is AdamW"), ({**SGD, "momentum": 0.9}, "momentum")],
)
def test_optimizers_other_than_plain_sgd_are_refused(optimizer: dict[str, Any], words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        build_test_session(
            Cluster.single(), recipe(2, optimizer=optimizer), partial(ragged_task, torch.float32)
        )
