"""All of an optimizer's `state_dict()` survives a resume, or the first save says what would not."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.checkpoint.manifest import check_optimizer_value
from paceline.errors import CheckpointError
from paceline.job.cluster import Cluster
from paceline.optim import UserOptimizer
from paceline.parallel.sharded_model import unsharded_model
from paceline.recipe import Recipe, Strategy
from paceline.session import Session
from paceline.state.optimizer_state import OptimizerState, ParamGroupState
from paceline.state.train_state import TrainState
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from tests.unit.checkpoint.states import load, save

X = torch.linspace(-1.0, 1.0, 24).view(4, 6)


class Shampoo(UserOptimizer):
    """Statistics of rows and of columns, which have not the parameter's shape.

    Source: Gupta et al. 2018, arXiv:1802.09568, Algorithm 1, for matrices; vectors take plain steps.
    """

    def update(self, params: Sequence[Tensor], grads: Sequence[Tensor], step: int) -> None:
        for p, g in zip(params, grads, strict=True):
            g2, own = g.reshape(len(g), -1), self.state[p]
            left = own.setdefault("left", 0.1 * torch.eye(g2.shape[0]))
            right = own.setdefault("right", 0.1 * torch.eye(g2.shape[1]))
            left += g2 @ g2.t()
            right += g2.t() @ g2
            p -= self.group["lr"] * (_root(left) @ g2 @ _root(right)).view_as(p)


def _root(statistics: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(statistics)
    return vectors @ torch.diag(values.clamp(min=1e-6) ** -0.25) @ vectors.t()


class Remembers(UserOptimizer):
    """Earlier gradients in a list, a deque and a table, nothing, an infinite number and a word."""

    def update(self, params: Sequence[Tensor], grads: Sequence[Tensor], step: int) -> None:
        for p, g in zip(params, grads, strict=True):
            own = self.state[p]
            own.setdefault("steps", []).append(g.clone())
            own.setdefault("last/two%", deque(maxlen=2)).append((g.norm(), step))
            own.setdefault("by turn", {})[step] = [g.clone(), {"word": "x", "none": None}]
            own |= {"nothing": None, "best": float("inf"), "word": "on"}
            turns = sum(row[0] for row in own["by turn"].values())
            p -= self.group["lr"] * (sum(own["steps"]) + turns * float(own["last/two%"][0][0]))


class TogetherWith(UserOptimizer):
    """What belongs to no parameter: a number, a tensor, and a table."""

    def update(self, params: Sequence[Tensor], grads: Sequence[Tensor], step: int) -> None:
        far = sum(g.norm() for g in grads)
        self.state["far"] = far + self.state.get("far", torch.zeros(()))
        self.state["updates"] = self.state.get("updates", 0) + 1
        self.state["log"] = {"last": [float(far)]}
        for p, g in zip(params, grads, strict=True):
            p -= self.group["lr"] * g / (1 + self.state["far"] / self.state["updates"])


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "shampoo": lambda m: Shampoo(m.parameters(), lr=0.05),
    "lists": lambda m: Remembers(m.parameters(), lr=0.01),
    "together": lambda m: TogetherWith(m.parameters(), lr=0.05),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.05),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
}


def make(name: str, seed: int = 0) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    return TrainState(unsharded_model(model), OPTIMIZERS[name](model))


def train(state: TrainState, steps: int) -> TrainState:
    for _ in range(steps):
        state.model.zero_grad()
        state.model(X).square().sum().backward()
        state.optimizer.step()
    return state


def plain(value: Any) -> Any:
    """Comparable with ==."""
    if isinstance(value, Tensor):
        return value.tolist(), str(value.dtype)
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | deque):
        return type(value), getattr(value, "maxlen", None), [plain(one) for one in value]
    return type(value), value


@pytest.mark.capability("N1", "J13")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_from_a_file_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    first, second = train(make(name), 3), make(name, seed=1)
    found = load(tmp_path, save(tmp_path, first))
    second.load(found.tensors, found.scalars)
    assert plain(second.optimizer.state_dict()) == plain(first.optimizer.state_dict())
    train(first, 3)
    train(second, 3)
    assert plain(second.optimizer.state_dict()) == plain(first.optimizer.state_dict())
    assert all(torch.equal(second.tensors()[n], t) for n, t in first.tensors().items())


def with_an_object(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[optimizer.param_groups[0]["params"][0]]["object"] = object()


def with_a_stranger(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[torch.ones(2)] = {"moment": torch.ones(2)}


def with_a_number_for_a_key(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[optimizer.param_groups[0]["params"][0]][3] = 1.0


def with_more_in_its_state_dict(optimizer: torch.optim.Optimizer) -> None:
    optimizer.register_state_dict_post_hook(lambda own, found: found | {"slow": [1.0]})


def with_another_inside(optimizer: torch.optim.Optimizer) -> None:
    optimizer.inner = torch.optim.Adam(optimizer.param_groups[0]["params"])


@pytest.mark.capability("N1", "J13")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_an_object, "keeps 'object' of '0.weight' as object"),
        (with_a_stranger, "a tensor that is in none of its groups"),
        (with_a_number_for_a_key, "keeps '3' of '0.weight' under a key of type int"),
        (with_more_in_its_state_dict, "keeps 'slow' in its state_dict()"),
        (with_another_inside, "keeps an optimizer in 'inner'"),
    ],
)
def test_what_would_be_lost_is_refused_at_the_first_save(change: Any, words: str) -> None:
    state = make("sgd")
    change(state.optimizer)
    with pytest.raises(CheckpointError) as caught:
        state.pieces()
    assert words in str(caught.value) and caught.value.next_step


def test_without_the_refusal_it_would_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why the refusals are true: whoever goes on from such a state has nothing of what they speak of."""
    monkeypatch.setattr(OptimizerState, "_refuse_unsaved_state", lambda self: None)
    first, second = make("sgd"), make("sgd")
    with_more_in_its_state_dict(first.optimizer)
    with_another_inside(first.optimizer)
    with_another_inside(second.optimizer)
    train(first, 1).optimizer.inner.step()
    second.load({name: t.clone() for name, t in first.tensors().items()}, first.scalars())
    assert "slow" not in second.optimizer.state_dict()
    assert first.optimizer.inner.state and not second.optimizer.inner.state


