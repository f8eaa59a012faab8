"""Replicate: what the sink is told, and when; accumulation, unused and tied weights, evaluation, keys."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.data import LoadedBatch, MicroBatch
from paceline.errors import TaskError
from paceline.models import KeyedDropout
from paceline.observe import PhaseTimer
from paceline.parallel import MixedPrecision, ReplicatedRunner
from paceline.parallel.model_runner import MetricNames
from paceline.parallel.sharded_model import unsharded_model
from paceline.state.slot import TensorSlot
from paceline.task import Loss


class Recorder:
    """A sink that notes what it gets, and whether the backward pass of the last micro-batch was still on."""

    by_micro_batch = False

    def __init__(self) -> None:
        self.order: list[TensorSlot] = []
        self.grads: dict[TensorSlot, Tensor | None] = {}

    def micro_batch(self, shards: range, is_last: bool) -> None:
        raise AssertionError("micro-batches are not taken apart")

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        self.order.append(slot)
        self.grads[slot] = None if grad is None else grad.clone()


class Branches(nn.Module):
    """`first` is always used, `second` if asked for, `never` not at all; `frozen` takes no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.first.weight

    def forward(self, x: Tensor, *, second: bool) -> Tensor:
        y = self.tied(torch.tanh(self.frozen(self.first(x))))
        return self.second(y) if second else y


def loss(model: nn.Module, batch: tuple[Tensor, bool]) -> Loss:
    x, second = batch
    y = model(x, second=second)
    return Loss(y.square().sum(), len(x), {"positive": (y > 0).sum()})


def place(model: nn.Module, loss_function=loss, names: tuple[str, ...] = ("positive",)) -> ReplicatedRunner:
    precision = MixedPrecision("fp32", "cpu")
    return ReplicatedRunner(
        unsharded_model(model), loss_function, MetricNames(names), precision=precision, phases=PhaseTimer()
    )


def micro_batches(seconds: Sequence[bool]) -> list[LoadedBatch]:
    draw = torch.Generator().manual_seed(7)
    return [
        LoadedBatch(
            MicroBatch(0, i, np.arange(3), key=100 + i), (torch.randn(3 + i, 4, generator=draw), second)
        )
        for i, second in enumerate(seconds)
    ]


@pytest.mark.capability("A10")
def test_the_sum_over_micro_batches_is_the_gradient_of_all_samples_at_once() -> None:
    model, sink = Branches().double(), Recorder()
    loaded = [
        LoadedBatch(u.micro_batch, (u.batch[0].double(), u.batch[1])) for u in micro_batches([True] * 5)
    ]
    runner = place(model)
    runner.run(loaded, 5, sink, 1.0)
    reference = Branches().double()
    loss(reference, (torch.cat([u.batch[0] for u in loaded]), True)).total.backward()
    expected = [p.grad for p in reference.parameters() if p.requires_grad]
    for slot, grad in zip(runner.sharded_model.slots, expected, strict=True):
        found = sink.grads[slot]
        assert (found is None) == (grad is None)
        if grad is not None:
            torch.testing.assert_close(found, grad, rtol=1e-12, atol=1e-12)


@pytest.mark.capability("A10")
@pytest.mark.parametrize("seconds", [[True], [True, True], [False, True], [True, False], [False, False]])
def test_every_parameter_is_announced_once_whatever_the_micro_batches_used(seconds: list[bool]) -> None:
    runner, sink = place(Branches()), Recorder()
    runner.run(micro_batches(seconds), len(seconds), sink, 1.0)
    assert Counter(sink.order) == Counter(runner.sharded_model.slots)
    missing = {slot.name for slot, g in sink.grads.items() if g is None}
    assert missing == {"never.weight", "never.bias"} | (
        set() if any(seconds) else {"second.weight", "second.bias"}
    )


