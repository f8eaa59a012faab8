"""What coding has lost, as state: one row for each rank that codes.

Of gradients it is saved beside what they were multiplied with, so that a rule that multiplies them with
something else, or with nothing, goes on from the same loss.

Source: Seide et al. 2014; what is lost must be sent later, so a checkpoint that forgets it changes the run.

What coding has lost of how replicas moved between two meetings, as state.

It is no gradient: a rule that sums gradients cannot send it, and moves the parameters by it when it begins,
as the outer optimizer would have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from paceline.comm.reduction.pending_residual import sum_residuals
from paceline.job.mesh import RankGroup
from paceline.parallel.sharded_model import ShardedModel
from paceline.state.slot import ExtraState, SlotIndex, TensorPiece, TensorSlot, strip_prefix

if TYPE_CHECKING:
    from paceline.sync.outer_optimizer import ParameterDelta

SCALE, ITEMS = "scale", "items"
"""Kept beside them: what they are multiples of, and of how many items the gradients were sums."""


class ResidualSource(Protocol):
    """Knows what coding has lost; see `GradientReduction`."""

    def residuals(self) -> Sequence[tuple[str, TensorSlot, Tensor]]:
        """What coding has lost: (which side's, slot, values in its shape)."""

    def set_residuals(self, found: Mapping[tuple[str, str], Tensor]) -> None:
        """Go on from these."""


class ResidualUnit(Protocol):
    """What gradients, or movements, and what coding has lost of them, are multiples of."""

    @property
    def scale(self) -> float:
        """What they are multiplied with."""

    @property
    def items(self) -> float | None:
        """Of how many items they are sums; None: that does not matter."""

    def resume(self, scale: float, items: float | None) -> float:
        """With what to multiply what was lost of these."""


@dataclass(frozen=True)
class FixedUnit:
    """A unit that stays."""

    scale: float = 1.0
    items: float | None = None

    def resume(self, scale: float, items: float | None) -> float:
        """See `ResidualUnit`."""
        of_items = 1.0 if self.items is None or items is None else self.items / items
        return self.scale / scale * of_items


_UNSCALED = FixedUnit()
RESIDUAL_KEEPERS = ("residual", "moved")
"""The keepers of what coding has lost: of gradients, and of movements."""


def orphaned_residuals(names: Collection[str], extra_states: Collection[str]) -> Sequence[str]:
    """Names of what coding had lost in a state that no keeper goes on from: it would never be sent.

    Args:
        names: of all tensors of the state.
        extra_states: the words of those who are here.
    """
    gone = tuple(f"{word}/" for word in RESIDUAL_KEEPERS if word not in extra_states)
    return sorted(name for name in names if gone and name.startswith(gone))


class ResidualState(ExtraState):
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
        reducer: ResidualSource,
        slots: Collection[TensorSlot],
        group: RankGroup,
        first: int = 0,
        left: Callable[[], Collection[int]] = tuple,
        unit: ResidualUnit = _UNSCALED,
    ) -> None:
        self._reducer, self._group, self._first, self._left = reducer, group, first, left
        self._unit = unit
        self._slots = {slot.name: slot for slot in slots}
        self._same_num_ranks: dict[str, bool] = {}  # by name, whether as many ranks code as when it was saved

    def pieces(self) -> list[TensorPiece]:
        """This rank's row of each, of as many as there are ranks left."""
        group = self._group
        left = [rank for rank in group.ranks if rank in (self._left() or group.ranks)]
        place = left.index(group.ranks[group.rank])
        found = []
        for side, slot, value in self._reducer.residuals():
            shape, part = (len(left), *slot.shape), ((place, place + 1), *slot.part)
            axes = slot.axes | ({"replica"} if len(left) > 1 else set())
            found.append(
                TensorPiece(TensorSlot(f"{side}/{slot.name}", shape, part, axes), value.unsqueeze(0))
            )
        if found:
            unit = self._unit
            found.append(_scalar_piece(SCALE, unit.scale))
            found += [] if unit.items is None else [_scalar_piece(ITEMS, unit.items)]
        return found

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, SlotIndex]:
        """This rank's rows; the first that sends takes those of ranks that do not send any more.

        Where the number of ranks has changed those are all.
        """
        mine, first = self._group.rank, self._first
        own = slice(mine if mine > first else 0, mine + 1 if mine >= first else 0)
        found: dict[str, SlotIndex] = {word: () for word in (SCALE, ITEMS) if word in shapes}
        for full, (rows, *_) in shapes.items():
            side, _, name = full.partition("/")
            if name not in self._slots:  # another rank's
                continue
            self._same_num_ranks[full] = rows == self._group.size
            if self._same_num_ranks[full]:
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
            if not self._same_num_ranks[full]:
                into = "velocity" if side.endswith("velocity") else "sent"
            found[into, name] = value + found[into, name] if (into, name) in found else value
        scale = float(tensors[SCALE]) if SCALE in tensors else self._unit.scale
        factor = self._unit.resume(scale, float(tensors[ITEMS]) if ITEMS in tensors else None)
        if factor != 1.0:
            found = {place: value * factor for place, value in found.items()}
        self._reducer.set_residuals(found)


