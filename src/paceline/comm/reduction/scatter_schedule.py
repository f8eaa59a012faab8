"""How many scatters every rank has launched: ranks that gather in backward tell each other beside gathers.

Such a rank may not wait for any scatter: another one may launch it only after a gather that both take part
in. What all have launched comes in any case.

Scatters of whole buckets, a few at a time, through memory that stays.

What comes of other ranks is added to the own row of a bucket, in its place. So however many buckets there
are, their sums take as much memory as the few that are under way.

On which paths gradients go that leave with every micro-batch.
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
    """Scatters of one reduction in this step.

    Args:
        launch_zeros: launches zeros up to so many; for a rank that has no more micro-batches.
        launched_here: that this rank has launched.
        launched_everywhere: that every rank had launched when it told last.
    """

    launch_zeros: Callable[[int], None]
    launched_here: int = 0
    launched_everywhere: int = 0


class ScatterPacer:
    """Counts of all reductions of a rank, in an order that is equal on all ranks.

    Args:
        unconfirmed_bytes: see the function.
    """

    def __init__(self, unconfirmed_bytes: int) -> None:
        self.unconfirmed_bytes = unconfirmed_bytes
        self._all: list[ScatterProgress] = []

    def join(self, launch_zeros: Callable[[int], None]) -> ScatterProgress:
        """Another reduction; see `ScatterProgress`."""
        self._all.append(ScatterProgress(launch_zeros))
        return self._all[-1]

    def launch_counts(self) -> list[float]:
        """What this rank has launched, as numbers of which a max over ranks is to be heard."""
        here = [float(one.launched_here) for one in self._all]
        return here + [-number for number in here]

    def update_counts(self, most: Sequence[float], *, is_idle: bool) -> None:
        """The largest of each number on any rank.

        Args:
            is_idle: this rank takes part for others, and launches zeros as far as the first of them is.
        """
        for one, launched in zip(self._all, most[len(self._all) :], strict=True):
            one.launched_everywhere = int(-launched)
        for one, launched in zip(self._all, most[: len(self._all)] if is_idle else (), strict=False):
            one.launch_zeros(int(launched))


def unconfirmed_bytes(blocks: Sequence[int], rest: int) -> int:
    """Bytes of gradients that a rank completes while it does not know whether others have launched them.

    It tells before the backward of a block and hears after it; a rank that has no micro-batch launches zeros
    once it has heard. So these are the gradients of three blocks, and of what lies in none. Ranks that use
    blocks in different orders, or leave some out, know less.

    Args:
        blocks: bytes of each, in their order.
        rest: of what lies in no block.
    """
    return rest + max(sum(blocks[first : first + 3]) for first in range(len(blocks)))


def max_unconfirmed_buckets(sizes: Sequence[int], unconfirmed_bytes: int) -> int:
    """Of buckets of these sizes, in a row, the most that so many bytes lie in; at least two."""
    found = 2
    for first in range(len(sizes)):
        inside, count = 0, 1
        for size in sizes[first + 1 :]:
            if inside >= unconfirmed_bytes:
                break
            inside, count = inside + size, count + 1
        found = max(found, count)
    return found


class ScatterWindow:
    """Those of all reductions of a rank.

    Invariant: buckets are scattered in one order on every rank. A rank waits for a scatter that it has
    launched itself, so every other rank has come as far, or will without this one.

    Args:
        memory: in which others' rows come; what it is used for else begins when all scatters have ended.
    """

    def __init__(self, memory: Workspace) -> None:
        self._memory, self._num_expected = memory, 0
        self._under_way: dict[int, Handle] = {}  # by turn, as they were launched

    def expect(self, num_values: int, like: Tensor, shard: Collective) -> None:
        """There will be a bucket of so many values, whenever it is full: no memory has to grow in a step."""
        self._num_expected += 1
        size = shard.group.size - 1, num_values // shard.group.size
        for turn in range(min(MAX_IN_FLIGHT, self._num_expected)):
            self._memory.take(transfer_buffer_name(turn), size, like.dtype, like.device)

    def scatter(self, shard: Collective, rows: Tensor, key: str) -> Handle:
        """Sum `rows` [P, n]; the handle returns the own row of the sum, which is that of `rows`."""
        if len(self._under_way) == MAX_IN_FLIGHT:
            next(iter(self._under_way.values())).wait()
        turn = next(turn for turn in range(MAX_IN_FLIGHT) if turn not in self._under_way)
        size = len(rows) - 1, rows.shape[1]
        arriving = partial(self._memory.take, transfer_buffer_name(turn), size, rows.dtype, rows.device)
        came = partial(self._came, turn, rows[shard.group.rank])
        self._under_way[turn] = handle = shard.reduce_scatter(rows, key, arriving).then(came)
        return handle

    def _came(self, turn: int, own: Tensor, found: Tensor) -> Tensor:
        """The memory of a turn is free once its row lies in its bucket; after an abort it is free already."""
        self._under_way.pop(turn, None)
        return own if found.data_ptr() == own.data_ptr() else own.copy_(found.view(-1))

    def abort(self) -> None:
        """What was launched has ended, or is about to be waited for."""
        self._under_way.clear()


@dataclass(frozen=True)
class ScatterPaths:
    """On which paths gradients go.

    Args:
        shard: scatters them; exact, on a process group of its own.
        replica: sums parts over the ranks that update the same; exact.
        group: the ranks of `shard`, by another process group, over which they agree.
        pace: what every rank has launched, where ranks wait for each other's parameters in backward; a rank
            waits for no other scatters there. One that has run all its micro-batches gathers before it
            scatters zeros, and one without a gradient here gathers the next parameters before it scatters
            the bucket. None: a rank may wait for any scatter.
        memory: of buckets that stay; see `BlockPool`.
    """

    shard: Collective
    replica: Collective
    group: RankGroup
    net: Net
    pace: ScatterPacer | None = None
    memory: Workspace = field(default_factory=Workspace)
