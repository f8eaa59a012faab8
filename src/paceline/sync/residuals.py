"""What coding has lost, as state: one row for each rank that codes.

Of gradients it is saved beside what they were multiplied with, so that a rule that multiplies them with
something else, or with nothing, goes on from the same loss.

Source: Seide et al. 2014; what is lost must be sent later, so a checkpoint that forgets it changes the run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.mesh import Group
from paceline.slot import Index, Keeper, Piece, Slot

SCALE, ITEMS = "scale", "items"
"""Kept beside them: what they are multiples of, and of how many items the gradients were sums."""


class Coder(Protocol):
    """Knows what coding has lost; see `Reduction`."""

    def lost(self) -> Sequence[tuple[str, Slot, Tensor]]:
        """What coding has lost: (which side's, slot, values in its shape)."""

    def set_lost(self, found: Mapping[tuple[str, str], Tensor]) -> None:
        """Go on from these."""


class Unit(Protocol):
    """What gradients, or movements, and what coding has lost of them, are multiples of."""

    @property
    def scale(self) -> float:
        """What they are multiplied with."""

    @property
    def items(self) -> float | None:
        """Of how many items they are sums; None: that does not matter."""

    def go_on(self, scale: float, items: float | None) -> float:
        """With what to multiply what was lost of these."""


@dataclass(frozen=True)
class Always:
    """A unit that stays."""

    scale: float = 1.0
    items: float | None = None

    def go_on(self, scale: float, items: float | None) -> float:
        """See `Unit`."""
        of_items = 1.0 if self.items is None or items is None else self.items / items
        return self.scale / scale * of_items


_AS_THEY_ARE = Always()
KEPT_AS = ("residual", "moved")
"""The keepers of what coding has lost: of gradients, and of movements."""


def forgotten(names: Collection[str], keepers: Collection[str]) -> Sequence[str]:
    """Names of what coding had lost in a state that no keeper goes on from: it would never be sent.

    Args:
        names: of all tensors of the state.
        keepers: the words of those who are here.
    """
    gone = tuple(f"{word}/" for word in KEPT_AS if word not in keepers)
    return sorted(name for name in names if gone and name.startswith(gone))


class Residuals(Keeper):
    """The residuals of one reducer.

    Args:
        reducer: codes what it sends.
        slots: what this rank computes with.
        group: the ranks that code; one: all have the same row.
        first: the one of them that takes what the others had, where their number has changed.
            Ranks before it send nothing.
        left: those that are not lost; empty: nobody is. What the others have not sent is lost with them.
        unit: what these values are multiples of; equal on all ranks.
    """

    def __init__(
        self,
        reducer: Coder,
        slots: Collection[Slot],
        group: Group,
        first: int = 0,
        left: Callable[[], Collection[int]] = tuple,
        unit: Unit = _AS_THEY_ARE,
    ) -> None:
        self._reducer, self._group, self._first, self._left = reducer, group, first, left
        self._unit = unit
        self._slots = {slot.name: slot for slot in slots}
        self._goes_on: dict[str, bool] = {}  # by name, whether as many ranks code as when it was saved

    def pieces(self) -> list[Piece]:
        """This rank's row of each, of as many as there are ranks left."""
        group = self._group
        left = [rank for rank in group.ranks if rank in (self._left() or group.ranks)]
        place = left.index(group.ranks[group.rank])
        found = []
        for side, slot, value in self._reducer.lost():
            shape, part = (len(left), *slot.shape), ((place, place + 1), *slot.part)
            axes = slot.axes | ({"replica"} if len(left) > 1 else set())
            found.append(Piece(Slot(f"{side}/{slot.name}", shape, part, axes), value.unsqueeze(0)))
        if found:
            unit = self._unit
            found.append(_number(SCALE, unit.scale))
            found += [] if unit.items is None else [_number(ITEMS, unit.items)]
        return found

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Index]:
        """This rank's rows; the first that sends takes those of ranks that do not send any more.

        Where the number of ranks has changed those are all.
        """
        mine, first = self._group.rank, self._first
        own = slice(mine if mine > first else 0, mine + 1 if mine >= first else 0)
        found: dict[str, Index] = {word: () for word in (SCALE, ITEMS) if word in shapes}
        for full, (rows, *_) in shapes.items():
            side, _, name = full.partition("/")
            if name not in self._slots:  # another rank's
                continue
            self._goes_on[full] = rows == self._group.size
            if self._goes_on[full]:
                found[full] = (own, *self._slots[name].index)
            elif not side.endswith("factor"):  # factors are no loss: they are found anew
                found[full] = (slice(0, rows if mine == first else 0), *self._slots[name].index)
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from these rows; the first rank sends the sum of what others had."""
        found: dict[tuple[str, str], Tensor] = {}
        for full, rows in tensors.items():
            side, _, name = full.partition("/")
            if not name:
                continue
            value = rows[0] if len(rows) == 1 else rows.sum(0)
            into = side
            if not self._goes_on[full]:
                into = "velocity" if side.endswith("velocity") else "sent"
            found[into, name] = value + found[into, name] if (into, name) in found else value
        scale = float(tensors[SCALE]) if SCALE in tensors else self._unit.scale
        factor = self._unit.go_on(scale, float(tensors[ITEMS]) if ITEMS in tensors else None)
        if factor != 1.0:
            found = {place: value * factor for place, value in found.items()}
        self._reducer.set_lost(found)


def _number(word: str, value: float) -> Piece:
    one = torch.tensor([value], dtype=torch.float64)
    return Piece(Slot.whole(word, one), one)
