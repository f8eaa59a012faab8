"""Part buffers: parts in rows, each in the shape and the strides of the parameter that it is a part of."""

from collections.abc import Mapping
from math import prod

import pytest
import torch
from torch import Tensor

from paceline.comm.reduction import PartBuffer
from paceline.parallel.placement import ModelPlacement, ShardTransform
from paceline.state.slot import TensorSlot

KINDS: dict[str, tuple[Tensor, int]] = {  # tensor, and the dimension that is cut
    "matrix": (torch.zeros(7, 3), 0),
    "vector": (torch.zeros(5), 0),
    "columns": (torch.zeros(4, 6), 1),
    "channels last": (torch.zeros(8, 3, 2, 5).to(memory_format=torch.channels_last), 0),
    "transposed": (torch.zeros(6, 4).t(), 1),  # its outermost dimension in memory
    "transposed, other dimension": (torch.zeros(6, 4).t(), 0),
    "strided": (torch.zeros(6, 8)[:, ::2], 0),
    "number": (torch.zeros(()), 0),
    "nothing": (torch.zeros(0, 3), 0),
    "no columns": (torch.zeros(4, 0), 0),
    "fewer rows than ranks": (torch.zeros(1, 2), 0),
}
DEGREES = (1, 2, 3, 4)


def numbered(like: Tensor, first: int = 1) -> Tensor:
    """Every value another one, in the strides of `like`."""
    values = torch.arange(first, first + like.numel()).to(like.dtype)
    return torch.empty_like(like).copy_(values.view(like.shape))


def by_slot(names: list[str]) -> dict[TensorSlot, Tensor]:
    return {TensorSlot.whole(name, KINDS[name][0]): KINDS[name][0] for name in names}


def parts_of(
    tensors: Mapping[TensorSlot, Tensor], degree: int
) -> dict[TensorSlot, tuple[TensorSlot | None, ...]]:
    dims = {slot.name: KINDS[slot.name][1] for slot in tensors if slot.shape}
    held = ModelPlacement(tuple(tensors)).cut(ShardTransform(degree, dims)).at({"shard": 0})
    return {one.computes: one.parts for one in held.values()}


def steps(x: Tensor) -> list[int]:
    """Strides; nobody takes a step along a dimension of one."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


def new_zeros(num_values: int, like: Tensor) -> Tensor:
    return like.new_zeros(num_values)


def buffer_of(names: list[str], degree: int, multiple: int = 1) -> PartBuffer:
    tensors = by_slot(names)
    return PartBuffer(list(tensors), tensors, parts_of(tensors, degree), new_zeros, multiple)


def all_parts(buffer: PartBuffer, degree: int) -> list[tuple[int, TensorSlot, Tensor]]:
    """Row, part and view of every part."""
    views = [buffer.own(buffer.rows[row], row) for row in range(degree)]
    return [(row, part, view) for row, found in enumerate(views) for part, view in found.items()]


@pytest.mark.capability("A11")
@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("name", KINDS)
def test_a_part_has_the_shape_and_the_strides_of_its_parameter(name: str, degree: int) -> None:
    """The strides that an optimizer's moments of that part get: those of a dense tensor like it."""
    tensor = KINDS[name][0]
    for _, part, view in all_parts(buffer_of([name], degree), degree):
        own = tensor[part.index]
        assert view.shape == own.shape
        assert steps(view) == steps(torch.empty_like(own))


@pytest.mark.parametrize(
    "name, degree", [("channels last", 2), ("channels last", 4), ("transposed", 2), ("transposed", 3)]
)
def test_parts_along_the_outermost_dimension_lie_in_memory_as_the_parameter_does(
    name: str, degree: int
) -> None:
    """Row by row they are its memory, so that a kernel meets the same elements side by side in both."""
    buffer = buffer_of([name], degree)
    (slot,) = buffer.slots
    tensor = numbered(KINDS[name][0])
    buffer.write(slot, tensor)
    memory = tensor.as_strided((tensor.numel(),), (1,))
    start = 0
    for row, part, view in all_parts(buffer, degree):
        assert view.stride() == tensor.stride()
        flat = buffer.rows[row][: part.numel]
        assert torch.equal(flat, memory[start : start + part.numel])
        start += part.numel
    assert start == tensor.numel()


