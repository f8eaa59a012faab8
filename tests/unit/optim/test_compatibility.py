"""Which optimizers may update a part of a tensor alone, and how one comes to hold parts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import StrategyError, TaskError
from paceline.job.cluster import Cluster
from paceline.optim import UserOptimizer, compatibility, require_elementwise, require_one_gradient
from paceline.optim.compatibility import rebind_parameters
from paceline.parallel.placement import ModelPlacement, ShardTransform, TensorTransform
from paceline.parallel.sharded_model import shard_model, unsharded_model
from paceline.recipe import Recipe
from paceline.state.slot import trained_parameters
from paceline.task import Loss, SampleSource, Task
from paceline.testing.parity import build_test_session

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Lars(torch.optim.Optimizer):
    """The rate of a tensor is its norm by that of its gradient: You et al. 2017, arXiv:1708.03888."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * self.direction(p)

    def direction(self, p: Tensor) -> Tensor:
        assert p.grad is not None
        return p.grad * p.norm() / (p.grad.norm() + 1e-9)


class Lamb(Lars):
    """Adam's direction in place of the gradient's: You et al. 2020, arXiv:1904.00962."""

    def direction(self, p: Tensor) -> Tensor:
        assert p.grad is not None
        state = self.state[p]
        mean = state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
        square = state.setdefault("square", torch.zeros_like(p)).lerp_(p.grad**2, 0.1)
        way = mean / (square.sqrt() + 1e-6)
        return way * p.norm() / (way.norm() + 1e-9)


class Signs(Lars):
    """Elementwise, and nobody says so."""

    def direction(self, p: Tensor) -> Tensor:
        assert p.grad is not None
        return self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1).sign()


class Late(Signs):
    """Looks at the whole tensor from its third step on."""

    def direction(self, p: Tensor) -> Tensor:
        num_steps = self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
        way = super().direction(p)
        return way if num_steps < 3 else way * p.abs().max()


class Believed(Lars):
    elementwise = True


class Denied(Signs):
    elementwise = False


class Clumsy(Lars):
    def direction(self, p: Tensor) -> Tensor:
        raise ValueError("only on Sundays")


class Plain(UserOptimizer):
    def update(self, params: Any, grads: Any, step: int) -> None:
        for p, grad in zip(params, grads, strict=True):
            p -= self.group["lr"] * grad


KNOWN = (
    *("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"),
    *("Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"),
)
ACCEPTED: dict[str, Make] = {
    **{name: lambda ps, name=name: getattr(torch.optim, name)(ps, lr=0.1) for name in KNOWN},
    "SGD with momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "an elementwise one": Signs,
    "one that says so": Believed,
    "a user's": lambda ps: Plain(ps, lr=0.1),
}
REFUSED: dict[str, Make] = {
    "Lars": Lars,
    "Lamb": Lamb,
    "Late": Late,
    "Denied": Denied,
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.1),
    "Muon": lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2], lr=0.1),
}


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(2)
    return [nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(8))]


@pytest.mark.capability("A11", "J13")
@pytest.mark.parametrize("name", ACCEPTED)
def test_an_elementwise_optimizer_may_update_parts(name: str) -> None:
    given = parameters()
    before = [p.detach().clone() for p in given]
    optimizer = ACCEPTED[name](given)
    state = copy.deepcopy(optimizer.state_dict())  # Adagrad has some from the beginning
    require_elementwise(optimizer)
    assert all(torch.equal(p, was) for p, was in zip(given, before, strict=True))
    assert repr(optimizer.state_dict()) == repr(state), "a trial leaves no state behind"


@pytest.mark.capability("A11", "J13")
@pytest.mark.parametrize("name", REFUSED)
def test_one_that_looks_at_whole_tensors_is_refused(name: str) -> None:
    if not hasattr(torch.optim, name) and name in ("Adafactor", "Muon"):
        pytest.skip(f"this torch has no {name}")
    optimizer = REFUSED[name](parameters())
    with pytest.raises(StrategyError) as caught:
        require_elementwise(optimizer)
    text = f"{caught.value.what} {caught.value.next_step}"
    assert type(optimizer).__name__ in text
    assert "elementwise" in text
    assert not optimizer.state


