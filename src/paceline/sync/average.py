"""The exponential moving average of the weights, kept by slot: every rank averages what it updates.

Invariant: after n updates the average is the same function of the first n parameters under every layout, to
the bit where the parameters are; how a tensor is cut, and on which rank, has no part in it. Buffers are not
averaged: an evaluation of the average uses them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from paceline.mesh import Group
from paceline.slot import Index, Keeper, Piece, Slot
from paceline.sync.update import Updating

VALUES = "values/"
_COUNT = "count"


class Average(Keeper):
    """The average of the parameters that this rank updates; a `Keeper`, so that checkpoints hold it.

    Args:
        updates: what this rank updates, by slot; only read, but for `in_place`.
        decay: share of the average that stays at an update.
        bring: brings what ranks compute with up to date when `updates` have changed; collective over a group.
        keeps: false on a rank that only takes what another one updates (the worker of a server).
    Source: Polyak and Juditsky 1992, Acceleration of Stochastic Approximation by Averaging; the decay rises
        as (1 + n) / (10 + n) in the first updates, as in TensorFlow's ExponentialMovingAverage.
    """

    def __init__(
        self,
        updates: Mapping[Slot, nn.Parameter],
        decay: float,
        bring: Callable[[Group], None],
        *,
        keeps: bool,
    ) -> None:
        self._updates, self._decay, self._bring = updates, decay, bring
        self.values = {slot: _wide(p) for slot, p in updates.items()} if keeps else {}
        self.count = torch.zeros(1, dtype=torch.int64)
        self.settle: Callable[[], None] = lambda: None  # a save that is under way may still read them

    def accept(self, record: Updating) -> None:
        """An observer of the update step: take in an update that was applied."""
        if record.update is not None and record.update.applied:
            self.follow(1)

    @torch.no_grad()
    def follow(self, num_updates: int) -> None:
        """Take in the parameters as they are, as if each of these updates had led to them."""
        keep = 1.0
        for _ in range(num_updates):
            n = int(self.count)
            keep *= min(self._decay, (1 + n) / (10 + n))
            self.count += 1
        for slot, value in self.values.items():
            # kernels that fuse two operations would make the ends of a part differ from its middle
            value.add_((self._updates[slot] - value).mul_(1.0 - keep))

    @contextmanager
    def in_place(self, world: Group) -> Iterator[None]:
        """Compute with the average inside of the block, with the parameters again after it; collective."""
        kept = [p.detach().clone() for p in self._updates.values()]
        self.put(world)
        try:
            yield
        finally:
            with torch.no_grad():
                for p, value in zip(self._updates.values(), kept, strict=True):
                    p.copy_(value)
            self._bring(world)

    def put(self, world: Group) -> None:
        """Let the average take the place of the parameters; collective."""
        self.settle()
        with torch.no_grad():
            for slot, value in self.values.items():
                self._updates[slot].copy_(value)
        self._bring(world)

    def pieces(self) -> Sequence[Piece]:
        """See `Keeper`."""
        if not self.values:
            return []
        count = Piece(Slot.whole(_COUNT, self.count), self.count)
        named = [
            Piece(replace(slot, name=f"{VALUES}{slot.name}"), value) for slot, value in self.values.items()
        ]
        return [count, *named]

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Index]:
        """This rank's parts."""
        parts = {f"{VALUES}{slot.name}": slot.index for slot in self.values} | {_COUNT: ()}
        return {name: index for name, index in parts.items() if name in shapes}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take this rank's parts; a checkpoint without an average begins one."""
        self.count.zero_()
        if _COUNT in tensors:
            self.count.copy_(tensors[_COUNT])
        with torch.no_grad():
            for slot, value in self.values.items():
                part = tensors.get(f"{VALUES}{slot.name}")
                value.copy_(self._updates[slot] if part is None else part)


def _wide(p: Tensor) -> Tensor:
    """A copy with the digits that small steps need: not below float32."""
    wide = torch.promote_types(p.dtype, torch.float32)
    return p.detach().to(wide, copy=True, memory_format=torch.preserve_format)
