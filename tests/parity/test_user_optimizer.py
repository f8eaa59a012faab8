"""Optimizers of the user: one that looks further than its rank is refused; each group may have its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from paceline import ByGroup, Loss, Task
from paceline.errors import StrategyError, TaskError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.session import model_setup
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from tests.zoo.kind import Kind, Made, mlp
from tests.zoo.plain import End
from tests.zoo.runs import distance_from

STEPS, SIZE = 4, 12
Make = Callable[[nn.Module], torch.optim.Optimizer]
NEAR, FAR = 1e-6, 1e-4


class Own(torch.optim.Optimizer):
    """Plain steps, over whatever `chosen` gives."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def chosen(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def factor(self) -> float:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        factor = self.factor()
        for p in self.chosen():
            if p.grad is not None:
                p -= self.param_groups[0]["lr"] * factor * p.grad


class ByTheWholeNorm(Own):
    """Its rate depends on the gradients of all tensors."""

    def factor(self) -> float:
        return 1.0 / (1.0 + sum(float(p.grad.square().sum()) for p in self.chosen() if p.grad is not None))


class KnowsOtherwise(Own):
    """Remembers its parameters beside the groups, and says that it is elementwise."""

    elementwise = True

    def __init__(self, parameters: Any) -> None:
        self.mine = list(parameters)
        super().__init__(self.mine)

    def chosen(self) -> list[nn.Parameter]:
        return self.mine