def test_a_norm_of_a_large_tensor_is_not_that_of_its_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves of a million values of one distribution have norms that differ by a thousandth."""
    large = [nn.Parameter(torch.zeros(1 << 20))]
    with pytest.raises(StrategyError, match="Adafactor needs a whole tensor"):
        require_elementwise(torch.optim.Adafactor(large, lr=0.1))
    monkeypatch.setattr(compatibility, "_LEAST_GROWTH", 1.0)  # the mutation twin
    require_elementwise(torch.optim.Adafactor(large, lr=0.1))


def test_one_that_cannot_be_tried_says_why_and_what_to_do() -> None:
    with pytest.raises(StrategyError, match="only on Sundays") as caught:
        require_elementwise(Clumsy(parameters()))
    assert "elementwise = True" in str(caught.value.next_step)


def test_the_trial_uses_the_options_of_the_optimizer() -> None:
    """With another rate it would come to the same; here the rate decides."""

    class Sometimes(Signs):
        def direction(self, p: Tensor) -> Tensor:
            way = super().direction(p)
            return way if self.param_groups[0]["lr"] < 1 else way * p.norm()

    require_elementwise(Sometimes(parameters(), lr=0.1))
    with pytest.raises(StrategyError):
        require_elementwise(Sometimes(parameters(), lr=2.0))


@pytest.mark.parametrize("place", [0, 1])
def test_an_optimizer_of_a_whole_model_comes_to_hold_the_parts(place: int) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    model[0].bias.requires_grad_(False)
    slots = tuple(trained_parameters(model))
    sharded_model = shard_model(model, ModelPlacement(slots).cut(ShardTransform(2, {})), {"shard": place})
    groups = [
        {"params": [("a", model[0].weight)], "lr": 0.5},
        {"params": [("b", model[1].weight), ("c", model[1].bias)]},
    ]
    optimizer = torch.optim.Adam(groups, lr=0.1)
    rebind_parameters(optimizer, sharded_model)
    found = [
        [(p.shape[0], name) for p, name in zip(g["params"], g["param_names"], strict=True)]
        for g in optimizer.param_groups
    ]
    assert found == [[(3, "a")], [(1 + place, "b"), (1 + place, "c")]]
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.1]
    own = {id(p) for p in sharded_model.updates.values()}
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == own


def test_whole_parameters_stay_what_they_are() -> None:
    model = nn.Linear(4, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rebind_parameters(optimizer, unsharded_model(model))
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(model.weight), id(model.bias)]


@pytest.mark.capability("A11")
def test_nothing_is_kept_of_parameters_that_the_rank_does_not_update() -> None:
    """Adagrad has state from the beginning; that of a whole tensor would stay beside that of its part."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    slots = tuple(trained_parameters(model))
    sharded_model = shard_model(model, ModelPlacement(slots).cut(ShardTransform(2, {})), {"shard": 0})
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    rebind_parameters(optimizer, sharded_model)
    own = {id(p) for p in sharded_model.updates.values()}
    assert {id(p) for p in optimizer.state} <= own


DRIVEN = (*KNOWN, "Adafactor", "Muon")


def loss(model: nn.Module, batch: Tensor) -> Loss:
    return Loss(model(batch).square().sum(), len(batch))


def train(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer], data: SampleSource | None = None
) -> Tensor:
    task = Task(nn.Linear(3, 2, bias=False), data or torch.ones(6, 3), loss, optimizer=optimizer)
    recipe = Recipe(task="own", steps=2, batch={"size": 3, "shards": 1})
    list(build_test_session(Cluster.single(), recipe, lambda: task).rounds())
    return task.model.weight.detach()


class Sharpness(torch.optim.Optimizer):
    """Needs the loss at two points, as SAM does."""

    def step(self, closure: Callable[[], Any]) -> Any:
        return closure()


@pytest.mark.capability("J13")
@pytest.mark.parametrize(
    "optimizer",
    [lambda m: torch.optim.LBFGS(m.parameters()), lambda m: Sharpness(m.parameters(), {})],
    ids=["LBFGS", "SAM"],
)
def test_one_that_computes_the_loss_again_is_refused(optimizer: Any) -> None:
    with pytest.raises(TaskError, match="recomputes the loss within a step") as found:
        train(optimizer)
    assert "AdamW" in str(found.value)


