"""The schedule of scatters of gradients: their paths, a window of a few in flight, and a count of those
launched.

A window scatters whole buckets, a few at a time, through memory that stays: rows from other ranks are added
to this rank's row of the bucket, in place. However many buckets there are, their sums take as much memory as
the few in flight.

Ranks that gather parameters in backward must not wait for any scatter: another rank may launch it only after
a gather in which both take part. They report the number of their launches beside gathers; a scatter that
every rank has launched ends in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from paceline.comm.collectives.collective_protocol import Collective
from paceline.comm.handle import Handle
from paceline.comm.net import Net
from paceline.comm.reduction.bucket_buffers import MAX_IN_FLIGHT, transfer_buffer_name
from paceline.comm.workspace import Workspace
from paceline.job.mesh import RankGroup


@dataclass
class ScatterProgress:
    """The scatters of one reduction in this step.

    Args:
        launch_zeros: launches zeros up to a number of scatters; for a rank that has no more micro-batches.
        launched_here: number that this rank has launched.
        launched_everywhere: number that every rank had launched when it reported last.
    """

    launch_zeros: Callable[[int], None]
    launched_here: int = 0
    launched_everywhere: int = 0


class ScatterPacer:
    """The launch counts of all reductions of a rank, in an order that is equal on all ranks.

    Args:
        unconfirmed_bytes: see the function.
    """

    def __init__(self, unconfirmed_bytes: int) -> None:
        self.unconfirmed_bytes = unconfirmed_bytes
        self._all: list[ScatterProgress] = []

    def join(self, launch_zeros: Callable[[int], None]) -> ScatterProgress:
        """Add a reduction, and return its progress."""
        self._all.append(ScatterProgress(launch_zeros))
        return self._all[-1]

    def launch_counts(self) -> list[float]:
        """Return the counts of this rank, as numbers of which the maximum over ranks has to be computed."""
        counts = [float(progress.launched_here) for progress in self._all]
        # The maximum of negated counts is the minimum: one all_reduce gives both.
        return counts + [-number for number in counts]

    def update_counts(self, maxima: Sequence[float], *, is_idle: bool) -> None:
        """Set the counts from the maximum of each number over the ranks.

        Args:
            is_idle: this rank only takes part for others, and launches zeros up to the most that any rank has
                launched.
        """
        for progress, launched in zip(self._all, maxima[len(self._all) :], strict=True):
            progress.launched_everywhere = int(-launched)
        for progress, launched in zip(self._all, maxima[: len(self._all)] if is_idle else (), strict=False):
            progress.launch_zeros(int(launched))


def unconfirmed_bytes(blocks: Sequence[int], other_bytes: int) -> int:
    """Return the bytes of gradients that a rank completes before it knows whether others have launched them.

    A rank reports before the backward of a block and gets the counts after it; a rank without a micro-batch
    launches zeros once it has the counts. So these are the gradients of three blocks, and of parameters in no
    block. Ranks that use blocks in different orders, or leave some out, know less.

    Args:
        blocks: bytes of each block, in order.
        other_bytes: bytes of parameters in no block.
    """
    return other_bytes + max(sum(blocks[first : first + 3]) for first in range(len(blocks)))


def max_unconfirmed_buckets(sizes: Sequence[int], unconfirmed_bytes: int) -> int:
    """Return the most buckets of these sizes, in a row, that lie in `unconfirmed_bytes`; at least two."""
    max_count = 2
    for first in range(len(sizes)):
        inside, count = 0, 1
        for size in sizes[first + 1 :]:
            if inside >= unconfirmed_bytes:
                break
            inside, count = inside + size, count + 1
        max_count = max(max_count, count)
    return max_count


class ScatterWindow:
    """The scatters in flight of all reductions of a rank.

    Invariant: buckets are scattered in one order on every rank. A rank waits only for a scatter that it has
    launched itself, so every other rank has come as far, or will without this one.

    Args:
        memory: memory for the rows of other ranks; other uses of it begin when all scatters have ended.
    """

    def __init__(self, memory: Workspace) -> None:
        self._memory, self._num_expected = memory, 0
        # By turn, in the order in which they were launched.
        self._in_flight: dict[int, Handle] = {}

    def expect(self, num_values: int, like: Tensor, shard: Collective) -> None:
        """Allocate memory for a bucket of `num_values`, so that none has to grow in a step."""
        self._num_expected += 1
        size = shard.group.size - 1, num_values // shard.group.size
        for turn in range(min(MAX_IN_FLIGHT, self._num_expected)):
            self._memory.take(transfer_buffer_name(turn), size, like.dtype, like.device)

    def scatter(self, shard: Collective, rows: Tensor, key: str) -> Handle:
        """Sum `rows` [P, n]; the handle returns this rank's row of the sum, which is that of `rows`."""
        # Dictionaries keep their order: the first is the oldest.
        if len(self._in_flight) == MAX_IN_FLIGHT:
            next(iter(self._in_flight.values())).wait()
        turn = next(turn for turn in range(MAX_IN_FLIGHT) if turn not in self._in_flight)
        size = len(rows) - 1, rows.shape[1]
        arriving = partial(self._memory.take, transfer_buffer_name(turn), size, rows.dtype, rows.device)
        finish_turn = partial(self._finish_turn, turn, rows[shard.group.rank])
        self._in_flight[turn] = handle = shard.reduce_scatter(rows, key, arriving).then(finish_turn)
        return handle

    def _finish_turn(self, turn: int, row: Tensor, summed: Tensor) -> Tensor:
        """Copy the sum into this rank's row of the bucket, and free the memory of the turn."""
        # After an abort the turn is free already.
        self._in_flight.pop(turn, None)
        return row if summed.data_ptr() == row.data_ptr() else row.copy_(summed.view(-1))

    def abort(self) -> None:
        """Forget the scatters, which have ended or are about to be waited for."""
        self._in_flight.clear()


@dataclass(frozen=True)
class ScatterPaths:
    """The collectives that carry gradients which leave with every micro-batch.

    Args:
        shard: scatters them; exact, on a process group of its own.
        replica: sums parts over the ranks that update the same; exact.
        group: the ranks of `shard`, with another process group, over which they agree.
        pace: launches of every rank, where ranks wait for each other's parameters in backward; a rank waits
            for no other scatters there. One that has run all its micro-batches gathers before it scatters
            zeros, and one without a gradient here gathers the next parameters before it scatters the bucket.
            None: a rank may wait for any scatter.
        memory: memory of buckets that stay; see `BlockPool`.
        waits: a rank may wait for a scatter in backward. False where ranks complete gradients in different
            orders, as the chunks of a stage do under different numbers of micro-batches: then it waits only
            once it has run all of them, and until then more buckets may be in flight or queued.
    """

    shard: Collective
    replica: Collective
    group: RankGroup
    net: Net
    pace: ScatterPacer | None = None
    memory: Workspace = field(default_factory=Workspace)
    waits: bool = True
