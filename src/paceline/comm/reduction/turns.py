"""Scatters of whole buckets, a few at a time, through memory that stays.

What comes of other ranks is added to the own row of a bucket, in its place. So however many buckets there
are, their sums take as much memory as the few that are under way.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from paceline.comm.collectives import Collective
from paceline.comm.handle import Handle
from paceline.comm.reduction.blocks import UNDER_WAY, moving
from paceline.comm.workspace import Workspace


class Turns:
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
        for turn in range(min(UNDER_WAY, self._num_expected)):
            self._memory.take(moving(turn), size, like.dtype, like.device)

    def scatter(self, shard: Collective, rows: Tensor, key: str) -> Handle:
        """Sum `rows` [P, n]; the handle returns the own row of the sum, which is that of `rows`."""
        if len(self._under_way) == UNDER_WAY:
            next(iter(self._under_way.values())).wait()
        turn = next(turn for turn in range(UNDER_WAY) if turn not in self._under_way)
        size = len(rows) - 1, rows.shape[1]
        arriving = partial(self._memory.take, moving(turn), size, rows.dtype, rows.device)
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
