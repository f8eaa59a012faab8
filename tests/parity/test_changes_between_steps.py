"""What a callback changes in the model between two steps: frozen parameters, and weights that it writes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import PacelineError, TaskError
from paceline.job.cluster import Cluster
from paceline.parallel.thread_workers import FlagCopier
from paceline.recipe import Recipe, Strategy
from paceline.session import Callback, Session, fit
from paceline.session.model_guard import ReplacedParameters
from paceline.task import Loss, Task
from paceline.testing import RanksFailed, run_ranks
from paceline.testing.parity import build_test_session
from paceline.verification import compare_with_oracle

STEPS, SIZE, RATE = 6, 12, 0.05
X = torch.randn(48, 6, generator=torch.Generator().manual_seed(3))
ALONE = ("replicas=1", "replicas=1 lanes=2", "replicas=1 pipeline=2 lanes=2")
TOGETHER = (
    "replicas=2",
    "replicas=1 shard=2 zero=1",
    "replicas=1 shard=2 zero=3",
    "replicas=1 shard=2 zero=3 route=native",
    "replicas=1 pipeline=2 schedule=1f1b",
)


class Net(nn.Module):
    """A chain, and a target that follows its first part."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.head(torch.cat([self.online(x), self.target(x + 0.1)], 1))
        return hidden


class Both(nn.Module):
    """The first link of the chain."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.online, self.target = model.online, model.target

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.online(x), self.target(x + 0.1)], 1)


Change = Callable[[Any, int], None]


def freeze(model: Any, step: int) -> None:
    """Train the first layer from step 2 on, and the head until step 4."""
    model.online[0].requires_grad_(step >= 2)
    model.head.requires_grad_(step < 4)


def unfreeze(model: Any, step: int) -> None:
    model.target.requires_grad_(step >= 2)


def follow(model: Any, step: int) -> None:
    """Move the target, and limit a trained weight."""
    if step == 0:
        return
    for mine, other in zip(model.target.parameters(), model.online.parameters(), strict=True):
        mine.mul_(0.9).add_(other, alpha=0.1)
    model.online[0].weight.clamp_(-0.35, 0.35)


def assign(model: Any, step: int) -> None:
    """The same by assignments to `data`, as in MoCo."""
    if step == 0:
        return
    for mine, other in zip(model.target.parameters(), model.online.parameters(), strict=True):
        mine.data = mine.data * 0.9 + other.data * 0.1
    model.online[0].weight.data = model.online[0].weight.data.clamp(-0.35, 0.35)


class Changes(Callback):
    """Calls a change before the first step and after every step."""

    def __init__(self, model: nn.Module, change: Change, how: str) -> None:
        self.model, self.change, self.how = model, change, how

    def _call(self, session: Session) -> None:
        step = session.state.step
        if self.how == "weights":
            with session.weights() as model:
                self.change(model, step)
            return
        with torch.no_grad():
            self.change(session.complete() if self.how == "complete" else self.model, step)

    def on_begin(self, session: Session) -> None:
        self._call(session)

    def on_step(self, session: Session, stats: Any) -> None:
        self._call(session)


def loss(model: nn.Module, x: Tensor) -> Loss:
    return Loss((model(x) - x[:, :3]).square().sum(), len(x))


def build(change: Change, how: str = "direct") -> Task:
    torch.manual_seed(0)
    model = Net()
    return Task(
        model, list(X), loss, callbacks=[Changes(model, change, how)], stages=lambda m: [Both(m), m.head]
    )


def recipe(strategy: str) -> Recipe:
    return Recipe(
        task="own",
        steps=STEPS,
        batch={"size": SIZE, "shuffle": False, "shards": 4},
        optimizer={"name": "sgd", "lr": RATE, "momentum": 0.9},
        precision={"compute": "fp32"},
        strategy=Strategy.parse(strategy),
    )


def plain_loop(change: Change) -> dict[str, Tensor]:
    model: Any = build(change).model
    optimizer = torch.optim.SGD([*model.online.parameters(), *model.head.parameters()], RATE, momentum=0.9)
    with torch.no_grad():
        change(model, 0)
    for step in range(STEPS):
        sums = loss(model, X[step % 4 * SIZE : step % 4 * SIZE + SIZE])
        optimizer.zero_grad()
        (sums.total / sums.count).backward()
        optimizer.step()
        with torch.no_grad():
            change(model, step + 1)
    return model.state_dict()


def distance(cluster: Cluster, strategy: str, change: Change, how: str) -> float:
    session = build_test_session(cluster, recipe(strategy), lambda: build(change, how))
    fit(session)
    found = session.complete().state_dict()
    session.close()
    return max(float((found[name] - value).abs().max()) for name, value in plain_loop(change).items())


def refusal(cluster: Cluster, strategy: str, change: Change, how: str) -> str:
    """The error of a run, and the step in which it came."""
    session = build_test_session(cluster, recipe(strategy), lambda: build(change, how))
    try:
        fit(session)
        return "no error"
    except PacelineError as error:
        return f"{session.state.step}: {error}"
    finally:
        session.abort()
        session.close()


Case = tuple[str, Change, str]


def distances(cluster: Cluster, cases: Sequence[Case]) -> dict[str, float]:
    return {f"{s} {c.__name__} {how}": distance(cluster, s, c, how) for s, c, how in cases}


def refusals(cluster: Cluster, cases: Sequence[Case]) -> dict[str, str]:
    return {f"{s} {c.__name__} {how}": refusal(cluster, s, c, how) for s, c, how in cases}


WHOLE = (*ALONE, "replicas=2", "replicas=1 shard=2 zero=1")


def right_cases(strategies: Sequence[str]) -> list[Case]:
    cases = [(s, freeze, "direct") for s in strategies] + [(s, follow, "weights") for s in strategies]
    return cases + [(s, assign, "direct") for s in strategies if s in WHOLE]


@pytest.mark.capability("A2")
def test_frozen_and_written_weights_are_those_of_the_plain_loop_under_every_layout() -> None:
    alone = distances(Cluster.single(), right_cases(ALONE))
    for found in (alone, *run_ranks(distances, 2, right_cases(TOGETHER))):
        assert max(found.values()) < 1e-6, {name: d for name, d in found.items() if d >= 1e-6}


def test_lanes_that_do_not_follow_the_flags_train_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin."""
    monkeypatch.setattr(FlagCopier, "copy", lambda self: None)
    assert distance(Cluster.single(), "replicas=1 lanes=2", freeze, "direct") > 1e-3