def test_nothing_of_another_kind_of_optimizer_is_taken_over() -> None:
    """SGD without momentum has learned nothing; Adam starts anew."""
    first, second = train(make("sgd"), 1), make("together")
    second.load({name: t.clone() for name, t in first.tensors().items()}, first.scalars())
    assert not second.optimizer.state


@pytest.mark.parametrize(
    "value",
    [
        {"pickle": "x"},
        {"list": 3},
        {"list": [1]},
        {"table": [[1]]},
        {"table": [[[], {"is": 1}]]},
        {"deque": [-1, []]},
        {"is": []},
        {"tensor": 1},
        {"list": [], "is": 1},
        {},
        [1],
    ],
)
def test_a_manifest_that_puts_it_together_otherwise_is_damaged(value: Any) -> None:
    with pytest.raises(ValueError, match="momentum"):
        check_optimizer_value(value, "momentum")


def test_a_manifest_that_is_nested_deeply_is_damaged() -> None:
    value: dict[str, Any] = {"is": 1}
    for _ in range(100):
        value = {"list": [value]}
    with pytest.raises(ValueError, match="nested more than"):
        check_optimizer_value(value, "momentum")


def test_a_value_that_speaks_of_a_tensor_which_is_not_there_does_not_fit() -> None:
    state = train(make("shampoo"), 1)
    tensors, scalars = {n: t.clone() for n, t in state.tensors().items()}, state.scalars()
    gone = next(name for name in tensors if "left%" in name)
    del tensors[gone]
    with pytest.raises(CheckpointError, match=r"0\.weight/left"):
        make("shampoo").load(tensors, scalars)


class ScheduleFree(UserOptimizer):
    """As schedule-free SGD (Defazio et al. 2024, arXiv:2405.15682): the sum of weights is the group's."""

    def update(self, params: Sequence[Tensor], grads: Sequence[Tensor], step: int) -> None:
        self.group["weight_sum"] = self.group.get("weight_sum", 0.0) + self.group["lr"] ** 2
        self.group["gain"] *= 0.7
        share = self.group["lr"] ** 2 / self.group["weight_sum"]
        for p, g in zip(params, grads, strict=True):
            z = self.state[p].setdefault("z", p.clone())
            z -= self.group["gain"] * g
            p.lerp_(z, share)