@pytest.mark.capability("G10")
def test_gradients_are_announced_during_the_last_backward_in_its_order() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    announced_before_first_layer: list[int] = []
    sink = Recorder()

    def observed(m: nn.Module, batch: tuple[Tensor, bool]) -> Loss:
        h = m[0](batch[0])
        h.register_hook(lambda _: announced_before_first_layer.append(len(sink.order)))
        return Loss(m[2](m[1](h)).sum(), 1)

    runner, right = place(model, observed, ()), ["2", "2", "1", "1", "0", "0"]
    runner.run(micro_batches([True, True]), 2, sink, 1.0)
    assert [slot.name[0] for slot in sink.order] == right
    assert announced_before_first_layer == [
        0,
        4,
    ]  # in the first micro-batch it is counted how often each grows
    sink.order.clear()
    runner.run(micro_batches([True, True]), 2, sink, 1.0)
    assert [slot.name[0] for slot in sink.order] == right
    # none in the first micro-batch; two layers while the last one runs
    assert announced_before_first_layer[2:] == [0, 4]


def test_a_rank_without_micro_batches_announces_every_parameter_without_a_gradient() -> None:
    model = Branches()
    for p in model.parameters():
        p.grad = torch.ones_like(p)  # of the step before
    runner, sink = place(model), Recorder()
    sums = runner.run(iter(()), 0, sink, 1.0)
    assert sums.micro_batches == 0
    assert sums.read() == (0.0, 0.0, {"positive": 0.0})
    assert set(sink.grads.values()) == {None}
    assert len(sink.order) == len(runner.sharded_model.computes)


def test_the_loss_scale_multiplies_gradients_and_not_what_is_reported() -> None:
    plain, scaled = Recorder(), Recorder()
    first = place(Branches()).run(micro_batches([True]), 1, plain, 1.0)
    second = place(Branches()).run(micro_batches([True]), 1, scaled, 1024.0)
    assert first.read() == second.read()
    for slot, grad in plain.grads.items():
        assert grad is None or torch.equal(scaled.grads[slot], grad * 1024.0)


def test_only_as_many_micro_batches_are_pulled_as_the_step_has() -> None:
    stream = iter(micro_batches([True] * 5))
    place(Branches()).run(stream, 2, Recorder(), 1.0)
    assert next(stream).micro_batch.shard == 2


@pytest.mark.parametrize(
    "dropout", [lambda: nn.Dropout(0.5), lambda: KeyedDropout(0.5)], ids=["torch", "keyed"]
)
def test_what_is_random_in_a_micro_batch_depends_on_its_key_alone(dropout) -> None:
    def results(keys: Sequence[int], seed: int) -> list[float]:
        torch.manual_seed(seed)
        runner = place(nn.Sequential(nn.Linear(4, 64), dropout()), lambda m, b: Loss(m(b[0]).sum(), 1), ())
        with torch.no_grad():
            for p in runner.sharded_model.computes.values():
                p.copy_(torch.linspace(0.1, 1.0, p.numel()).view_as(p))
        x = torch.ones(2, 4)
        loaded = [LoadedBatch(MicroBatch(0, i, np.arange(2), key=k), (x, True)) for i, k in enumerate(keys)]
        return runner.run(loaded, len(keys), Recorder(), 1.0).per_micro_batch()[:, 0].tolist()

    first, second, third = results([31, 32, 33], seed=1)
    assert len({first, second, third}) == 3
    assert results([33, 31], seed=2) == [third, first]


def test_evaluation_keeps_no_graph_drops_nothing_and_leaves_gradients_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 8), KeyedDropout(0.9))
    runner = place(model, lambda m, b: Loss(m(b[0]).sum(), len(b[0])), ())
    runner.run(micro_batches([True]), 1, Recorder(), 1.0)
    before = [p.grad.clone() for p in model.parameters()]
    sums = runner.evaluate(micro_batches([True, True]))
    with torch.no_grad():
        expected = [model[0](u.batch[0]).sum().item() for u in micro_batches([True, True])]
    assert sums.per_micro_batch()[:, 0].tolist() == pytest.approx(expected)
    assert all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), before, strict=True))


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(TaskError, match="no parameter that takes a gradient"):
        place(nn.Linear(2, 2).requires_grad_(False))


def test_a_loss_that_returns_a_tensor_is_refused_in_training_and_in_evaluation() -> None:
    runner = place(nn.Linear(4, 1), lambda m, b: m(b[0]).sum(), ())
    with pytest.raises(TaskError, match="returned Tensor"):
        runner.run(micro_batches([True]), 1, Recorder(), 1.0)
    with pytest.raises(TaskError, match="returned Tensor"):
        runner.evaluate(micro_batches([True]))
