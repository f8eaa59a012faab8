"""An optimizer that the user writes: a decay per step, with state, on a real model and real images."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import TaskError
from paceline.models import fan_in_rule, initialize_by_name
from paceline.optim import UserOptimizer
from paceline.tasks.digits import build, cross_entropy


class DecayRate(UserOptimizer):
    """value -= lr * decay^step * mean of the gradients so far, weighted towards the latest."""

    def update(self, params: Sequence[Tensor], grads: Sequence[Tensor], step: int) -> None:
        rate = self.group["lr"] * self.group["decay"] ** step
        for param, grad in zip(params, grads, strict=True):
            memory = self.state[param].setdefault("mean", torch.zeros_like(param))
            memory.mul_(0.5).add_(grad, alpha=0.5)
            param -= rate * memory


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    images, classes = build().data.tensors
    for t in steps:
        start = t * 64 % 1400
        batch = (images[start : start + 64], classes[start : start + 64])
        optimizer.zero_grad()
        loss = cross_entropy(model, batch)
        (loss.total / loss.count).backward()
        optimizer.step()


def fresh() -> tuple[nn.Module, DecayRate]:
    model = build().model
    initialize_by_name(model, 1, fan_in_rule)
    return model, DecayRate(model.named_parameters(), lr=0.5, decay=0.995)


@pytest.mark.capability("J13")
def test_it_trains_digits_and_its_state_resumes_to_the_same_bits() -> None:
    model, optimizer = fresh()
    train(model, optimizer, range(150))
    saved = (
        {name: value.clone() for name, value in model.state_dict().items()},
        torch.utils._pytree.tree_map(
            lambda v: v.clone() if isinstance(v, Tensor) else v, optimizer.state_dict()
        ),
    )
    train(model, optimizer, range(150, 300))
    images, classes = build().held_out.tensors
    assert (model(images).argmax(1) == classes).float().mean() > 0.9

    again, resumed = fresh()
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    train(again, resumed, range(150, 300))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))

    forgetful, without_state = fresh()
    forgetful.load_state_dict(saved[0])
    train(forgetful, without_state, range(150, 300))
    assert not torch.equal(forgetful.layers[0].weight, model.layers[0].weight)


@pytest.mark.capability("J13")
def test_the_rate_of_step_t_is_exact() -> None:
    value = nn.Parameter(torch.ones(1, dtype=torch.float64))

    class Plain(UserOptimizer):
        def update(self, params: Sequence[Tensor], grads: Sequence[Tensor], step: int) -> None:
            params[0].sub_(self.group["lr"] * self.group["decay"] ** step * grads[0])

    optimizer, expected = Plain([value], lr=0.5, decay=0.9), 1.0
    for t in range(20):
        value.grad = torch.full_like(value, 0.1)
        optimizer.step()
        expected -= 0.5 * 0.9**t * 0.1
        assert abs(value.item() - expected) < 1e-12


def test_groups_have_their_own_rate_and_parameters_without_a_gradient_are_left_out() -> None:
    seen: list[tuple[float, int, int]] = []

    class Note(UserOptimizer):
        def update(self, params: Sequence[Tensor], grads: Sequence[Tensor], step: int) -> None:
            assert not torch.is_grad_enabled()
            seen.append((self.group["lr"], len(params), step))

    used, unused, other = (nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = Note([{"params": [used, unused]}, {"params": [other], "lr": 0.01}], lr=0.1)
    (used.sum() + other.sum()).backward()
    optimizer.step()
    optimizer.step()
    assert seen == [(0.1, 1, 0), (0.01, 1, 0), (0.1, 1, 1), (0.01, 1, 1)]


@pytest.mark.capability("J13")
def test_an_update_without_any_gradient_is_an_error_and_not_a_no_op() -> None:
    _, optimizer = fresh()
    with pytest.raises(TaskError, match="no gradient"):
        optimizer.step()


def test_a_subclass_must_give_the_rule() -> None:
    with pytest.raises(TypeError, match="update"):
        UserOptimizer([nn.Parameter(torch.ones(1))], lr=0.1)
