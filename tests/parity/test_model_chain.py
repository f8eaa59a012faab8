"""The chain of a pipeline is the model: what travels between links, what the loss may do, what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import TaskError
from paceline.job.cluster import Cluster
from paceline.models import KeyedDropout
from paceline.parallel.pipeline.model_chain import describe_difference
from paceline.recipe import Recipe, Strategy
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session, make_task
from paceline.verification import VerificationReport, compare_with_oracle
from tests.marks import soak_param


def digits(strategy: str = "replicas=1 pipeline=2") -> Recipe:
    return Recipe(
        task="digits",
        steps=3,
        batch={"size": 46, "shards": 4},
        optimizer={"name": "adamw", "lr": 1e-3},
        strategy=Strategy.parse(strategy),
    )


def verify(cluster: Cluster, recipe: Recipe) -> VerificationReport:
    return compare_with_oracle(recipe, task(), cluster, CPU, 3)


class Chain(nn.Module):
    """In-place activations, where stages may be cut; dropout; a mask that travels with the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 10)
        self.act, self.dropout = nn.ReLU(inplace=True), KeyedDropout(0.2)

    def forward(self, x: Tensor, mask: Tensor, *, scale: Tensor) -> Tensor:
        return self.c(self.dropout(self.act(masked(self.act(self.b(self.act(self.a(x * scale)))), mask))))


def masked(x: Tensor, mask: Tensor) -> Tensor:
    return x * mask


class Head(nn.Module):
    """From here on a tuple travels: float32, bool, int16, complex64 and float64."""

    def __init__(self, chain: Chain) -> None:
        super().__init__()
        self.a = chain.a

    def forward(self, x: Tensor, mask: Tensor, *, scale: Tensor) -> tuple[Tensor, ...]:
        y = self.a(x * scale)
        return y, mask, torch.arange(5, dtype=torch.int16), torch.complex(y, y), torch.zeros(0, 3).double()


class Middle(nn.Module):
    def __init__(self, chain: Chain) -> None:
        super().__init__()
        self.b, self.act = chain.b, chain.act

    def forward(
        self, y: Tensor, mask: Tensor, count: Tensor, z: Tensor, none: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert mask.dtype == torch.bool and count.dtype == torch.int16 and none.shape == (0, 3)
        assert count.tolist() == [0, 1, 2, 3, 4]
        both = self.act(y) * 0.5 + z.imag.relu() * 0.5  # a gradient flows through the complex one as well
        return self.b(both), mask


class Mask(nn.Module):
    def __init__(self, chain: Chain) -> None:
        super().__init__()
        self.act = chain.act

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return masked(self.act(x), mask)


def tuples(chain: Chain) -> list[nn.Module]:
    return [Head(chain), Middle(chain), Mask(chain), chain.act, chain.dropout, chain.c]


def without_dropout(chain: Chain) -> list[nn.Module]:
    return [link for link in tuples(chain) if not isinstance(link, KeyedDropout)]


def loss(model: nn.Module, batch: Sequence[Tensor]) -> Loss:
    """The model sees the images brighter by half, with a mask, and a scale by name."""
    images, targets = batch
    mask = torch.ones(32, dtype=torch.bool)
    mask[::3] = False
    scores = model(images + 0.5, mask, scale=torch.tensor(0.5))
    return Loss(F.cross_entropy(scores, targets, reduction="sum"), len(images))


def penalised(model: nn.Module, batch: Sequence[Tensor]) -> Loss:
    found = loss(model, batch)
    return Loss(found.total + 0.01 * sum(p.square().sum() for p in model.parameters()), found.count)


def twice(model: nn.Module, batch: Sequence[Tensor]) -> Loss:
    a, b = loss(model, batch), loss(model, batch)
    return Loss(a.total + b.total, a.count)


def task(stages: Any = tuples, of: Any = loss) -> Task:
    torch.manual_seed(3)
    made = make_task(digits())
    return replace(made, model=Chain(), initialize=None, stages=stages, loss=of, held_out=None)


@pytest.mark.capability("D1")
@pytest.mark.parametrize("num_stages", [soak_param(2), 3])
def test_tuples_of_any_dtype_travel_and_the_loss_says_what_goes_in(num_stages: int) -> None:
    report = run_ranks(verify, num_stages, digits(f"replicas=1 pipeline={num_stages}"))[0]
    assert report.ok, (report.failure, report.diagnosis)
    assert report.steps == 3


@pytest.mark.capability("D1")
@pytest.mark.parametrize(
    "stages, of, words",
    [
        (without_dropout, loss, "in training"),
        (tuples, penalised, "uses the model's parameters"),
        (tuples, twice, "calls the model twice"),
        (lambda chain: [nn.Identity(), *tuples(chain)], loss, "Identity"),
    ],
    ids=["no dropout", "penalty", "two calls", "tuple to one"],
)
def test_what_a_stage_would_compute_wrongly_is_refused(stages: Any, of: Any, words: str) -> None:
    def build(cluster: Cluster) -> str:
        try:
            build_test_session(cluster, digits(), lambda: task(stages, of))
        except (TaskError, TypeError) as error:
            return str(error)
        return ""

    assert all(words in text for text in run_ranks(build, 2))


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


@pytest.mark.capability("D1")
@pytest.mark.parametrize(
    "stages, words",
    [
        (None, "is not nn.Sequential"),
        (lambda m: [m.a, m.b], "another result"),
        (lambda m: [m.a], "leaves out"),
    ],
)
def test_a_chain_that_is_not_the_model_is_refused(stages: Any, words: str) -> None:
    def run(cluster: Cluster) -> str:
        def odd() -> Task:
            return replace(make_task(recipe), model=Odd(), initialize=None, stages=stages)

        recipe = digits()
        try:
            build_test_session(cluster, recipe, odd)
        except TaskError as error:
            return str(error)
        return ""

    assert all(words in text for text in run_ranks(run, 2))


@pytest.mark.parametrize(
    "right, found, words",
    [
        (torch.ones(2), torch.ones(2), ""),
        ((torch.ones(2), torch.tensor([1, 2])), (torch.ones(2), torch.tensor([1, 2])), ""),
        ({"logits": torch.tensor([torch.nan])}, torch.tensor([torch.nan]), ""),
        (
            {"logits": torch.ones(2), "past_key_values": object()},
            torch.ones(2),
            "2 values (logits, past_key_values)",
        ),
        ({"logits": object()}, torch.ones(2), "value logits is object in the model and Tensor in the chain"),
        (torch.ones(2), torch.ones(3), "value 0 is float32 [2] in the model and float32 [3] in the chain"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "float64 [2] in the chain"),
        (
            (torch.ones(1), torch.ones(2)),
            (torch.ones(1), torch.full((2,), 1.5)),
            "value 1 differs by up to 0.5",
        ),
    ],
)
def test_what_differs_is_said(right: Any, found: Any, words: str) -> None:
    """As Hugging Face's models return a cache beside their logits."""
    text = describe_difference(right, found)
    assert (words in text) if words else text == ""
