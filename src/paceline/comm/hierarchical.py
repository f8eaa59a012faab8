"""The hierarchical route: sums inside nodes first, then between nodes, then back.

Every rank of a node carries an equal slice of a buffer over the slow link. Only the first part is launched by
the caller: a thread of the wire launches each next part when the one before has ended, so all of it goes on
beside the backward pass. Each process group is used by one thread only, and buffers pass through it in the
order of their launch: so there is one order on every rank.

Invariant: after an error, nothing that waits behind it is started before `abort`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.comm.handle import Handle
from paceline.comm.net import Net
from paceline.comm.wire import Residual, Waits, in_parts
from paceline.errors import CommunicationError
from paceline.mesh import Group, Levels


class HierarchicalWire:
    """Values travel as they are, in two levels.

    Args:
        group: on several nodes, with several ranks on each.
        levels: of that group.
    Wire: n bytes on N nodes of L ranks, filled up to a multiple of L values. all_reduce: 2 (L-1)/L n inside
        a node (reduce_scatter, all_gather) and 2 (N-1)/N n/L between nodes. reduce_scatter: (L-1)/L n inside
        and (N-1)/N n/L between. By rank; `paceline.comm.cost.hierarchical_cost`.
    Exactness: that of rounding, sums of nodes are added up; equal bits on every rank.
    Source: Mikami et al. 2018, Massively Distributed SGD, arXiv:1811.05233 (2D-torus all-reduce).
    """

    def __init__(self, net: Net, group: Group, levels: Levels) -> None:
        self.net, self.group, self.levels = net, group, levels
        self._line = ThreadPoolExecutor(1, thread_name_prefix=f"{group.name}-between-nodes")
        self._broken: CommunicationError | None = None

    def buffer(self, num_values: int, like: Tensor, key: str) -> Tensor:
        """See `Wire`."""
        return like.new_zeros(num_values)

    def commit(self) -> None:
        """Nothing is kept between steps."""

    def all_reduce(self, x: Tensor, key: str) -> Waits:
        """See `Wire`."""
        if x.numel() == 0:
            return _Nothing(x)
        scattered = self.scatter(x)

        def rest() -> Handle:
            total = self.between(scattered.wait(exposed=False).view(-1))
            return self.net.all_gather(total, self.levels.gather, equal=True)

        return self._chain("all_reduce", rest, lambda slices: _join(slices, x))

    def reduce_scatter(self, x: Tensor, key: str) -> Waits:
        """See `Wire`; the result is a tensor of its own."""
        inside, between = self.levels.scatter, self.levels.between
        homes = torch.tensor(self.levels.order, device=x.device)
        rows = x.index_select(0, homes).view(inside.size, -1)
        scattered = self.net.reduce_scatter(rows, inside)

        def rest() -> Handle:
            return self.net.reduce_scatter(scattered.wait(exposed=False).view(between.size, -1), between)

        return self._chain("reduce_scatter", rest, lambda row: row.view(-1))

    def scatter(self, x: Tensor) -> Handle:
        """Launch the sum inside the node; the handle returns this rank's slice of it, [1, ceil(n / L)]."""
        num_slices = self.levels.scatter.size
        even = x.numel() % num_slices == 0
        return self.net.reduce_scatter(
            x.view(num_slices, -1) if even else in_parts(x, num_slices), self.levels.scatter
        )

    def between(self, own: Tensor) -> Tensor:
        """Sum a slice over the nodes, in place; blocks the thread of this wire."""
        total: Tensor = self.net.all_reduce(own, self.levels.between).wait(exposed=False)
        return total

    def abort(self) -> None:
        """Nothing is kept between steps but that something broke."""
        self._broken = None

    def residuals(self) -> dict[str, Residual]:
        """None: nothing is lost."""
        return {}

    def set_residuals(self, found: dict[str, Residual]) -> None:
        """There are none to keep."""

    def close(self) -> None:
        """End the thread; what was launched has been waited for."""
        self._line.shutdown()

    def _chain(self, op: str, rest: Callable[[], Handle], finish: Callable[[Any], Tensor]) -> Waits:
        return _Chain(self._line.submit(self._unless_broken, rest), self._waited(op), finish)

    def _unless_broken(self, rest: Callable[[], Handle]) -> Handle:
        if self._broken is not None:
            raise self._broken
        try:
            return rest()
        except CommunicationError as error:
            self._broken = error
            raise

    def _waited(self, op: str) -> Callable[[float], None]:
        """Counts seconds that the caller waited for the nodes."""

        def count(seconds: float) -> None:
            self.net.ledger.rows[op, self.levels.between.name].exposed_seconds += seconds

        return count


@dataclass(frozen=True)
class _Chain:
    """All parts of a sum: the thread returns the handle of the last one."""

    last: Future[Handle]
    count_seconds: Callable[[float], None]
    finish: Callable[[Any], Tensor]

    def wait(self) -> Tensor:
        """Every wait of the thread has the deadline of the net, so this one ends too."""
        began = time.perf_counter()
        handle = self.last.result()
        self.count_seconds(time.perf_counter() - began)
        return self.finish(handle.wait())


@dataclass(frozen=True)
class _Nothing:
    """The sum of no values."""

    x: Tensor

    def wait(self) -> Tensor:
        return self.x


def _join(slices: list[Tensor], x: Tensor) -> Tensor:
    """Write the slices over `x`; the last ones may be filled up, or hold nothing of it."""
    for piece, part in zip(x.split(slices[0].numel()), slices, strict=False):
        piece.copy_(part[: piece.numel()])
    return x
