"""Scatters in the order in which their buckets were full, launched as soon as their way is free."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from paceline.comm.collectives.collective import Arriving
from paceline.comm.handle import Handle
from paceline.comm.reduction.blocks import UNDER_WAY
from paceline.comm.reduction.pace import most_behind
from paceline.comm.reduction.reducer import drain
from paceline.comm.reduction.ways import Ways

Bucket = TypeVar("Bucket")


@dataclass
class Scatter(Generic[Bucket]):
    """One bucket of one micro-batch on its way.

    Args:
        rows: of all ranks, in block number `block`.
        key: of its way; there is one scatter at a time on it.
        number: of scatters before it in the step.
        arriving: see `Collective.reduce_scatter`.
    """

    bucket: Bucket
    block: int
    rows: Tensor
    key: str
    number: int
    arriving: Arriving = None
    handle: Handle | None = None


class Launches(Generic[Bucket]):
    """Scatters that wait for their way, and those that are under way.

    Invariant: scatters are launched in the order of `add`, the same on every rank; two on one way never
    meet, as a route may have one memory for it. A rank waits for what `Ways` says that it may, and once it is
    `closing` for all: then no rank needs anything from this one but its scatters.

    Where two are under way, it waits for the first before the next, or as soon as it may. So many that they
    hold what is behind (see `Pace`) are the most at a time; others queue.

    Args:
        sizes: bytes of all buckets, in the order of `add`.
        came: is given each that is complete, in their order.
        keep_up: see `Launched`.
    """

    def __init__(
        self,
        ways: Ways,
        sizes: Sequence[int],
        came: Callable[[Scatter[Bucket], Tensor], None],
        keep_up: Callable[[int], None],
    ) -> None:
        self._ways, self._came, pace = ways, came, ways.pace
        self._launched = None if pace is None else pace.join(keep_up)
        self._most = UNDER_WAY if pace is None else most_behind(sizes, pace.behind_bytes)
        self._queued: deque[Scatter[Bucket]] = deque()
        self._under_way: deque[Scatter[Bucket]] = deque()
        self.closing = False

    def begin(self) -> None:
        """A step; nothing is under way."""
        self.closing = False
        if self._launched is not None:
            self._launched.here = self._launched.everywhere = 0

    def add(self, scatter: Scatter[Bucket]) -> None:
        """A bucket is full."""
        self._queued.append(scatter)
        self.go_on()

    def go_on(self) -> None:
        """Take what came, and launch what can be."""
        while self._under_way and self._is_due(is_late=len(self._under_way) >= UNDER_WAY):
            self._settle()
        while self._queued:
            while not self._has_place(self._queued[0]):
                if not self._is_due(is_late=True):
                    return
                self._settle()
            self._launch(self._queued.popleft())

    def _has_place(self, scatter: Scatter[Bucket]) -> bool:
        """Whether it may be under way beside what is."""
        is_full = len(self._under_way) >= self._most
        return not is_full and all(one.key != scatter.key for one in self._under_way)

    def _launch(self, scatter: Scatter[Bucket]) -> None:
        scatter.handle = self._ways.shard.reduce_scatter(scatter.rows, scatter.key, scatter.arriving)
        self._under_way.append(scatter)
        if self._launched is not None:
            self._launched.here = scatter.number + 1

    @property
    def queues(self) -> bool:
        """Whether a scatter waits for its way."""
        return bool(self._queued)

    @property
    def num_bytes(self) -> int:
        """Of the buckets that are under way."""
        return sum(one.rows.nbytes for one in self._under_way)

    def end(self) -> None:
        """Wait for all."""
        self.closing = True
        self.go_on()
        while self._under_way:
            self._settle()

    def drop(self) -> None:
        """Let what was launched end, well or badly; forget it."""
        drain(one.handle for one in self._under_way)
        self._under_way.clear()
        self._queued.clear()

    def _is_due(self, *, is_late: bool) -> bool:
        """Whether the first one is there, or is late and may be waited for."""
        first = self._under_way[0]
        assert first.handle is not None
        if first.handle.is_complete():
            return True
        may_wait = self._launched is None or self.closing or first.number < self._launched.everywhere
        return is_late and may_wait

    def _settle(self) -> None:
        first = self._under_way.popleft()
        assert first.handle is not None
        self._came(first, first.handle.wait())
