"""Time is in the phase that it belongs to: on a clock that stands still but for work, each has its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from paceline import Loss, Task
from paceline.comm import Handle
from paceline.job.cluster import Cluster
from paceline.observe import PhaseTimer, StepPhase, step_stats
from paceline.observe.rank_activity import RankActivity
from paceline.recipe import Recipe, Strategy
from paceline.session import build
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session

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
    """Seconds of work that was done, in all and by its kind."""

    def __init__(self) -> None:
        self.now, self.spent = 0.0, dict.fromkeys(COSTS, 0.0)

    def work(self, kind: str) -> None:
        self.now += COSTS[kind]
        self.spent[kind] += COSTS[kind]


class Told(NamedTuple):
    """Of some rounds: seconds, how phases share them, and how much work there was of each kind."""

    seconds: float
    phases: Mapping[str, float]
    work: Mapping[str, float]

    def lacks(self, kinds: Collection[str] = tuple(COSTS)) -> list[str]:
        """Kinds of work of which a part was put down to another phase."""
        return [kind for kind in kinds if self.phases[kind] < self.work[kind]]


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


class Forgetful(PhaseTimer):
    """Misses the beginning of one phase."""

    def __init__(self, forgets: str, activity: RankActivity | None = None) -> None:
        super().__init__(activity)
        self._forgets = forgets

    def begin(self, phase: StepPhase) -> None:
        if phase != self._forgets:
            super().begin(phase)


def told_of(cluster: Cluster, words: str) -> Told:
    """Train on a clock, which every wait takes further that training stands still for."""
    clock, wait = Clock(), Handle.wait
    step_stats.time = SimpleNamespace(perf_counter=lambda: clock.now)

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
    session = build_test_session(cluster, recipe, lambda: task_with(clock))
    session.state.optimizer.register_step_pre_hook(lambda *_: clock.work("optimizer"))
    clock.spent = dict.fromkeys(COSTS, 0.0)
    found = list(session.rounds())
    setattr(Handle, "wait", wait)  # noqa: B010
    session.close()
    by_phase = {kind: sum(stats.phases[kind] for stats in found) for kind in COSTS}
    return Told(sum(stats.seconds for stats in found), by_phase, clock.spent)


def told_of_all(cluster: Cluster) -> tuple[dict[str, Told], dict[str, Told]]:
    """By strategy; and by the phase that is not begun."""
    found, without = {words: told_of(cluster, words) for words in STRATEGIES}, {}
    for name in COSTS:
        setattr(build, "PhaseTimer", partial(Forgetful, name))  # noqa: B010
        without[name] = told_of(cluster, "replicas=2")
    return found, without


def test_all_time_of_a_step_is_in_the_phase_that_it_belongs_to() -> None:
    """Where a phase is not begun, its time is found in another: the mutation twin."""
    for rank, (found, without) in enumerate(run_ranks(told_of_all, 2)):
        assert found["replicas=2"].phases == found["replicas=2"].work
        for words, told in found.items():
            assert sum(told.phases.values()) == told.seconds, (words, rank)
            beside = {"forward", "backward"} if "lanes" in words else set[str]()  # of the other lane
            ours = COSTS.keys() - beside - {"communication"}  # some is waited for inside forward
            assert not told.lacks(ours), (words, rank, told)
            is_server = "servers" in words and rank == 0
            works = {"optimizer"} if is_server else {"data", "forward", "backward"}
            assert all(told.work[kind] for kind in works), (words, rank)
            assert "server" in words or told.phases["communication"] >= COSTS["communication"], words
        for name, told in without.items():
            assert told.lacks() == [name] and sum(told.phases.values()) == told.seconds, (name, rank)