class SetsItsRate(torch.optim.SGD):
    """Halves its own rate."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 0.5


def clips_before(model: nn.Module) -> torch.optim.Optimizer:
    """A hook that clips what the optimizer has."""
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    made.register_step_pre_hook(
        lambda own, *_: nn.utils.clip_grad_norm_(own.param_groups[0]["params"], 0.05) and None
    )
    return made


def shrinks_after(model: nn.Module) -> torch.optim.Optimizer:
    """A hook that shrinks by the norm of the weights."""
    made = torch.optim.SGD(model.parameters(), lr=0.1)

    def shrink(own: torch.optim.Optimizer, *_: Any) -> None:
        parameters = own.param_groups[0]["params"]
        norm = sum(float(p.detach().square().sum()) for p in parameters) ** 0.5
        with torch.no_grad():
            torch._foreach_mul_(parameters, 1 - 0.01 * norm)

    made.register_step_post_hook(shrink)
    return made


def over_the_model(model: nn.Module) -> torch.optim.Optimizer:
    """Steps through the model, not through its groups."""

    class Outside(Own):
        def chosen(self) -> list[nn.Parameter]:
            return [*model.parameters()]

    return Outside(model.parameters())


OPTIMIZERS: dict[str, Make] = {
    "whole norm": lambda m: ByTheWholeNorm(m.parameters()),
    "knows otherwise": lambda m: KnowsOtherwise(m.parameters()),
    "over the model": over_the_model,
    "hook before": clips_before,
    "hook after": shrinks_after,
    "plain": lambda m: Own(m.parameters()),
    "groups": lambda m: torch.optim.SGD(
        [{"params": [p], "lr": 0.1 / (k + 1)} for k, p in enumerate(m.parameters())], momentum=0.9
    ),
}
PARTS = "replicas=1 shard=2 zero=1"
STAGES = "replicas=1 pipeline=2"
REFUSED: dict[tuple[str, str], str] = {
    ("whole norm", PARTS): "needs a whole tensor",
    ("whole norm", STAGES): "needs all tensors",
    ("knows otherwise", PARTS): "does not update what is in its groups",
    ("over the model", PARTS): "does not update what is in its groups",
    ("hook before", PARTS): "has step hooks",
    ("hook before", STAGES): "has step hooks",
    ("hook after", PARTS): "has step hooks",
    ("hook after", STAGES): "has step hooks",
}
REFUSED_TOO = {  # though it would end alike
    ("knows otherwise", STAGES): "does not update what is in its groups",
    ("over the model", STAGES): "does not update what is in its groups",
}


def kind() -> Made:
    return Kind(lambda: mlp(nn.Linear(8, 8), nn.Tanh())).make()


def plain(make: Make) -> End:
    """One process, one batch a step."""
    made, losses = kind(), []
    optimizer = make(made.model)
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = torch.utils.data.default_collate(made.samples[step * SIZE : (step + 1) * SIZE])
        total, count = made.loss(made.model, batch)
        (total / count).backward()
        optimizer.step()
        losses.append(float(total.detach()) / count)
    return End(losses, {name: t.detach().clone() for name, t in made.model.state_dict().items()})


def trained(cluster: Cluster, strategy: str, make: Make) -> End | str:
    """Where a rank ends, or with what words it is refused."""
    torch.set_num_threads(1)
    made = kind()
    batch = {"size": SIZE, "shards": 6, "shuffle": False}
    recipe = Recipe(task="own", steps=STEPS, batch=batch, strategy=Strategy.parse(strategy))
    task = Task(made.model, made.samples, lambda m, batch: Loss(*made.loss(m, batch)), optimizer=make)
    try:
        session = build_test_session(cluster, recipe, lambda: task)
        losses = [stats.loss for stats in session.rounds()]
        whole = session.snapshot().tensors().items()
        return End(losses, {n.removeprefix("model/"): t.clone() for n, t in whole if n.startswith("model/")})
    except (StrategyError, TaskError) as error:
        assert error.next_step
        return str(error)


def all_of_them(cluster: Cluster, strategy: str) -> dict[str, End | str]:
    return {name: trained(cluster, strategy, make) for name, make in OPTIMIZERS.items()}


def unrefused(cluster: Cluster, strategy: str) -> dict[str, End | str]:
    with patch.object(model_setup, "require_layout_support", lambda optimizer, sharded_model: None):
        return all_of_them(cluster, strategy)


@pytest.mark.capability("A11", "J13")
@pytest.mark.parametrize("strategy", ["replicas=2", PARTS, STAGES])
def test_each_ends_where_a_plain_loop_does_or_is_refused(strategy: str) -> None:
    for found in run_ranks(all_of_them, 2, strategy):
        for name, end in found.items():
            words = (REFUSED | REFUSED_TOO).get((name, strategy))
            if words is not None:
                assert isinstance(end, str) and words in end, (name, end)
            else:
                assert isinstance(end, End), (name, end)
                assert distance_from(plain(OPTIMIZERS[name]), end) < NEAR, name


@pytest.mark.parametrize("strategy", [PARTS, STAGES])
def test_without_the_refusal_it_ends_elsewhere(strategy: str) -> None:
    """Why the refusals are true."""
    for found in run_ranks(unrefused, 2, strategy):
        for name, refused in REFUSED:
            if refused == strategy:
                end = found[name]
                assert isinstance(end, End), end
                assert distance_from(plain(OPTIMIZERS[name]), end) > FAR, name


def test_an_own_rate_would_be_lost_and_is_refused() -> None:
    def own(m: nn.Module) -> torch.optim.Optimizer:
        return SetsItsRate(m.parameters(), lr=0.1)

    said = trained(Cluster.single(), "replicas=1", own)
    assert isinstance(said, str) and "changes the rate of its groups" in said
    right = plain(own)
    rate = plain(lambda m: torch.optim.SGD(m.parameters(), lr=0.1))  # what the schedule would have made of it
    assert distance_from(right, rate) > FAR


STEPS_GROUPS, SIZE_GROUPS, CLIP = 12, 12, 0.5
STRATEGIES = ("replicas=2", "replicas=1 shard=2 zero=1", "replicas=1 shard=2 zero=3", "replicas=1 pipeline=2")


def optimizers(model: Any) -> list[torch.optim.Optimizer]:
    first, last = model[0], model[2]
    return [
        torch.optim.AdamW(first.parameters(), lr=0.02, weight_decay=0.1),
        torch.optim.SGD(last.parameters(), lr=0.1, momentum=0.9),
    ]


def task() -> Task:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))
    x = torch.randn(SIZE_GROUPS * STEPS_GROUPS, 6)

    def loss(model: nn.Module, batch: Tensor) -> Loss:
        return Loss((model(batch) - batch.square().sum(1)).square().sum(), len(batch))

    return Task(model, list(x), loss, optimizer=lambda model: ByGroup(*optimizers(model)))


def recipe(words: str = "replicas=1") -> Recipe:
    return Recipe(
        task="own",
        steps=STEPS_GROUPS,
        batch={"size": SIZE_GROUPS, "shards": 4, "shuffle": False},
        schedule={"decay": "cosine"},
        optimizer={"clip_norm": CLIP},
        strategy=Strategy.parse(words),
    )


def plain_groups(first: int = 0, last: int = 2) -> dict[str, Tensor]:
    """Two optimizers of PyTorch, of these two layers, and their rates set by hand."""
    made = task()
    several = optimizers({0: made.model[first], 2: made.model[last]})
    rates = [one.param_groups[0]["lr"] for one in several]
    for step in range(STEPS_GROUPS):
        batch = torch.stack(made.data[SIZE_GROUPS * step : SIZE_GROUPS * (step + 1)])
        loss = made.loss(made.model, batch)
        made.model.zero_grad()
        (loss.total / loss.count).backward()
        nn.utils.clip_grad_norm_(made.model.parameters(), CLIP)
        for one, rate in zip(several, rates, strict=True):
            one.param_groups[0]["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / STEPS_GROUPS))
            one.step()
    return {name: p.detach() for name, p in made.model.named_parameters()}


def trained_groups(cluster: Cluster, strategies: Sequence[str]) -> list[dict[str, Tensor]]:
    ends = []
    for words in strategies:
        session = build_test_session(cluster, recipe(words), task)
        list(session.rounds())
        ends.append({name: t.clone() for name, t in session.snapshot().tensors().items()})
    return ends


def distance(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return max(float((found[f"model/{name}"] - p).abs().max()) for name, p in right.items())


@pytest.mark.capability("J18")
def test_each_group_has_its_own_rule_under_every_layout() -> None:
    right = plain_groups()
    for found in run_ranks(trained_groups, 2, STRATEGIES):
        for words, end in zip(STRATEGIES, found, strict=True):
            assert distance(end, right) <= 1e-5, words
            assert {"optimizer/0.weight/exp_avg", "optimizer/2.weight/momentum_buffer"} <= end.keys()


@pytest.mark.capability("J18")
def test_rules_that_have_changed_places_end_elsewhere() -> None:
    """The mutation twin."""
    (found,) = trained_groups(Cluster.single(), ["replicas=1"])
    assert distance(found, plain_groups()) <= 1e-6 and distance(found, plain_groups(2, 0)) > 1e-2


@pytest.mark.capability("J18")
def test_a_run_goes_on_with_what_each_of_them_knows() -> None:
    whole = trained_groups(Cluster.single(), ["replicas=1"])[0]
    first, second = (
        build_test_session(Cluster.single(), recipe(), task),
        build_test_session(Cluster.single(), recipe(), task),
    )
    for _ in first.rounds():
        if first.state.step == 5:
            break
    second.state.load(first.state.tensors(), first.state.scalars())
    list(second.rounds())
    assert all(torch.equal(t, whole[name]) for name, t in second.snapshot().tensors().items())


class ByTheNorm(torch.optim.SGD):
    """Its update of a value depends on the whole tensor."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad / p.grad.norm()


def refused(cluster: Cluster) -> str:
    def own() -> Task:
        made = task()
        first, last = made.model[0], made.model[2]
        several = torch.optim.SGD(last.parameters(), lr=0.1), ByTheNorm(first.parameters(), lr=0.1)
        return replace(made, optimizer=lambda _: ByGroup(*several))

    with pytest.raises(StrategyError) as error:
        build_test_session(cluster, recipe("replicas=1 shard=2 zero=1"), own)
    return str(error.value)


@pytest.mark.capability("J18")
def test_one_that_does_not_suit_the_strategy_is_named() -> None:
    assert all("ByTheNorm needs a whole tensor" in said for said in run_ranks(refused, 2))


@pytest.mark.capability("J18")
def test_a_parameter_has_one_optimizer() -> None:
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(TaskError, match="one is in the groups of two"):
        ByGroup(torch.optim.SGD([p], lr=0.1), torch.optim.Adam([p]))