@pytest.mark.capability("J13")
def test_one_of_sparse_gradients_is_refused() -> None:
    """The reason is true: PyTorch's own takes no dense gradient."""
    with pytest.raises(TaskError, match="takes only sparse gradients"):
        train(lambda m: torch.optim.SparseAdam(m.parameters()))
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="does not support dense gradients"):
        torch.optim.SparseAdam([p]).step()


@pytest.mark.capability("J13")
@pytest.mark.parametrize("name", DRIVEN)
def test_all_others_of_pytorch_train(name: str) -> None:
    kind = getattr(torch.optim, name)
    optimizer = kind([nn.Parameter(torch.ones(2, 2))])
    assert require_one_gradient(optimizer) is optimizer
    torch.manual_seed(0)
    start = nn.Linear(3, 2, bias=False).weight.detach()
    torch.manual_seed(0)
    assert not torch.equal(train(lambda m: kind(m.parameters())), start)


def test_fused_sgd_over_two_bytes_on_the_processor_is_refused_and_is_wrong() -> None:
    """The second half says why; where PyTorch is right again, the refusal may go."""
    torch.manual_seed(0)
    start, grads = torch.randn(37), [torch.randn(37) for _ in range(6)]
    ends = []
    for fused in (False, True):
        p = nn.Parameter(start.to(torch.bfloat16))
        optimizer = torch.optim.SGD([p], lr=0.05, momentum=0.9, fused=fused)
        for grad in grads:
            p.grad = grad.to(torch.bfloat16)
            optimizer.step()
        ends.append(p.detach().float())
    assert float((ends[0] - ends[1]).abs().max()) > 0.1
    with pytest.raises(TaskError, match="inaccurate for bfloat16 and float16"):
        require_one_gradient(optimizer)
    assert require_one_gradient(torch.optim.SGD([nn.Parameter(start)], lr=0.1, fused=True))
    assert require_one_gradient(torch.optim.SGD([p], lr=0.1))


class MuonWithAuxiliaryAdam(Signs):
    """Updates of whole matrices in one group, and elementwise ones in the other."""

    def direction(self, p: Tensor) -> Tensor:
        group = next(group for group in self.param_groups if any(p is q for q in group["params"]))
        if not group["matrices"]:
            return super().direction(p)
        assert p.grad is not None
        return torch.linalg.svd(p.grad, full_matrices=False)[0] @ torch.linalg.svd(p.grad, False)[2]


class FactoredAboveSixteen(Signs):
    """Row and column means for large matrices, as Adafactor keeps."""

    def direction(self, p: Tensor) -> Tensor:
        way = super().direction(p)
        return way if p.dim() < 2 or min(p.shape) <= 16 else way * p.abs().mean(1, keepdim=True).sqrt()


class Centralised(Lars):
    """Gradients minus their mean along a row: Yong et al. 2020, arXiv:2004.01461."""

    def direction(self, p: Tensor) -> Tensor:
        assert p.grad is not None
        return p.grad if p.dim() < 2 else p.grad - p.grad.mean(1, keepdim=True)


def _held_by_a_rank(model: nn.Module, dim: int) -> Any:
    """The second of two ranks, which updates half of each matrix along a dimension."""
    dims = {slot.name: dim for slot, p in trained_parameters(model).items() if p.dim() > 1}
    transform = TensorTransform(dims, 2)
    placement = ModelPlacement(tuple(trained_parameters(model))).cut(transform)
    return shard_model(model, placement, {"tensor": 1})


@pytest.mark.capability("A11", "J13")
@pytest.mark.parametrize("rate", [0.1, 1e-6, 0.0])
@pytest.mark.parametrize(
    "name, dim", [("groups", 1), ("factored", 0), ("centralised", 1), ("plain", 1), ("plain", 0)]
)
def test_an_optimizer_is_tried_on_its_own_shapes_groups_and_parts(name: str, dim: int, rate: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24))
    shard = _held_by_a_rank(model, dim)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    if name == "groups":
        groups = [{"params": others, "matrices": False}, {"params": matrices, "matrices": True}]
        optimizer: torch.optim.Optimizer = MuonWithAuxiliaryAdam(groups, lr=rate)
    else:
        kinds = {"factored": FactoredAboveSixteen, "centralised": Centralised, "plain": Signs}
        optimizer = kinds[name](model.parameters(), lr=rate)
    if name == "plain":
        require_elementwise(optimizer, shard)
    else:
        with pytest.raises(StrategyError, match="needs a whole tensor"):
            require_elementwise(optimizer, shard)
