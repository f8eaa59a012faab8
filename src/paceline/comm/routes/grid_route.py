"""The grid: sums along the rows of a grid of ranks, then along its columns, then back along the rows.

Fewer rounds than one ring, at the same bytes. Rank k stands in column k mod X of row k div X. Where the
number of ranks is prime there is one column, and the grid is a ring.
Source: Ying et al. 2018, Image Classification at Supercomputer Scale, arXiv:1811.06992, section 2.4 (2D
mesh).
"""

from __future__ import annotations

from math import isqrt

from torch import Tensor

from paceline.comm.collectives.collective_protocol import Collective
from paceline.comm.routes.message_route import (
    MessageCost,
    RouteMessenger,
    build_message_route,
    part_length,
    part_slice,
)
from paceline.comm.routes.ring_route import RingRoute, ring_all_gather, ring_reduce_scatter
from paceline.comm.routes.route_context import RouteContext
from paceline.job.mesh import RankGroup


class GridRoute:
    """2 (X-1)/X n + 2 (Y-1)/Y n/X values and 2 (X-1) + 2 (Y-1) rounds for an all_reduce on X columns and
    Y rows.
    """

    def __init__(self) -> None:
        self._ring = RingRoute()

    def all_reduce(self, mail: RouteMessenger, x: Tensor) -> Tensor:
        """See `MessageRoute`."""
        along, across = _row_messenger(mail), _column_messenger(mail)
        parts = [x[part_slice(x.numel(), along.size, place)] for place in range(along.size)]
        ring_reduce_scatter(along, parts)
        self._ring.all_reduce(across, parts[along.rank])
        ring_all_gather(along, parts)
        return x

    def reduce_scatter(self, mail: RouteMessenger, rows: Tensor) -> Tensor:
        """See `MessageRoute`: rows for the ranks of a column travel along the row together."""
        along, across = _row_messenger(mail), _column_messenger(mail)
        by_column = _column_major(mail, rows)
        by_column.copy_(rows.view(across.size, along.size, *rows.shape[1:]).transpose(0, 1))
        ring_reduce_scatter(along, list(by_column))
        mine = by_column[along.rank]
        ring_reduce_scatter(across, list(mine))
        return rows[mail.rank].copy_(mine[across.rank])

    def all_gather(self, mail: RouteMessenger, rows: Tensor) -> Tensor:
        """See `MessageRoute`."""
        along, across = _row_messenger(mail), _column_messenger(mail)
        by_column = _column_major(mail, rows)
        by_column[along.rank, across.rank] = rows[mail.rank]
        ring_all_gather(across, list(by_column[along.rank]))
        ring_all_gather(along, list(by_column))
        rows.view(across.size, along.size, *rows.shape[1:]).copy_(by_column.transpose(0, 1))
        return rows

    def broadcast(self, mail: RouteMessenger, x: Tensor, source: int) -> Tensor:
        """See `MessageRoute`: along the column of the source, then along every row."""
        along, across = _row_messenger(mail), _column_messenger(mail)
        row, column = divmod(source, along.size)
        if along.rank == column:
            self._ring.broadcast(across, x, row)
        return self._ring.broadcast(along, x, column)

    def cost(self, op: str, size: int, rank: int, n: int, source: int = 0) -> MessageCost:
        """See `MessageRoute`."""
        width = num_grid_columns(size)
        height = size // width
        row, column = divmod(rank, width)
        if op == "all_reduce":
            along = self._ring.cost(op, width, column, n).num_values
            across = self._ring.cost(op, height, row, part_length(n, width, column)).num_values
            return MessageCost(along + across, 2 * (width - 1) + 2 * (height - 1))
        if op == "broadcast":
            from_row, from_column = divmod(source, width)
            along = self._ring.cost(op, width, column, n, from_column).num_values if width > 1 else 0
            across = self._ring.cost(op, height, row, n, from_row).num_values if height > 1 else 0
            return MessageCost(along + (across if column == from_column else 0), width - 1 + height - 1)
        return MessageCost((width - 1) * height * n + (height - 1) * n, width - 1 + height - 1)


def num_grid_columns(size: int) -> int:
    """The largest divisor that is not above the root of the number of ranks."""
    return next(width for width in range(isqrt(size), 0, -1) if size % width == 0)


def _column_major(mail: RouteMessenger, rows: Tensor) -> Tensor:
    """Memory [X, Y, n] for `rows` [X Y, n], those of a column together; their own where they lie so."""
    width = num_grid_columns(mail.size)
    found = rows.view(mail.size // width, width, *rows.shape[1:]).transpose(0, 1)
    return found if found.is_contiguous() else mail.workspace.like("by column", found)


def _row_messenger(mail: RouteMessenger) -> RouteMessenger:
    width = num_grid_columns(mail.size)
    first = mail.rank // width * width
    return mail.among(range(first, first + width))


def _column_messenger(mail: RouteMessenger) -> RouteMessenger:
    return mail.among(range(mail.rank % num_grid_columns(mail.size), mail.size, num_grid_columns(mail.size)))


def build_grid(group: RankGroup, context: RouteContext) -> Collective:
    """Messages along the rows and columns of a grid."""
    return build_message_route(group, context, "grid", GridRoute())
