"""Some columns of a buffer whose rows are the parts of its ranks: a large one is coded stretch by stretch.

While one stretch travels, the next is coded; so on a slow link nothing waits until a whole matrix is coded.
There are at most a few, since no more than two travel at a time, and a long link would stand empty.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from paceline.comm.workspace import Workspace

_VALUES = 1 << 18  # at least, of all rows: 1 MiB in float32
_MOST = 8  # stretches of a buffer


def stretches_of(width: int, num_rows: int, block: int) -> list[slice]:
    """The columns of rows [num_rows, width], in equal stretches, but for the rest of a block.

    Args:
        block: a stretch ends where one does; 0: all columns are one stretch.
    """
    most = max(block, _VALUES // num_rows // block * block) if block else width
    number = min(-(-width // most), _MOST)
    step = -(-width // (number * block)) * block if block else width
    return [slice(begin, min(begin + step, width)) for begin in range(0, width, step)]


def parts_of(x: Tensor, num_rows: int, some: slice) -> Iterator[Tensor]:
    """Some columns of each row of ceil(n / P) values of `x` [n]; views, shorter where `x` ends."""
    width = -(-x.numel() // num_rows)
    for row in range(num_rows):
        yield x[row * width :][some]


def columns_of(x: Tensor, num_rows: int, some: slice, workspace: Workspace) -> Tensor:
    """Of `x` [n], cut into rows of ceil(n / P) values of which the last may be short, some columns [P, m].

    A view where all rows are whole, and a copy whose ends are filled with zeros where they are not.
    """
    num_values = x.numel()
    width = -(-num_values // num_rows)
    if num_values == num_rows * width:
        return x.view(num_rows, width)[:, some]
    out = workspace.take("parts", (num_rows, some.stop - some.start), x.dtype, x.device)
    for there, found in zip(parts_of(x, num_rows, some), out, strict=True):
        found[: there.numel()] = there
        found[there.numel() :].zero_()
    return out