def session(cluster: Cluster, strategy: str = "replicas=all", optimizer: Any = None) -> Session:
    def task() -> Task:
        torch.manual_seed(0)
        data = torch.randn(12, 4)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        return Task(
            model,
            data,
            lambda m, x: Loss(m(x).square().sum(), len(x)),
            optimizer=optimizer or (lambda m: ScheduleFree(m.named_parameters(), lr=0.3, gain=1.0)),
        )

    recipe = Recipe(task="own", steps=8, batch={"size": 6, "shards": 2}, strategy=Strategy.parse(strategy))
    return build_test_session(cluster, recipe, task)


def resumed(cluster: Cluster, strategy: str) -> tuple[list[float], list[float]]:
    """Losses of the last four steps, straight and after a resume."""
    straight = session(cluster, strategy)
    rounds = straight.rounds()
    first = [next(rounds).loss for _ in range(4)]
    snapshot = straight.snapshot()
    tensors = {name: t.clone() for name, t in snapshot.tensors().items()}
    scalars = json.loads(json.dumps(snapshot.scalars()))
    again = session(cluster, strategy)
    again.restore(tensors, scalars)
    assert first
    return [stats.loss for stats in rounds], [stats.loss for stats in again.rounds()]


@pytest.mark.capability("J13", "N2")
@pytest.mark.parametrize(
    "processes, strategy", [(1, "replicas=1"), (2, "replicas=2"), (2, "replicas=1 shard=2 zero=1")]
)
def test_a_rule_that_keeps_numbers_in_its_group_resumes_where_it_stopped(
    processes: int, strategy: str
) -> None:
    for straight, again in run_ranks(resumed, processes, strategy):
        assert again == straight and len(again) == 4


def optimizer_of(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, **options)


def test_only_what_changed_is_kept() -> None:
    optimizer = optimizer_of(momentum=0.9)
    memory = ParamGroupState(optimizer)
    assert memory.changed() == [{}]
    optimizer.param_groups[0]["lr"] = 0.01  # the schedule's
    optimizer.param_groups[0] |= {"initial_lr": 0.1, "k": 3, "momentum": 0.8}
    assert memory.changed() == [{"k": 3, "momentum": 0.8}]


def test_a_resume_with_another_recipe_trains_with_that() -> None:
    """The weight decay is the new recipe's, the counter that of the run."""
    old, new = optimizer_of(weight_decay=0.1), optimizer_of(weight_decay=0.2)
    before, after = ParamGroupState(old), ParamGroupState(new)
    old.param_groups[0]["k"] = 3
    new.param_groups[0]["stray"] = 1
    after.restore(before.changed())
    group = new.param_groups[0]
    assert group["weight_decay"] == 0.2 and group["k"] == 3 and "stray" not in group


@pytest.mark.parametrize("value", [torch.ones(2), [1.0], {"a": 1}], ids=["tensor", "list", "dict"])
def test_what_cannot_be_saved_is_refused_at_the_first_save(value: Any) -> None:
    optimizer = optimizer_of()
    state = TrainState(nn.Linear(1, 1), optimizer)
    optimizer.param_groups[0]["memory"] = value
    with pytest.raises(CheckpointError, match=r"in group\['memory'\]"):
        state.groups.changed()


def test_betas_that_a_scheduler_moves_are_kept_and_stay_a_tuple() -> None:
    """`OneCycleLR` moves the momentum by default."""
    old, new = (torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=0.1) for _ in range(2))
    before, after = ParamGroupState(old), ParamGroupState(new)
    torch.optim.lr_scheduler.OneCycleLR(old, 0.1, 20)
    moved = old.param_groups[0]["betas"]
    assert moved != new.param_groups[0]["betas"]
    after.restore(json.loads(json.dumps(before.changed())))
    assert new.param_groups[0]["betas"] == moved and type(moved) is tuple


def test_a_list_that_grows_in_place_is_seen() -> None:
    optimizer = optimizer_of()
    optimizer.param_groups[0]["history"] = []
    memory = ParamGroupState(optimizer)
    assert memory.changed() == [{}]
    optimizer.param_groups[0]["history"].append(1.0)
    with pytest.raises(CheckpointError, match="list"):
        memory.changed()
