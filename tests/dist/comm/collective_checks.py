"""One check of every collective: it yields a line for each result that differs from a float64 reference.

The net is an argument, so that the same checks run on a net with a mistake, and must find it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline.comm import Net
from paceline.job.mesh import RankGroup

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = (*FLOATS, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
COMPLEX = (torch.complex64, torch.complex128)
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[:, ::2],
    "flat": lambda x: x.reshape(-1),
    "empty": lambda x: x[:, :0],
    "scalar": lambda x: x[1, 1],
}
REDUCED: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "product": lambda x: x.prod(0),
}


def value(rank: int, dtype: torch.dtype, form: str, rows: int = 4) -> Tensor:
    """What a rank passes in: every rank can make the tensor of every other."""
    draw = torch.Generator().manual_seed(1000 + rank)
    x = torch.randn(rows, 6, generator=draw, dtype=torch.float64)
    if dtype == torch.bool:
        return FORMS[form](x > 0.5)
    if dtype.is_complex:
        return FORMS[form](torch.complex(x, torch.randn(rows, 6, generator=draw, dtype=x.dtype)).to(dtype))
    if not dtype.is_floating_point:
        return FORMS[form](x.clamp(-3.0, 3.0).abs_().ceil_().to(dtype))
    return FORMS[form](x.to(dtype))


def close(found: Tensor, inputs: Sequence[Tensor], reduction: str) -> bool:
    """Equal to the reduction in float64, within P eps of the sum of the magnitudes; exact unless floating."""
    wide = torch.stack([x.to(torch.complex128) if x.is_complex() else x.double() for x in inputs])
    expected = REDUCED[reduction](wide)
    if found.is_complex():
        bound = len(inputs) * torch.finfo(found.dtype).eps * wide.abs().sum(0)
        return bool(((found - expected).abs() <= bound).all())
    if found.dtype == torch.bool:
        return torch.equal(found, expected != 0)
    if not found.dtype.is_floating_point:
        return torch.equal(found.double(), expected)
    size = wide.abs().prod(0) if reduction == "product" else wide.abs().sum(0)
    bound = len(inputs) * torch.finfo(found.dtype).eps * size
    return bool(((found.double() - expected).abs() <= bound).all())


def cases(world: int, dtypes: Sequence[torch.dtype] = DTYPES) -> Iterator[tuple[str, list[Tensor]]]:
    """A name, and the tensor of every rank."""
    for dtype in dtypes:
        for form in FORMS:
            yield f"{dtype} {form}", [value(rank, dtype, form) for rank in range(world)]


# The checks


def check_all_reduce(net: Net, group: RankGroup, folder: Path) -> Iterator[str]:
    for reduction in REDUCED:
        for name, inputs in cases(group.size):
            x = inputs[group.rank].clone(memory_format=torch.preserve_format)
            result = net.all_reduce(x, group, reduction).wait()
            if result is not x or not close(x, inputs, reduction):
                yield f"{reduction} {name}"


def check_sums(net: Net, group: RankGroup, dtypes: Sequence[torch.dtype]) -> Iterator[str]:
    for name, inputs in cases(group.size, dtypes):
        x = inputs[group.rank].clone(memory_format=torch.preserve_format)
        if net.all_reduce(x, group).wait() is not x or not close(x, inputs, "sum"):
            yield f"{name} over {group.size}"


def check_broadcast(net: Net, group: RankGroup, folder: Path) -> Iterator[str]:
    for source in range(group.size):
        for name, inputs in cases(group.size):
            x = inputs[group.rank].clone(memory_format=torch.preserve_format)
            result = net.broadcast(x, group, source).wait()
            if result is not x or not torch.equal(x, inputs[source]):
                yield f"from {source} {name}"


def check_reduce(net: Net, group: RankGroup, folder: Path) -> Iterator[str]:
    for destination in range(group.size):
        for name, inputs in cases(group.size):
            x = inputs[group.rank].clone(memory_format=torch.preserve_format)
            net.reduce(x, group, destination).wait()
            if group.rank == destination and not close(x, inputs, "sum"):
                yield f"to {destination} {name}"


def check_all_gather(net: Net, group: RankGroup, folder: Path) -> Iterator[str]:
    ragged = [
        (f"ragged {dtype}", [value(rank, dtype, "plain", rows=2 * rank) for rank in range(group.size)])
        for dtype in DTYPES
    ]
    for name, inputs in [*cases(group.size), *ragged]:
        found = net.all_gather(inputs[group.rank], group).wait()
        if not same(found, inputs):
            yield name


def check_reduce_scatter(net: Net, group: RankGroup, folder: Path) -> Iterator[str]:
    for reduction in ("sum", "max"):
        for name, inputs in cases(group.size):
            wide = [torch.cat([x] * group.size) + i for i, x in enumerate(inputs)] if inputs[0].dim() else []
            if not wide or inputs[0].dtype == torch.bool:
                continue
            found = net.reduce_scatter(wide[group.rank], group, reduction).wait()
            parts = [x.chunk(group.size)[group.rank] for x in wide]
            if found.dtype != parts[0].dtype or not close(found, parts, reduction):
                yield f"{reduction} {name}"
    mine = torch.arange(group.size * 3.0) + group.rank  # parts differ, so a wrong part shows
    expected = (group.size * torch.arange(group.size * 3.0) + sum(range(group.size))).chunk(group.size)
    if not torch.equal(net.reduce_scatter(mine, group).wait(), expected[group.rank]):
        yield "part"


def check_all_to_all(net: Net, group: RankGroup, folder: Path) -> Iterator[str]:
    for name, inputs in cases(group.size):
        # to rank i goes the tensor of rank (own + i), so every pair exchanges its own
        sent = [inputs[(group.rank + i) % group.size] for i in range(group.size)]
        expected = [inputs[(j + group.rank) % group.size] for j in range(group.size)]
        if not same(net.all_to_all(sent, group).wait(), expected):
            yield name
    numbered = [torch.tensor([group.rank, i]) for i in range(group.size)]
    if not same(
        net.all_to_all(numbered, group).wait(), [torch.tensor([j, group.rank]) for j in range(group.size)]
    ):
        yield "from and to"


def check_gather(net: Net, group: RankGroup, folder: Path) -> Iterator[str]:
    for destination in range(group.size):
        for name, inputs in cases(group.size):
            found = net.gather(inputs[group.rank], group, destination).wait()
            if not same(found, inputs if group.rank == destination else []):
                yield f"to {destination} {name}"


def check_scatter(net: Net, group: RankGroup, folder: Path) -> Iterator[str]:
    for source in range(group.size):
        for name, inputs in cases(group.size):
            parts = inputs if group.rank == source else None
            found = net.scatter(parts, torch.empty_like(inputs[0]), group, source).wait()
            if not same([found], [inputs[group.rank]]):
                yield f"from {source} {name}"


def check_barrier(net: Net, group: RankGroup, folder: Path) -> Iterator[str]:
    for last in range(group.size):
        if group.rank == last:
            time.sleep(0.05)
        (folder / f"{last}-{group.rank}").touch()
        net.barrier(group)
        arrived = len(list(folder.glob(f"{last}-*")))
        if arrived != group.size:
            yield f"left when {arrived} of {group.size} were there"


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(found) == len(expected) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        for a, b in zip(found, expected, strict=True)
    )


CHECKS = {
    "all_reduce": check_all_reduce,
    "broadcast": check_broadcast,
    "reduce": check_reduce,
    "all_gather": check_all_gather,
    "reduce_scatter": check_reduce_scatter,
    "all_to_all": check_all_to_all,
    "gather": check_gather,
    "scatter": check_scatter,
    "barrier": check_barrier,
}
