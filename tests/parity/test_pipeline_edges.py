"""Stages at the edges: ragged and empty steps, losses of all kinds, chains that are not the model, many dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.cluster import Cluster
from paceline.errors import TaskError
from paceline.models import KeyedDropout
from paceline.recipe import Recipe, Strategy
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.contracts.layout import whole
from paceline.testing.parity import CPU, Trajectory, make_task, run_oracle, session_of
from paceline.verification import Report, compare_with_oracle

TRAINING_IMAGES = 1498
TWO_STAGES = "replicas=1 pipeline=2"


def digits(strategy: str = TWO_STAGES, **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "task": "digits",
        "options": {"model": "mlp", "hidden": [48, 32]},
        "steps": 4,
        "batch": {"size": 46, "shards": 4},
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
        "strategy": Strategy.parse(strategy),
    }
    return Recipe(**(settings | changes))


def verify(
    cluster: Cluster, recipe: Recipe, make: Callable[[], Task] | None = None, steps: int = 3
) -> Report:
    task = make() if make is not None else make_task(recipe)
    return compare_with_oracle(recipe, task, cluster, CPU, steps)


def train(cluster: Cluster, recipe: Recipe) -> Trajectory:
    session = session_of(cluster, recipe)
    return whole([stats.loss for stats in session.rounds()], session)


@pytest.mark.capability("D2")
def test_micro_batches_are_the_full_batch_however_many() -> None:
    """46 samples in 1, 3 and 8 micro-batches, of which the last is smaller, against one batch of 46."""

    def ends(cluster: Cluster) -> list[Trajectory]:
        return [train(cluster, digits(batch={"size": 46, "shards": m})) for m in (1, 3, 8)]

    right = run_oracle(digits(), 4, shards=1)
    for rank in run_ranks(ends, 2):
        assert all(end.distance(right) <= 1e-6 for end in rank)


@pytest.mark.capability("D2", "D3")
@pytest.mark.parametrize("strategy, num_ranks", [("replicas=1 pipeline=3", 3), ("replicas=2 pipeline=2", 4)])
def test_the_last_step_of_an_epoch_has_one_sample(strategy: str, num_ranks: int) -> None:
    """Fewer micro-batches than usual, and a replica without any."""
    recipe = digits(
        strategy,
        options={"model": "convnet", "channels": 4, "dropout": 0.1},
        steps=None,
        epochs=1,
        batch={"size": TRAINING_IMAGES - 1, "shards": 4},
        optimizer={"name": "adamw", "lr": 1e-3, "clip_norm": 0.5},
    )
    report = run_ranks(verify, num_ranks, recipe)[0]
    assert report.ok, (report.failure, report.diagnosis)
    assert report.steps == 2


@pytest.mark.capability("D3")
@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_stage_really_runs_in_the_order_of_the_table(num_stages: int) -> None:
    def order(cluster: Cluster) -> list[str]:
        session = session_of(cluster, digits(f"replicas=1 pipeline={num_stages}", steps=1))
        seen: list[str] = []
        stage, first = session.placed.stage, session.placed.stage.links[0]
        stage.register_forward_hook(lambda *_: seen.append("F"))
        first.weight.register_hook(lambda grad: seen.append("B"))
        list(session.rounds())
        return seen

    assert run_ranks(order, num_stages) == [["F"] * 4 + ["B"] * 4] * num_stages


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
@pytest.mark.parametrize("num_stages", [2, 3])
def test_tuples_of_any_dtype_travel_and_the_loss_says_what_goes_in(num_stages: int) -> None:
    recipe = digits(f"replicas=1 pipeline={num_stages}", optimizer={"name": "adamw", "lr": 1e-3})
    report = run_ranks(verify, num_stages, recipe, task)[0]
    assert report.ok, (report.failure, report.diagnosis)
    assert report.steps == 3


@pytest.mark.capability("D1")
@pytest.mark.parametrize(
    "stages, of, words",
    [
        (without_dropout, loss, "in training"),
        (tuples, penalised, "looks at the model's parameters"),
        (tuples, twice, "calls the model twice"),
        (lambda chain: [nn.Identity(), *tuples(chain)], loss, "Identity"),
    ],
    ids=["no dropout", "penalty", "two calls", "tuple to one"],
)
def test_what_a_stage_would_compute_wrongly_is_refused(stages: Any, of: Any, words: str) -> None:
    def build(cluster: Cluster) -> str:
        try:
            session_of(cluster, digits(), lambda: task(stages, of))
        except (TaskError, TypeError) as error:
            return str(error)
        return ""

    assert all(words in text for text in run_ranks(build, 2))


class Tied(nn.Sequential):
    """The first and the last layer share their weights, and are on two stages."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        self[4].weight = self[0].weight


def tied_task() -> Task:
    def over_first_ten(model: nn.Module, batch: Sequence[Tensor]) -> Loss:
        images, targets = batch
        return Loss(F.cross_entropy(model(images)[:, :10], targets, reduction="sum"), len(images))

    torch.manual_seed(3)
    return replace(
        make_task(digits()), model=Tied(), initialize=None, stages=None, loss=over_first_ten, held_out=None
    )


@pytest.mark.capability("D1", "H8")
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_tied_weights_on_two_stages_keep_equal_bits(codec: str) -> None:
    """Three replicas: a sum, or a codec's blocks, would fall differently in the buckets of another stage."""

    def weights(cluster: Cluster) -> list[float]:
        recipe = digits(
            f"replicas=3 pipeline=2 codec={codec}", steps=6, optimizer={"name": "adamw", "lr": 1e-2}
        )
        session = session_of(cluster, recipe, tied_task)
        list(session.rounds())
        return session.placed.model[0].weight.detach().flatten().tolist()

    ranks = run_ranks(weights, 6)
    assert all(values == ranks[0] for values in ranks)