@pytest.mark.parametrize("degree", DEGREES)
def test_tensors_of_every_kind_go_in_and_come_out_as_they_were(degree: int) -> None:
    buffer = buffer_of(list(KINDS), degree)
    values = {slot: numbered(KINDS[slot.name][0], 1000 * k) for k, slot in enumerate(buffer.slots)}
    for slot, value in values.items():
        buffer.write(slot, value)
    for slot, value in values.items():
        out = torch.full_like(value, -1.0)
        assert buffer.read(slot, out) is out
        assert torch.equal(out, value)
    for _, part, view in all_parts(buffer, degree):
        (whole,) = (value for slot, value in values.items() if slot.name == part.name)
        assert torch.equal(view, whole[part.index])


@pytest.mark.parametrize("degree", DEGREES)
def test_parts_of_a_row_share_no_value_and_every_value_is_in_one_part(degree: int) -> None:
    buffer = buffer_of(list(KINDS), degree)
    for _, _, view in all_parts(buffer, degree):
        view.add_(1.0)
    assert set(buffer.flat.tolist()) <= {0.0, 1.0}
    assert int(buffer.flat.sum()) == sum(prod(slot.shape) for slot in buffer.slots)
    assert buffer.flat.numel() == buffer.rows.numel()


@pytest.mark.parametrize("name", ["nothing", "no columns"])
def test_a_tensor_without_values_costs_nothing_and_can_be_written_and_read(name: str) -> None:
    for degree in DEGREES:
        buffer = buffer_of([name], degree)
        (slot,) = buffer.slots
        assert buffer.rows.shape == (degree, 1), "no buffer is empty: a collective needs a value"
        buffer.write(slot, KINDS[name][0])
        buffer.write(slot, None)
        assert buffer.read(slot, KINDS[name][0].clone()).shape == slot.shape
        assert not buffer.flat.any()


@pytest.mark.parametrize("multiple", [1, 2, 5])
def test_rows_are_equally_wide_and_a_multiple(multiple: int) -> None:
    buffer = buffer_of(["matrix", "vector", "number"], 3, multiple)
    num_rows, width = buffer.rows.shape
    sizes = [0] * num_rows
    for row, part, _ in all_parts(buffer, 3):
        sizes[row] += part.numel
    assert num_rows == 3 and width % multiple == 0
    assert max(sizes) <= width < max(sizes) + multiple


def test_none_writes_zeros_over_what_was_there() -> None:
    buffer = buffer_of(["matrix", "vector"], 2)
    first, second = buffer.slots
    for slot in (first, second):
        buffer.write(slot, torch.ones(slot.shape))
    buffer.write(first, None)
    assert not buffer.read(first, torch.ones(first.shape)).any()
    assert buffer.read(second, torch.zeros(second.shape)).all()


def test_the_views_of_another_row_of_the_same_width_are_of_that_row() -> None:
    """What a collective returns need not be the buffer's own memory."""
    buffer = buffer_of(["channels last", "number"], 2)
    for slot in buffer.slots:
        buffer.write(slot, numbered(KINDS[slot.name][0]))
    arrived = torch.cat([torch.zeros(9), 10 * buffer.rows[1]])[9:]  # not at the beginning of its memory
    found = buffer.own(arrived, 1)
    assert found.keys() == buffer.own(buffer.rows[1], 1).keys()
    for part, view in found.items():
        whole = numbered(KINDS[part.name][0])
        assert view.untyped_storage().data_ptr() == arrived.untyped_storage().data_ptr()
        assert torch.equal(view, 10 * whole[part.index])


@pytest.mark.parametrize("from_parts", [True, False], ids=["parts", "wholes"])
def test_one_row_is_filled_from_parts_or_from_what_they_are_parts_of(from_parts: bool) -> None:
    buffer = buffer_of(["matrix", "transposed", "number"], 2)
    wholes = {slot: numbered(KINDS[slot.name][0]) for slot in buffer.slots}
    by_name = {slot.name: value for slot, value in wholes.items()}
    mine = {part: by_name[part.name][part.index] for row, part, _ in all_parts(buffer, 2) if row == 1}
    buffer.write_row(1, mine if from_parts else wholes)
    assert not buffer.rows[0].any()
    for part, view in buffer.own(buffer.rows[1], 1).items():
        assert torch.equal(view, by_name[part.name][part.index])
