"""A job with a bad number in one step, for the tests of numeric health."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline import Loss, Task
from paceline.errors import NumericError
from paceline.job.cluster import Cluster
from paceline.observe.metrics_schema import event_level, find_schema_errors
from paceline.recipe import Recipe, Strategy
from paceline.session import Session, fit
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from tests.parity.training_runs import RecordingSink, each_case

BAD_STEP, STEPS = 6, 12
SIZE = 8
STRATEGIES = [
    (1, "replicas=all"),
    (2, "replicas=all"),
    (2, "replicas=1 shard=2 zero=1"),
    (2, "replicas=1 pipeline=2"),
    (2, "replicas=all codec=int8"),
    (1, "replicas=1 lanes=2"),
]


class Trained(NamedTuple):
    """What was raised; step and whether it was applied, of all steps; events beside; and where it ended."""

    said: str
    seen: list[tuple[int, bool]]
    events: list[tuple[str, dict[str, Any]]]
    end: dict[str, Tensor]


class CheckedSink(RecordingSink):
    """Remembers; an event that is not of the schema is an error."""

    def event(self, name: str, record: Any) -> None:
        common = {"event": name, "level": event_level(name), "rank": 0, "time": 0.0}
        assert not find_schema_errors({**common, **record})
        super().event(name, record)


def net() -> nn.Sequential:
    torch.manual_seed(3)
    links = {"first": nn.Linear(3, 4, bias=False), "norm": nn.BatchNorm1d(4), "relu": nn.ReLU()}
    return nn.Sequential(OrderedDict(links, last=nn.Linear(4, 1), flat=nn.Flatten(0)))


def build(bad: float, steps: Iterable[int] = (BAD_STEP,), without: Iterable[int] = ()) -> Task:
    """Sample i is row i of a table, unshuffled; sample 5 of some steps is bad; some steps are not there."""
    torch.manual_seed(4)
    x = torch.rand(SIZE * STEPS, 3)
    for step in steps:
        x[SIZE * step + 5, 1] = bad

    def loss(model: nn.Module, batch: Tensor) -> Loss:
        return Loss((model(batch) - batch.nan_to_num(0, 0, 0).sum(1)).square().sum(), len(batch))

    return Task(net(), [row for i, row in enumerate(x) if i // SIZE not in without], loss)


def bad_slope() -> Task:
    """All losses are finite; in one step the slope of the square root of 0 is not."""
    task = build(0.0, ())
    task.data[SIZE * BAD_STEP + 5].fill_(-1.0)

    def loss(model: nn.Module, batch: Tensor) -> Loss:
        root = (model.norm.weight.sum() * float((batch >= 0).all())).sqrt()
        return Loss((model(batch) - batch.sum(1)).square().sum() + root, len(batch))

    return Task(task.model, task.data, loss)


def recipe(strategy: str = "replicas=all", *, more: Any = None, **health: Any) -> Recipe:
    settings: dict[str, Any] = {
        "task": "sum",
        "steps": STEPS,
        "batch": {"size": SIZE, "shards": 2, "shuffle": False},
        "optimizer": {"lr": 0.01},
        "checkpoint": {"every_steps": 4, "keep": 9},
        "health": health,
        "strategy": Strategy.parse(strategy),
    }
    return Recipe(**(settings | (more or {})))


def train(cluster: Cluster, chosen: Recipe, make: Callable[[], Task], run_dir: Path | None = None) -> Trained:
    """One rank of a run, with a sink on every rank."""
    session, sink, said = build_test_session(cluster, chosen, make), CheckedSink(), ""
    try:
        fit(session, run_dir, [sink])
    except NumericError as error:
        said = str(error)
    return Trained(said, sink.steps, sink.events, ends(session))


def train_with_each(
    recipe_for: Callable[[str], Recipe], make: Callable[[], Task]
) -> Iterator[tuple[int, str, Trained]]:
    """Number of ranks, strategy, and what a rank found; one job for each number of ranks."""
    for num_ranks in sorted({ranks for ranks, _ in STRATEGIES}):
        strategies = [text for ranks, text in STRATEGIES if ranks == num_ranks]
        for rank in run_ranks(each_case, num_ranks, train, [(recipe_for(text), make) for text in strategies]):
            yield from ((num_ranks, text, found) for text, found in zip(strategies, rank, strict=True))


def ends(session: Session) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in session.snapshot().tensors().items()}


def run_without(steps: Iterable[int]) -> dict[str, Tensor]:
    """Where a run of one process ends that never had the samples of some steps."""
    without = set(steps)
    chosen = recipe(more={"steps": STEPS - len(without)})
    return train(Cluster.single(), chosen, lambda: build(math.nan, without, without)).end


def distance(end: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Largest difference."""
    assert right.keys() == {name for name in end if not name.startswith(("health/", "residual/"))}
    return max(float((end[name].double() - t.double()).abs().max()) for name, t in right.items())
