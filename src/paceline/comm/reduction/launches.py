"""Scatters in the order in which their buckets were full, launched as soon as their way is free."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from paceline.comm.handle import Handle
from paceline.comm.reduction.reducer import drain
from paceline.comm.reduction.ways import Ways

Bucket = TypeVar("Bucket")


@dataclass
class Scatter(Generic[Bucket]):
    """One bucket of one micro-batch on its way.

    Args:
        rows: of all ranks, in block number `block`.
        key: of its way; there is one scatter at a time on it.
        round: number of the micro-batch.
    """

    bucket: Bucket
    block: int
    rows: Tensor
    key: str
    round: int
    handle: Handle | None = None


class Launches(Generic[Bucket]):
    """Scatters that wait for their way, and those that are under way.

    Invariant: scatters are launched in the order of `add`, the same on every rank; two on one way never
    meet, as a route may have one memory for it. A rank waits where `Ways` says that it may, and once it is
    `closing`: then no rank needs anything from this one but its scatters.

    Args:
        most: how many are under way at a time, where a rank may wait for any.
        came: is given each that is complete, in their order.
    """

    def __init__(self, ways: Ways, most: int, came: Callable[[Scatter[Bucket], Tensor], None]) -> None:
        self._ways, self._most, self._came = ways, most, came
        self._queued: deque[Scatter[Bucket]] = deque()
        self._under_way: deque[Scatter[Bucket]] = deque()
        self.closing, self._round = False, 0

    def add(self, scatter: Scatter[Bucket]) -> None:
        """A bucket is full."""
        self._round = scatter.round
        self._queued.append(scatter)
        self.go_on(scatter.round)

    def go_on(self, now: int) -> None:
        """Take what came, and launch what can be; in micro-batch number `now`."""
        while self._under_way and self._is_due(now, len(self._under_way) >= self._most):
            self._settle()
        while self._queued:
            scatter = self._queued[0]
            while any(one.key == scatter.key for one in self._under_way):
                if not self._is_due(now, True):
                    return
                self._settle()
            self._queued.popleft()
            scatter.handle = self._ways.shard.reduce_scatter(scatter.rows, scatter.key)
            self._under_way.append(scatter)

    def end(self) -> None:
        """Wait for all."""
        self.closing = True
        self.go_on(self._round)
        while self._under_way:
            self._settle()

    def drop(self) -> None:
        """Let what was launched end, well or badly; forget it."""
        drain(one.handle for one in self._under_way)
        self._under_way.clear()
        self._queued.clear()

    def _is_due(self, now: int, is_late: bool) -> bool:
        """Whether the first one is there, or worth waiting for."""
        first = self._under_way[0]
        assert first.handle is not None
        if first.handle.is_complete():
            return True
        if self._ways.waits or self.closing:
            return is_late
        return first.round < now and self._ways.all_run()

    def _settle(self) -> None:
        first = self._under_way.popleft()
        assert first.handle is not None
        self._came(first, first.handle.wait())
