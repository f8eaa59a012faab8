"""Gathers of blocks in one order on every rank, whatever order each rank uses them in.

A cycle gathers every block once in their order, for forwards, and, unless it is an evaluation, once back, for
backwards. A rank that needs a block takes part in the gathers before it, and drops what it does not need; a
block that the cycle has passed comes in the next one. So ranks may skip blocks, use them in another order or
several times, each as its samples ask for: no gather meets that of another block. Before each cycle the ranks
agree whether anybody needs one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.comm import Net
from paceline.layout.shard.block import Block
from paceline.mesh import Group

_MANY = 2.0**40


class Cycle:
    """The gathers of one run or evaluation.

    Args:
        blocks: in the order in which most micro-batches use them.
        group: the ranks that gather.
        net: carries the agreement.
    """

    def __init__(self, blocks: Sequence[Block], group: Group, net: Net) -> None:
        self._blocks, self._group, self._net = blocks, group, net
        self._order: list[int] = []
        self._place = 0
        self._begun = 0
        self.all_run = False

    def begin(self, *, both_ways: bool) -> None:
        """Of a run, both ways; of an evaluation, forward only."""
        there = [*range(len(self._blocks))]
        self._order = there + there[::-1] if both_ways else there
        self.stop()
        self._begun = 0

    def stop(self) -> None:
        """Nothing more is gathered."""
        self._place, self.all_run = len(self._order), False

    def next(self) -> None:
        """A micro-batch begins; collective."""
        self._finish()
        self._open(self._begun)
        self._begun += 1

    def end(self) -> None:
        """Nothing more is needed here; take part until that is so on every rank."""
        self._finish()
        while self._open(None):
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
            self._open(_MANY)
        while self._order[self._place] != number:
            self._join()
        self._blocks[number].gather()
        self._place += 1
        if self._place < len(self._order) and not self._blocks[self._order[self._place]].is_here:
            self._blocks[self._order[self._place]].start()

    def _join(self) -> None:
        self._blocks[self._order[self._place]].join()
        self._place += 1

    def _finish(self) -> None:
        """The rest of a cycle, for those who need it."""
        while self._place < len(self._order):
            self._join()

    def _open(self, micro_batch: float | None) -> bool:
        """Agree on another cycle; whether there is one.

        Args:
            micro_batch: its number on this rank; None: this rank needs no cycle.
        """
        mine = _MANY if micro_batch is None else micro_batch
        said = torch.tensor([float(micro_batch is not None), mine, -mine], dtype=torch.float64)
        is_wanted, last, first = self._net.all_reduce(said, self._group, "max").wait().tolist()
        self.all_run = last == -first < _MANY
        self._place = 0 if is_wanted else len(self._order)
        return bool(is_wanted)
