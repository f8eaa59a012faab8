"""The grid route: sums along the rows of a grid of ranks, then along its columns, then back along the rows.

Fewer rounds than one ring, with the same bytes. Rank k is in column k mod X of row k div X. If the number of
ranks is prime there is one column, and the grid is a ring.
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
    """A grid: 2 (X-1)/X n + 2 (Y-1)/Y n/X values and 2 (X-1) + 2 (Y-1) rounds for an all_reduce on X
    columns and Y rows.
    """

    def __init__(self) -> None:
        self._ring = RingRoute()

    def all_reduce(self, messenger: RouteMessenger, x: Tensor) -> Tensor:
        along, across = _row_messenger(messenger), _column_messenger(messenger)
        chunks = [x[part_slice(x.numel(), along.size, index)] for index in range(along.size)]
        ring_reduce_scatter(along, chunks)
        self._ring.all_reduce(across, chunks[along.rank])
        ring_all_gather(along, chunks)
        return x

    def reduce_scatter(self, messenger: RouteMessenger, rows: Tensor) -> Tensor:
        """Sum along the row of the grid, with the rows for all ranks of a column together, then along the
        column.
        """
        along, across = _row_messenger(messenger), _column_messenger(messenger)
        by_column = _column_major(messenger, rows)
        by_column.copy_(rows.view(across.size, along.size, *rows.shape[1:]).transpose(0, 1))
        ring_reduce_scatter(along, list(by_column))
        column_rows = by_column[along.rank]
        ring_reduce_scatter(across, list(column_rows))
        return rows[messenger.rank].copy_(column_rows[across.rank])

    def all_gather(self, messenger: RouteMessenger, rows: Tensor) -> Tensor:
        along, across = _row_messenger(messenger), _column_messenger(messenger)
        by_column = _column_major(messenger, rows)
        by_column[along.rank, across.rank] = rows[messenger.rank]
        ring_all_gather(across, list(by_column[along.rank]))
        ring_all_gather(along, list(by_column))
        rows.view(across.size, along.size, *rows.shape[1:]).copy_(by_column.transpose(0, 1))
        return rows

    def broadcast(self, messenger: RouteMessenger, x: Tensor, source: int) -> Tensor:
        """Copy along the column of the source, then along every row."""
        along, across = _row_messenger(messenger), _column_messenger(messenger)
        row, column = divmod(source, along.size)
        if along.rank == column:
            self._ring.broadcast(across, x, row)
        return self._ring.broadcast(along, x, column)

    def cost(self, op: str, size: int, rank: int, n: int, source: int = 0) -> MessageCost:
        """Return the closed form: that of a ring along the row, and of one along the column."""
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
    """Return the largest divisor of the number of ranks that is not above its square root."""
    # The squarest grid has the fewest rounds.
    return next(width for width in range(isqrt(size), 0, -1) if size % width == 0)


def _column_major(messenger: RouteMessenger, rows: Tensor) -> Tensor:
    """Return memory [X, Y, n] for `rows` [X Y, n], those of a column together; a view of `rows` if they
    already are.
    """
    width = num_grid_columns(messenger.size)
    view = rows.view(messenger.size // width, width, *rows.shape[1:]).transpose(0, 1)
    return view if view.is_contiguous() else messenger.workspace.like("by column", view)


def _row_messenger(messenger: RouteMessenger) -> RouteMessenger:
    width = num_grid_columns(messenger.size)
    first = messenger.rank // width * width
    return messenger.among(range(first, first + width))


def _column_messenger(messenger: RouteMessenger) -> RouteMessenger:
    return messenger.among(
        range(
            messenger.rank % num_grid_columns(messenger.size),
            messenger.size,
            num_grid_columns(messenger.size),
        )
    )


def build_grid(group: RankGroup, context: RouteContext) -> Collective:
    """Build the collective that sends messages along the rows and columns of a grid."""
    return build_message_route(group, context, "grid", GridRoute())
