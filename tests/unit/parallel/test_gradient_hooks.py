"""Gradients are handed on once, complete, also where autograd adds to one several times in a backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.errors import TaskError
from paceline.parallel.gradient_hooks import GradientHooks
from paceline.state.slot import TensorSlot, trained_parameters


class Sink:
    """Notes what comes, and whether backward was still under way."""

    def __init__(self, by_micro_batch: bool = False) -> None:
        self.by_micro_batch = by_micro_batch
        self.seen: list[tuple[str, Tensor | None]] = []
        self.early: set[str] = set()
        self.in_backward = False

    def micro_batch(self, shards: range, is_last: bool) -> None: ...

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        self.seen.append((slot.name, None if grad is None else grad.clone()))
        if self.in_backward:
            self.early.add(slot.name)


class Recurrent(nn.Module):
    """The middle layer is used three times, the last one not at all if `skips`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.middle, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = torch.tanh(self.middle(x))
        return x if self.skips else self.last(x)


class Reentrant(Recurrent):
    """Each use of the middle layer is recomputed by a backward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = checkpoint(lambda y: torch.tanh(self.middle(y)), x, use_reentrant=True)
        return x if self.skips else self.last(x)


class NotReentrant(Recurrent):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = checkpoint(lambda y: torch.tanh(self.middle(y)), x, use_reentrant=False)
        return x if self.skips else self.last(x)


MODELS: dict[str, Callable[[], Recurrent]] = {
    "plain": Recurrent,
    "reentrant": Reentrant,
    "not reentrant": NotReentrant,
}
X = torch.linspace(-1, 1, 8).view(2, 4)


def backward(model: nn.Module, handing: GradientHooks, sink: Sink, num_micro_batches: int = 1) -> None:
    """One step of some micro-batches."""
    handing.begin()
    for micro_batch in range(num_micro_batches):
        is_last = micro_batch == num_micro_batches - 1
        handing.open(sink if is_last or sink.by_micro_batch else None)
        loss = model(X * (micro_batch + 1)).square().sum()
        sink.in_backward = is_last
        loss.backward()
        sink.in_backward = False
        handing.close()


def right(model: nn.Module, num_micro_batches: int = 1) -> dict[str, Tensor]:
    losses = [model(X * (micro_batch + 1)).square().sum() for micro_batch in range(num_micro_batches)]
    names = [name for name, _ in model.named_parameters()]
    grads = torch.autograd.grad(sum(losses), list(model.parameters()), allow_unused=True)
    return {name: g for name, g in zip(names, grads, strict=True) if g is not None}


@pytest.mark.capability("A2", "L1")
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("kind", MODELS)
def test_every_gradient_comes_once_and_complete(kind: str, num_micro_batches: int, overlap: bool) -> None:
    model = MODELS[kind]()
    handing = GradientHooks(trained_parameters(model), overlap=overlap)
    plain = Recurrent()
    plain.load_state_dict(model.state_dict())
    expected = right(plain, num_micro_batches)
    for step in range(4):
        sink = Sink()
        backward(model, handing, sink, num_micro_batches)
        assert sorted(name for name, _ in sink.seen) == sorted(expected)
        for name, grad in sink.seen:
            assert grad is not None
            torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-6)
        assert handing.used == set(expected)
        if not overlap:
            assert not sink.early
        elif step:
            once = {name for name in expected if kind != "reentrant" or not name.startswith("middle")}
            assert sink.early == once  # a layer that is used thrice in one graph is added to once


@pytest.mark.capability("A2")
def test_the_first_backward_hands_on_nothing_early() -> None:
    """Nobody knows yet how often autograd adds."""
    model, sink = Recurrent(), Sink()
    backward(model, GradientHooks(trained_parameters(model), overlap=True), sink)
    assert not sink.early and len(sink.seen) == 6


def test_by_micro_batch_each_starts_anew() -> None:
    model = Recurrent()
    handing = GradientHooks(trained_parameters(model), overlap=True)
    for _ in range(2):
        sink = Sink(by_micro_batch=True)
        backward(model, handing, sink, num_micro_batches=2)
        assert len(sink.seen) == 12
        total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for name, grad in sink.seen:
            assert grad is not None
            total[name] += grad
        for name, grad in right(model, 2).items():
            torch.testing.assert_close(total[name], grad, rtol=1e-5, atol=1e-6)


class Changing(Reentrant):
    """Reentrant from some call on."""

    recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        return Reentrant.forward(self, x) if self.recomputes else Recurrent.forward(self, x)


def test_one_that_grows_after_it_was_complete_is_an_error() -> None:
    model = Changing()
    handing = GradientHooks(trained_parameters(model), overlap=True)
    backward(model, handing, Sink())
    backward(model, handing, Sink())
    model.recomputes = True
    with pytest.raises(
        TaskError, match=r"the gradient of 'middle\.(weight|bias)' changed after it was complete"
    ):
        backward(model, handing, Sink())


def test_a_step_that_is_dropped_hands_on_nothing_more() -> None:
    model, sink = Recurrent(), Sink()
    handing = GradientHooks(trained_parameters(model), overlap=True)
    backward(model, handing, Sink())
    handing.begin()
    handing.open(sink)
    handing.stop()
    model(X).square().sum().backward()
    handing.close()
    assert not sink.seen
    again = Sink()
    backward(model, handing, again)
    assert len(again.seen) == 6


def clip(p: nn.Parameter) -> None:
    p.grad.mul_(0.5).clamp_(-0.01, 0.01)


@pytest.mark.capability("A2")
@pytest.mark.parametrize("overlap", [True, False])
def test_a_hook_sees_the_gradient_of_each_micro_batch_alone(overlap: bool) -> None:
    model, plain = Recurrent(), Recurrent()
    plain.load_state_dict(model.state_dict())
    expected = [right(plain, 1)["first.weight"], right(plain, 2)["first.weight"]]
    alone = [expected[0], expected[1] - expected[0]]
    model.first.weight.register_post_accumulate_grad_hook(clip)
    handing = GradientHooks(trained_parameters(model), overlap=overlap)
    for _ in range(3):
        sink = Sink()
        backward(model, handing, sink, 2)
        found = dict(sink.seen)["first.weight"]
        torch.testing.assert_close(found, sum((0.5 * g).clamp(-0.01, 0.01) for g in alone))
        assert not torch.allclose(
            found, (0.5 * expected[1]).clamp(-0.01, 0.01)
        )  # what the sum would have given


def test_a_hook_that_steps_during_backward_is_refused() -> None:
    model = Recurrent()

    def step(p: nn.Parameter) -> None:
        with torch.no_grad():
            p -= 0.1 * p.grad
        p.grad = None

    model.first.weight.register_post_accumulate_grad_hook(step)
    with pytest.raises(TaskError, match=r"a hook has removed the gradient of 'first\.weight'"):
        backward(model, GradientHooks(trained_parameters(model), overlap=True), Sink())
