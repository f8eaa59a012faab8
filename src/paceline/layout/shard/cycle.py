"""Gathers of blocks in one order on every rank, whatever order each rank uses them in.

A cycle gathers every block once in their order, for forwards, and, unless it is an evaluation, once back, for
backwards. A rank that needs a block takes part in the gathers before it, and drops what it does not need; a
block that the cycle has passed comes in the next one. So ranks may skip blocks, use them in another order or
several times, each as its samples ask for: no gather meets that of another block. Before each cycle the ranks
agree whether anybody needs one; then, and beside each gather for backwards, they tell how many scatters of
gradients each has launched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.comm import Handle, Net
from paceline.comm.net import device_of
from paceline.comm.reduction import Pace
from paceline.comm.reduction.reducer import drain
from paceline.layout.shard.block import Block
from paceline.mesh import Group


class Cycle:
    """The gathers of one run or evaluation.

    Args:
        blocks: in the order in which most micro-batches use them.
        group: the ranks that gather.
        net: carries the agreement, and what ranks tell.
        pace: of the scatters of the gradients; None: there are no blocks.
    """

    def __init__(self, blocks: Sequence[Block], group: Group, net: Net, pace: Pace | None) -> None:
        self._blocks, self._group, self._net, self._pace = blocks, group, net, pace
        self._order: list[int] = []
        self._place = 0
        self._telling: Handle | None = None
        self._trains = self._is_idle = False

    def begin(self, *, both_ways: bool) -> None:
        """Of a run, both ways; of an evaluation, forward only."""
        there = [*range(len(self._blocks))]
        self._order = there + there[::-1] if both_ways else there
        self.stop()
        self._trains, self._is_idle = both_ways, False

    def stop(self) -> None:
        """Nothing more is gathered."""
        drain([self._telling])
        self._place, self._telling = len(self._order), None

    def next(self) -> None:
        """A micro-batch begins; collective."""
        self._finish()
        self._open(is_needed=True)

    def end(self) -> None:
        """Nothing more is needed here; take part until that is so on every rank."""
        self._finish()
        self._is_idle = self._trains
        while self._open(is_needed=False):
            self._finish()
        self.stop()

    def bring(self, number: int) -> None:
        """Have a block here; the next one is on its way then."""
        for place, block in enumerate(self._blocks):
            if place != number and block.is_done:
                block.release()
        if self._blocks[number].is_here:
            return
        if number not in self._order[self._place :]:
            self._finish()
            self._open(is_needed=True)
        while self._order[self._place] != number:
            self._join()
        self._start()
        self._blocks[number].gather()
        self._pass()
        if self._place < len(self._order) and not self._blocks[self._order[self._place]].is_here:
            self._start()

    def _join(self) -> None:
        self._start()
        self._blocks[self._order[self._place]].join()
        self._pass()

    def _start(self) -> None:
        """Begin the gather that comes next, unless it is on its way, and tell, unless this rank has."""
        self._blocks[self._order[self._place]].start()
        if self._pace is not None and self._telling is None and self._place >= len(self._blocks):
            self._telling = self._tell(self._pace)

    def _pass(self) -> None:
        """A gather is over; hear what the others have told beside it."""
        telling, self._telling = self._telling, None
        self._place += 1
        if telling is not None and self._pace is not None:
            self._pace.hear(telling.wait().tolist(), is_idle=self._is_idle)

    def _tell(self, pace: Pace) -> Handle:
        told = torch.tensor(pace.told(), dtype=torch.float64, device=device_of(self._group))
        return self._net.all_reduce(told, self._group, "max")

    def _finish(self) -> None:
        """The rest of a cycle, for those who need it."""
        while self._place < len(self._order):
            self._join()

    def _open(self, *, is_needed: bool) -> bool:
        """Agree on another cycle, if any rank needs it; whether there is one."""
        told = [float(is_needed), *(self._pace.told() if self._pace is not None else ())]
        said = torch.tensor(told, dtype=torch.float64, device=device_of(self._group))
        is_wanted, *most = self._net.all_reduce(said, self._group, "max").wait().tolist()
        self._place = 0 if is_wanted else len(self._order)
        if self._pace is not None:
            self._pace.hear(most, is_idle=self._is_idle)
        return bool(is_wanted)