@pytest.mark.capability("A2")
def test_what_a_layout_cannot_follow_is_refused_in_that_step_and_named() -> None:
    sharded, stages = [s for s in TOGETHER if "zero=3" in s], TOGETHER[-1]
    wrong = [(s, unfreeze, "direct") for s in TOGETHER]
    wrong += [(s, change, "direct") for s in sharded for change in (follow, assign)]
    wrong += [(s, follow, "complete") for s in (*sharded, stages)]
    wrong += [("replicas=2 sync=local:2", follow, "weights")]
    alone = refusals(Cluster.single(), [(s, unfreeze, "direct") for s in ALONE])
    for found in (alone, *run_ranks(refusals, 2, wrong)):
        for case, text in found.items():
            words, at = "was frozen when the run began" if "unfreeze" in case else "session.weights()", "1:"
            at = "0:" if "sync=local" in case else "2:" if "unfreeze" in case else at
            assert text.startswith(at) and words in text, (case, text)
    # The other stage holds nothing that is written, and only notices that the first one has ended.
    with pytest.raises(RanksFailed, match=r"rank 0 raised TaskError: a callback has written to 'online\.0"):
        run_ranks(distances, 2, [(stages, follow, "direct")])


def test_verification_runs_the_callbacks() -> None:
    def compared(cluster: Cluster) -> list[str]:
        found = []
        for strategy in ("replicas=2", "replicas=1 shard=2 zero=3", "replicas=1 pipeline=2"):
            for change, how in ((freeze, "direct"), (follow, "weights")):
                report = compare_with_oracle(
                    recipe(strategy), build(change, how), cluster, torch.device("cpu"), STEPS
                )
                found.append(f"{strategy} {change.__name__}: {report.steps} {report.failure}")
        with pytest.raises(PacelineError, match="was frozen when the run began"):
            compare_with_oracle(recipe("replicas=2"), build(unfreeze), cluster, torch.device("cpu"), STEPS)
        return found

    for found in run_ranks(compared, 2):
        assert all(text.endswith(f"{STEPS} None") for text in found), found


def test_a_resumed_run_knows_what_was_frozen() -> None:
    def once(model: Any, step: int) -> None:
        if step == 3:
            model.head.requires_grad_(False)

    ends = []
    for interrupted in (False, True):
        session = build_test_session(Cluster.single(), recipe("replicas=1"), lambda: build(once))
        (callback,) = session.callbacks
        for stats in session.rounds():
            callback.on_step(session, stats)
            if interrupted and session.state.step == 4:
                break
        if interrupted:
            snapshot = session.snapshot().copied()
            session = build_test_session(Cluster.single(), recipe("replicas=1 lanes=2"), lambda: build(once))
            session.restore(snapshot.tensors(), snapshot.scalars())
            list(session.rounds())
        ends.append(session.complete().head.weight.detach().clone())
        session.close()
    assert torch.allclose(*ends, atol=1e-6)


def test_a_parameter_taken_in_the_task_is_refused_once_the_layout_has_replaced_it() -> None:
    """As under tensor=N, where the model has a part in its place."""
    for change in (lambda p: p.requires_grad_(False), lambda p: p.data.add_(0) + p.detach().add_(1)):
        model = nn.Linear(4, 4)
        taken, replaced = model.weight, ReplacedParameters(model)
        model.weight = nn.Parameter(model.weight[:2].detach().clone())
        replaced.drop_present(model)
        model.bias.requires_grad_(False)
        replaced.require_unchanged()
        change(taken)
        with pytest.raises(TaskError, match="'weight' was changed through an object that is no longer"):
            replaced.require_unchanged()
