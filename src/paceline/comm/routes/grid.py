"""The grid: sums along the rows of a grid of ranks, then along its columns, then back along the rows.

Fewer rounds than one ring, at the same bytes. Rank k stands in column k mod X of row k div X. Where the
number of ranks is prime there is one column, and the grid is a ring.
Source: Ying et al. 2018, Image Classification at Supercomputer Scale, arXiv:1811.06992, section 2.4 (2D
mesh).
"""

from __future__ import annotations

from math import isqrt

from torch import Tensor

from paceline.comm.routes.hops import Sent, length, stretch
from paceline.comm.routes.mail import Mail
from paceline.comm.routes.ring import Ring, add_round, pass_round


class Grid:
    """2 (X-1)/X n + 2 (Y-1)/Y n/X values and 2 (X-1) + 2 (Y-1) rounds for an all_reduce on X columns and
    Y rows.
    """

    def __init__(self) -> None:
        self._ring = Ring()

    def all_reduce(self, mail: Mail, x: Tensor) -> Tensor:
        """See `Hops`."""
        along, across = _row(mail), _column(mail)
        parts = [x[stretch(x.numel(), along.size, place)] for place in range(along.size)]
        add_round(along, parts)
        self._ring.all_reduce(across, parts[along.rank])
        pass_round(along, parts)
        return x

    def reduce_scatter(self, mail: Mail, rows: Tensor) -> Tensor:
        """See `Hops`: rows for the ranks of a column travel along the row together."""
        along, across = _row(mail), _column(mail)
        by_column = _by_column(mail, rows)
        by_column.copy_(rows.view(across.size, along.size, *rows.shape[1:]).transpose(0, 1))
        add_round(along, list(by_column))
        mine = by_column[along.rank]
        add_round(across, list(mine))
        return rows[mail.rank].copy_(mine[across.rank])

    def all_gather(self, mail: Mail, rows: Tensor) -> Tensor:
        """See `Hops`."""
        along, across = _row(mail), _column(mail)
        by_column = _by_column(mail, rows)
        by_column[along.rank, across.rank] = rows[mail.rank]
        pass_round(across, list(by_column[along.rank]))
        pass_round(along, list(by_column))
        rows.view(across.size, along.size, *rows.shape[1:]).copy_(by_column.transpose(0, 1))
        return rows

    def broadcast(self, mail: Mail, x: Tensor, source: int) -> Tensor:
        """See `Hops`: along the column of the source, then along every row."""
        along, across = _row(mail), _column(mail)
        row, column = divmod(source, along.size)
        if along.rank == column:
            self._ring.broadcast(across, x, row)
        return self._ring.broadcast(along, x, column)

    def cost(self, op: str, size: int, rank: int, n: int, source: int = 0) -> Sent:
        """See `Hops`."""
        width = columns_of(size)
        height = size // width
        row, column = divmod(rank, width)
        if op == "all_reduce":
            along = self._ring.cost(op, width, column, n).num_values
            across = self._ring.cost(op, height, row, length(n, width, column)).num_values
            return Sent(along + across, 2 * (width - 1) + 2 * (height - 1))
        if op == "broadcast":
            from_row, from_column = divmod(source, width)
            along = self._ring.cost(op, width, column, n, from_column).num_values if width > 1 else 0
            across = self._ring.cost(op, height, row, n, from_row).num_values if height > 1 else 0
            return Sent(along + (across if column == from_column else 0), width - 1 + height - 1)
        return Sent((width - 1) * height * n + (height - 1) * n, width - 1 + height - 1)


def columns_of(size: int) -> int:
    """The largest divisor that is not above the root of the number of ranks."""
    return next(width for width in range(isqrt(size), 0, -1) if size % width == 0)


def _by_column(mail: Mail, rows: Tensor) -> Tensor:
    """Memory [X, Y, n] for `rows` [X Y, n], those of a column together; their own where they lie so."""
    width = columns_of(mail.size)
    found = rows.view(mail.size // width, width, *rows.shape[1:]).transpose(0, 1)
    return found if found.is_contiguous() else mail.workspace.like("by column", found)


def _row(mail: Mail) -> Mail:
    width = columns_of(mail.size)
    first = mail.rank // width * width
    return mail.among(range(first, first + width))


def _column(mail: Mail) -> Mail:
    return mail.among(range(mail.rank % columns_of(mail.size), mail.size, columns_of(mail.size)))