def _scalar_piece(word: str, value: float) -> TensorPiece:
    one = torch.tensor([value], dtype=torch.float64)
    return TensorPiece(TensorSlot.whole(word, one), one)


_SHARE_PREFIX = "share/"


class DeltaResidualState(ExtraState):
    """Of a rule that goes on sending it.

    Args:
        residuals: of the reducers of these movements.
        movements: all of the parameters.
    """

    def __init__(self, residuals: ResidualState, movements: Sequence[ParameterDelta]) -> None:
        self._residuals, self._movements = residuals, movements

    def pieces(self) -> list[TensorPiece]:
        """The residuals, and by parameter what one of theirs would move it."""
        found = self._residuals.pieces()
        for movement in self._movements if found else ():
            share = torch.tensor([movement.share], dtype=torch.float64)
            for slot in movement.anchors:
                place = TensorSlot.whole(f"{_SHARE_PREFIX}{slot.name}", share)
                found.append(TensorPiece(replace(place, axes=slot.axes), share))
        return found

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, SlotIndex]:
        """See `ResidualState`."""
        shares = [name for name in shapes if name.startswith(_SHARE_PREFIX)]
        rest = {name: shape for name, shape in shapes.items() if name not in shares}
        return {**self._residuals.wanted(rest), **dict.fromkeys(shares, ())}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See `ResidualState`; it is worth as much as where it was lost."""
        shares, found = strip_prefix(tensors, _SHARE_PREFIX), dict[str, Tensor]()
        own = next((movement.share for movement in self._movements), 1.0)
        for full, rows in tensors.items():
            side, _, name = full.partition("/")
            if name and f"{side}/" != _SHARE_PREFIX:
                factor = float(shares[name]) / own
                found[full] = rows if factor == 1.0 else rows * factor
        self._residuals.load(found)


class DeltaResidualFlush(ExtraState):
    """Of a rule that sends no movements: they are made when it takes over the state.

    Args:
        sharded_model: of this rank; its values are changed in place.
    """

    def __init__(self, sharded_model: ShardedModel) -> None:
        self._own: dict[str, tuple[TensorSlot, Tensor]] = {}
        for name, one in sharded_model.held.items():
            if one.kept:
                self._own[name] = one.computes, sharded_model.computes[one.computes]
            elif one.updates is not None:
                self._own[name] = one.updates, sharded_model.updates[one.updates]

    def pieces(self) -> list[TensorPiece]:
        """Nothing is left."""
        return []

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, SlotIndex]:
        """The rows of all ranks, of what this one has."""
        found: dict[str, SlotIndex] = {}
        for full in shapes:
            side, _, name = full.partition("/")
            if name in self._own and f"{side}/" != _SHARE_PREFIX:
                found[full] = (slice(None), *self._own[name][0].index)
            elif name in self._own:
                found[full] = ()
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Move the parameters by the sum over all ranks and sides."""
        places = {full: full.partition("/") for full in tensors if not full.startswith(_SHARE_PREFIX)}
        sums = {(side, name): tensors[full].sum(0) for full, (side, _, name) in places.items()}
        with torch.no_grad():
            for name, lost in sum_residuals(sums).items():
                self._own[name][1].sub_(lost * float(tensors[f"{_SHARE_PREFIX}{name}"]))
