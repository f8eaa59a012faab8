"""Buffers around micro-batches: restored between them, then changed by the mean over all ranks."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from paceline.data import split_evenly
from paceline.parallel import MicroBatchBuffers

NUM_MICRO_BATCHES = 8


def batch_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))


def batches() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(4 + i, 5, generator=draw) * 3.0 + 1.0 for i in range(NUM_MICRO_BATCHES)]


def step_on(world: int, steps: int = 3) -> list[dict[str, Tensor]]:
    """The buffers of every rank after some steps in which `world` ranks share the micro-batches."""
    models = [batch_norm() for _ in range(world)]
    ranks = [MicroBatchBuffers(model) for model in models]
    for _ in range(steps):
        changes = []
        for rank, (model, buffers) in enumerate(zip(models, ranks, strict=True)):
            buffers.begin_step()
            for i in split_evenly(NUM_MICRO_BATCHES, world, rank):
                model(batches()[i])
                buffers.end_micro_batch()
            changes.append(buffers.change)
        total = torch.stack(changes).sum(0)
        for buffers in ranks:
            buffers.end_step(total, NUM_MICRO_BATCHES)
    return [{name: b.clone() for name, b in model.named_buffers()} for model in models]


def with_buffer(value: Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("extra", value)
    return model


def run_step(model: nn.Module, after_each_micro_batch: Sequence[Tensor | None]) -> Tensor:
    """One step in which a micro-batch leaves the given value in `extra`, or does not touch it."""
    buffers = MicroBatchBuffers(model)
    buffers.begin_step()
    for value in after_each_micro_batch:
        if value is not None:
            model.extra.copy_(value)
        buffers.end_micro_batch()
    buffers.end_step(buffers.change, len(after_each_micro_batch))
    return model.extra


@pytest.mark.capability("A2")
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_statistics_do_not_depend_on_how_many_ranks_share_the_micro_batches(world: int) -> None:
    (alone,) = step_on(1)
    for found in step_on(world):
        for name, value in alone.items():
            assert torch.equal(found[name], value), name


def test_the_new_value_is_the_mean_over_micro_batches_of_what_one_micro_batch_alone_would_leave() -> None:
    (found,) = step_on(1, steps=1)
    means, variances = [], []
    for x in batches():
        model = batch_norm()
        model(x)
        means.append(model[1].running_mean.double())
        variances.append(model[1].running_var.double())
    torch.testing.assert_close(found["1.running_mean"], torch.stack(means).mean(0).float())
    torch.testing.assert_close(found["1.running_var"], torch.stack(variances).mean(0).float())
    assert found["1.num_batches_tracked"] == 1  # one step, whatever the number of micro-batches


def test_every_micro_batch_starts_from_the_values_before_the_step() -> None:
    model = batch_norm()
    buffers = MicroBatchBuffers(model)
    before = [b.clone() for b in model.buffers()]
    buffers.begin_step()
    for x in batches():
        model(x)
        assert not torch.equal(model[1].running_mean, before[0])
        buffers.end_micro_batch()
        for b, old in zip(model.buffers(), before, strict=True):
            assert torch.equal(b, old)


def test_a_step_without_micro_batches_changes_nothing() -> None:
    model = with_buffer(torch.tensor([1.0, 2.0]))
    buffers = MicroBatchBuffers(model)
    buffers.begin_step()
    buffers.end_step(buffers.change, 0.0)
    assert model.extra.tolist() == [1.0, 2.0]


def test_integer_counters_are_rounded_and_keep_their_type() -> None:
    values = [torch.tensor(n) for n in (11, 12, 13)]
    found = run_step(with_buffer(torch.tensor(10)), values)
    assert (found.item(), found.dtype) == (12, torch.int64)
    assert run_step(with_buffer(torch.tensor(10)), [torch.tensor(11), torch.tensor(11), None]).item() == 11


def test_a_buffer_that_the_forward_replaces_is_treated_like_one_that_it_changes() -> None:
    """`self.mean = 0.9 * self.mean + 0.1 * x` gives the module a new tensor."""
    model = with_buffer(torch.tensor([2.0]))
    buffers = MicroBatchBuffers(model)
    buffers.begin_step()
    for value in (4.0, 8.0):
        assert model.extra.tolist() == [2.0]
        model.extra = torch.tensor([value])
        buffers.end_micro_batch()
    buffers.end_step(buffers.change, 2.0)
    assert model.extra.tolist() == [6.0]


def test_buffers_outside_the_state_are_left_alone() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    buffers = MicroBatchBuffers(model)
    assert buffers.num_values == 0
    buffers.begin_step()
    model.scratch += 1.0
    buffers.end_micro_batch()
    buffers.end_step(buffers.change, 1.0)
    assert model.scratch.tolist() == [1.0, 1.0, 1.0]


def test_a_mask_with_minus_infinity_stays_what_it_is() -> None:
    mask = torch.full((3, 3), float("-inf")).triu(1)
    found = run_step(with_buffer(mask.clone()), [None, None])
    assert torch.equal(found, mask)  # (-inf) - (-inf) is NaN: a change must not be made of it


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(torch.tensor([1.0 + 2.0j, -3.0j]), id="complex"),
        pytest.param(torch.tensor([2**62 + 1, -(2**53) - 1]), id="large integers"),
        pytest.param(torch.tensor([True, False]), id="flags"),
        pytest.param(torch.tensor([1e300, 5e-324], dtype=torch.float64), id="float64"),
        pytest.param(torch.tensor([float("-inf"), float("inf"), 1.5]), id="infinite"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_buffer_that_the_forward_does_not_change_keeps_its_bits(value: Tensor) -> None:
    found = run_step(with_buffer(value.clone()), [None, None, None])
    assert torch.equal(found.view(torch.uint8), value.view(torch.uint8))
