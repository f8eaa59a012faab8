"""Several reductions as one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from paceline.comm.reduction.gradients import Gradients, Reduction
from paceline.slot import Slot


class Reducers:
    """Several reductions as one: slots that are summed over different ranks.

    Args:
        by_slot: which one takes which slot.
        all_of_them: in the order in which they finish, equal on every rank.
    """

    def __init__(self, by_slot: Mapping[Slot, Reduction], all_of_them: Sequence[Reduction]) -> None:
        self._by_slot, self._all = by_slot, all_of_them
        self.by_micro_batch = all_of_them[0].by_micro_batch

    def begin(self, num_micro_batches: int | None = None) -> None:
        """See `Reduction`."""
        for one in self._all:
            one.begin(num_micro_batches)

    def micro_batch(self, shards: range, is_last: bool) -> None:
        """See `Reduction`."""
        for one in self._all:
            one.micro_batch(shards, is_last)

    def ready(self, slot: Slot, grad: Tensor | None) -> None:
        """See `Reduction`."""
        self._by_slot[slot].ready(slot, grad)

    def close(self) -> None:
        """See `Reduction`."""
        for one in self._all:
            one.close()

    def finish(self) -> Gradients:
        """See `Reduction`."""
        found = [one.finish() for one in self._all]
        tensors = {slot: g for one in found for slot, g in one.tensors.items()}
        flats, norms = [x for one in found for x in one.flats], [x for one in found for x in one.norms]
        return Gradients(tensors, flats, norms, coded=[pair for one in found for pair in one.coded])

    def commit(self, used: Collection[str] | None = None) -> None:
        """See `Reduction`."""
        for one in self._all:
            one.commit(used)

    def abort(self) -> None:
        """See `Reduction`."""
        for one in self._all:
            one.abort()

    def lost(self) -> Sequence[tuple[str, Slot, Tensor]]:
        """See `Reduction`."""
        return [found for one in self._all for found in one.lost()]

    def set_lost(self, found: Mapping[tuple[str, str], Tensor]) -> None:
        """See `Reduction`."""
        for one in self._all:
            one.set_lost(found)

    def rescale(self, factor: float) -> None:
        """See `Reduction`."""
        for one in self._all:
            one.rescale(factor)
