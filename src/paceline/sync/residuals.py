"""What coding has lost, as state: one row for each rank that codes.

Source: Seide et al. 2014; what is lost must be sent later, so a checkpoint that forgets it changes the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from paceline.comm import Reducer
from paceline.mesh import Group
from paceline.slot import Piece, Slot


class Residuals:
    """The residuals of one reducer.

    Args:
        reducer: codes what it sends.
        slots: of the parameters, by index.
        group: the ranks that code.
    """

    def __init__(self, reducer: Reducer, slots: Sequence[Slot], group: Group) -> None:
        self._reducer, self._slots, self._group = reducer, slots, group

    def pieces(self) -> list[Piece]:
        """This rank's row of each."""
        row = (self._group.rank, self._group.rank + 1)
        found = []
        for side, index, value in self._reducer.residuals():
            slot = self._slots[index]
            whole = Slot.whole(slot.name, value)
            shape, part = (self._group.size, *whole.shape), (row, *whole.part)
            name = f"{side}/{slot.name}"
            found.append(Piece(Slot(name, shape, part, frozenset({"replica"})), value))
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take this rank's rows; where the number of ranks has changed, the first one sends the sum."""
        places = {slot.name: index for index, slot in enumerate(self._slots)}
        found: dict[tuple[str, int], Tensor] = {}
        for full, rows in tensors.items():
            side, _, name = full.partition("/")
            if rows.shape[0] == self._group.size:
                found[side, places[name]] = rows[self._group.rank]
            else:
                before = found.get(("sent", places[name]))
                total = rows.sum(0) if self._group.rank == 0 else rows[0] * 0
                found["sent", places[name]] = total if before is None else before + total
        self._reducer.set_residuals(found)
