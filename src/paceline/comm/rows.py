"""Flat buffers with a row for each rank: in it lie the rows of every parameter that the rank owns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

Cuts = Sequence[Sequence[slice]]
"""By parameter and by shard rank: which of its rows that rank owns."""


class RowBuffer:
    """Some parameters, cut into one row for each rank.

    Args:
        indices: which parameters, in the order in which they lie here.
        parameters: all of them.
        cuts: of all of them.
        multiple: the width of a row is a multiple of it.
        zeros: makes a buffer of so many values, like a tensor.
    """

    def __init__(
        self,
        indices: Sequence[int],
        parameters: Sequence[nn.Parameter],
        cuts: Cuts,
        multiple: int = 1,
        zeros: Callable[[int, Tensor], Tensor] = lambda num_values, like: like.new_zeros(num_values),
    ) -> None:
        like = parameters[indices[0]]
        self.num_rows = len(cuts[indices[0]])
        sizes = [[rows_of(parameters[i], cuts[i][r]).numel() for i in indices] for r in range(self.num_rows)]
        width = multiple * -(-max(1, *(sum(row) for row in sizes)) // multiple)
        self.rows = zeros(self.num_rows * width, like.detach()).view(self.num_rows, width)
        self.cuts = {i: cuts[i] for i in indices}
        self.views = [
            dict(zip(indices, self.rows[r, : sum(sizes[r])].split(sizes[r]), strict=True))
            for r in range(self.num_rows)
        ]

    def write(self, index: int, value: Tensor) -> None:
        """Cut one tensor into the rows."""
        for views, cut in zip(self.views, self.cuts[index], strict=True):
            views[index].copy_(rows_of(value, cut).reshape(-1))

    def read(self, index: int, out: Tensor) -> Tensor:
        """Put one tensor together again, in place."""
        for views, cut in zip(self.views, self.cuts[index], strict=True):
            rows = rows_of(out, cut)
            rows.copy_(views[index].view_as(rows))
        return out

    def own(self, row: Tensor, rank: int, parameters: Sequence[nn.Parameter]) -> dict[int, Tensor]:
        """The parts of one row [width], by parameter, shaped like their rows; without empty parts."""
        found, start = {}, 0
        for index, view in self.views[rank].items():
            if view.numel():
                like = part_of(parameters[index], self.cuts[index][rank])
                found[index] = row[start : start + view.numel()].view_as(like)
            start += view.numel()
        return found


def rows_of(x: Tensor, rows: slice) -> Tensor:
    """Some rows of a tensor; a scalar has one."""
    return x.reshape(1)[rows] if x.dim() == 0 else x[rows]


def part_of(x: Tensor, rows: slice) -> Tensor:
    """Some rows of a tensor, with as many dimensions as it has: a scalar is its own part."""
    return x if x.dim() == 0 else x[rows]
