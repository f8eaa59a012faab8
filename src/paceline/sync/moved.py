"""What coding has lost of how replicas moved between two meetings, as state.

It is no gradient: a rule that sums gradients cannot send it, and moves the parameters by it when it begins,
as the outer optimizer would have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.comm.reduction import all_lost
from paceline.layout import Holding
from paceline.slot import Index, Keeper, Piece, Slot, below
from paceline.sync.outer import Movement
from paceline.sync.residuals import Residuals

_SHARE = "share/"


class Moved(Keeper):
    """Of a rule that goes on sending it.

    Args:
        residuals: of the reducers of these movements.
        movements: all of the parameters.
    """

    def __init__(self, residuals: Residuals, movements: Sequence[Movement]) -> None:
        self._residuals, self._movements = residuals, movements

    def pieces(self) -> list[Piece]:
        """The residuals, and by parameter what one of theirs would move it."""
        found = self._residuals.pieces()
        for movement in self._movements if found else ():
            share = torch.tensor([movement.share], dtype=torch.float64)
            for slot in movement.anchors:
                place = Slot.whole(f"{_SHARE}{slot.name}", share)
                found.append(Piece(replace(place, axes=slot.axes), share))
        return found

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Index]:
        """See `Residuals`."""
        shares = [name for name in shapes if name.startswith(_SHARE)]
        rest = {name: shape for name, shape in shapes.items() if name not in shares}
        return {**self._residuals.wanted(rest), **dict.fromkeys(shares, ())}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Residuals`; it is worth as much as where it was lost."""
        shares, found = below(tensors, _SHARE), dict[str, Tensor]()
        own = next((movement.share for movement in self._movements), 1.0)
        for full, rows in tensors.items():
            side, _, name = full.partition("/")
            if name and f"{side}/" != _SHARE:
                factor = float(shares[name]) / own
                found[full] = rows if factor == 1.0 else rows * factor
        self._residuals.load(found)


class MovedAtOnce(Keeper):
    """Of a rule that sends no movements: they are made when it takes over the state.

    Args:
        holding: of this rank; its values are changed in place.
    """

    def __init__(self, holding: Holding) -> None:
        self._own: dict[str, tuple[Slot, Tensor]] = {}
        for name, one in holding.held.items():
            if one.kept:
                self._own[name] = one.computes, holding.computes[one.computes]
            elif one.updates is not None:
                self._own[name] = one.updates, holding.updates[one.updates]

    def pieces(self) -> list[Piece]:
        """Nothing is left."""
        return []

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Index]:
        """The rows of all ranks, of what this one has."""
        found: dict[str, Index] = {}
        for full in shapes:
            side, _, name = full.partition("/")
            if name in self._own and f"{side}/" != _SHARE:
                found[full] = (slice(None), *self._own[name][0].index)
            elif name in self._own:
                found[full] = ()
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Move the parameters by the sum over all ranks and sides."""
        places = {full: full.partition("/") for full in tensors if not full.startswith(_SHARE)}
        sums = {(side, name): tensors[full].sum(0) for full, (side, _, name) in places.items()}
        with torch.no_grad():
            for name, lost in all_lost(sums).items():
                self._own[name][1].sub_(lost * float(tensors[f"{_SHARE}{name}"]))
