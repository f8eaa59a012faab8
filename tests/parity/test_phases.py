"""The phases of a step miss no time: on a clock that stands still but for work, they are all of it."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import Loss, Task
from paceline.cluster import Cluster
from paceline.comm import Handle
from paceline.observe import Phases, Stats, phases
from paceline.recipe import Recipe, Strategy
from paceline.testing import run_ranks
from paceline.testing.parity import session_of
from paceline.training import build

pytestmark = pytest.mark.capability("P10")
STEPS = 6
COSTS = {"data": 1.0, "forward": 2.0, "backward": 3.0, "optimizer": 4.0, "communication": 5.0}
STRATEGIES = (
    "replicas=2", "replicas=2 codec=int8", "replicas=1 shard=2 zero=1",
    "replicas=1 shard=2 zero=3 route=native", "replicas=1 pipeline=2 schedule=1f1b", "sync=diloco:2",
    "replicas=1 pipeline=2 sync=pipedream", "replicas=1 servers=1 sync=server-async",
    "replicas=2 lanes=2", "replicas=2 sync=hogwild",
)  # fmt: skip


class Clock:
    """Seconds of work that was done."""

    def __init__(self) -> None:
        self.now = 0.0

    def work(self, kind: str) -> None:
        self.now += COSTS[kind]


class Worked(torch.autograd.Function):
    """The identity, whose forward and backward take their time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock) -> Tensor:
        ctx.clock = clock
        clock.work("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.clock.work("backward")
        return grad, None


class Layer(nn.Linear):
    """A layer that works."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(4, 4)
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        return Worked.apply(super().forward(x), self.clock)


class Rows(torch.utils.data.Dataset[Tensor]):
    """Samples that have to be fetched."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.rows = clock, torch.randn(64, 4)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Tensor:
        self.clock.work("data")
        return self.rows[i]


def task_with(clock: Clock) -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(clock), nn.Tanh(), Layer(clock))

    def loss(model: nn.Module, batch: Tensor) -> Loss:
        return Loss(model(batch).square().sum(), len(batch))

    return Task(model, Rows(clock), loss)


class Forgetful(Phases):
    """Misses one phase."""

    def __init__(self, forgets: str) -> None:
        super().__init__()
        self._forgets = forgets

    def during(self, phase: str) -> Any:
        return nullcontext() if phase == self._forgets else super().during(phase)


def rounds_of(cluster: Cluster, words: str, clock: Clock) -> list[Stats]:
    """Train on the clock, which every wait takes further that training stands still for."""
    phases.time = SimpleNamespace(perf_counter=lambda: clock.now)
    wait = Handle.wait

    def costly(self: Handle, deadline_seconds: float | None = None, *, exposed: bool = True) -> Any:
        if exposed:
            clock.work("communication")
        return wait(self, deadline_seconds, exposed=exposed)

    setattr(Handle, "wait", costly)  # noqa: B010
    recipe = Recipe(
        task="own",
        steps=STEPS,
        batch={"size": 8, "shards": 4},
        optimizer={"name": "sgd", "lr": 0.01},
        strategy=Strategy.parse(words),
    )
    session = session_of(cluster, recipe, lambda: task_with(clock))
    session.state.optimizer.register_step_pre_hook(lambda *_: clock.work("optimizer"))
    found = list(session.rounds())
    setattr(Handle, "wait", wait)  # noqa: B010
    session.close()
    return found


def gap(found: list[Stats]) -> float:
    """The largest share of a round that is in no phase."""
    return max(1 - sum(stats.phases.values()) / stats.seconds for stats in found)


def gaps(cluster: Cluster) -> tuple[dict[str, tuple[float, dict[str, float]]], dict[str, float]]:
    """By strategy the share that no phase has, and the last round; by phase the share without it."""
    found = {}
    for words in STRATEGIES:
        rounds = rounds_of(cluster, words, Clock())
        found[words] = gap(rounds), dict(rounds[-1].phases)
    without = {}
    for name in COSTS:
        setattr(build, "Phases", partial(Forgetful, name))  # noqa: B010
        without[name] = gap(rounds_of(cluster, "replicas=2", Clock()))
    return found, without


def test_all_time_of_a_step_is_in_a_phase_and_none_is_in_two() -> None:
    """Without one of the phases a share of the time is missing: the mutation twin."""
    for rank, (found, without) in enumerate(run_ranks(gaps, 2)):
        for words, (share, spent) in found.items():
            assert share == 0.0, (words, rank, spent)
            is_server = "servers" in words and rank == 0
            works = {"optimizer"} if is_server else {"data", "forward", "backward"}
            assert works <= {name for name, seconds in spent.items() if seconds}, (words, rank)
            assert "server" in words or spent["communication"] >= COSTS["communication"], words
        whole = sum(without.values())
        assert all(share > 0.03 for share in without.values()) and whole == pytest.approx(1.0), without
