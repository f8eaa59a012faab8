"""The quantisation error of a codec as state, with one row for each rank that codes.

Errors of gradients are saved with the factor that the gradients had, so that a rule with another factor, or
with none, continues from the same error. Errors of parameter deltas (local SGD, DiLoCo) are no gradients: a
rule that sums gradients cannot send them, and moves the parameters by them once when it takes over.

Invariant: a codec sends later what it has not sent, so a checkpoint keeps all of it; nothing is dropped or
sent twice when the rule or the number of ranks changes.
Source: Seide et al. 2014, 1-Bit Stochastic Gradient Descent (error feedback).
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
"""Names of the tensors with the factor of the gradients and the number of items that they were sums of."""


class ResidualSource(Protocol):
    """An object that keeps the quantisation error of a codec, such as a `GradientReduction`."""

    def residuals(self) -> Sequence[tuple[str, TensorSlot, Tensor]]:
        """Return the errors, each with its side, its slot, and the values in the shape of the slot."""

    def set_residuals(self, errors: Mapping[tuple[str, str], Tensor]) -> None:
        """Continue from these errors, by side and name of the slot."""


class ResidualUnit(Protocol):
    """The unit of gradients and of their errors: a factor and a number of items."""

    @property
    def scale(self) -> float:
        """Return the factor of the gradients."""

    @property
    def items(self) -> float | None:
        """Return the number of items that the gradients are sums of; None: updates use sums, so it is not
        needed.
        """

    def resume(self, scale: float, items: float | None) -> float:
        """Return the factor that converts errors saved with this `scale` and these `items` to this unit."""


@dataclass(frozen=True)
class FixedUnit:
    """A unit that does not change in a run."""

    scale: float = 1.0
    items: float | None = None

    def resume(self, scale: float, items: float | None) -> float:
        of_items = 1.0 if self.items is None or items is None else self.items / items
        return self.scale / scale * of_items


_UNSCALED = FixedUnit()
RESIDUAL_KEEPERS = ("residual", "moved")
"""Words of the extra states with the errors of gradients, and of parameter deltas."""


def orphaned_residuals(names: Collection[str], extra_states: Collection[str]) -> Sequence[str]:
    """Return the names of saved errors that no extra state loads: they would never be sent.

    Args:
        names: all tensors of a state.
        extra_states: words of the extra states of the session.
    """
    prefixes = tuple(f"{word}/" for word in RESIDUAL_KEEPERS if word not in extra_states)
    return sorted(name for name in names if prefixes and name.startswith(prefixes))


class ResidualState(ExtraState):
    """The errors of one reduction.

    Args:
        reducer: codes what it sends.
        slots: what this rank computes with.
        group: the ranks that code; with one rank all ranks have the same row.
        first: the first rank of the group that sends. It adopts the errors of the others if a checkpoint has
            another number of ranks.
        left: returns the ranks that are not lost; empty: all. The errors of lost ranks are lost with them.
        unit: the unit of the values; equal on all ranks.
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
        self._same_num_ranks: dict[str, bool] = {}  # by name: as many ranks code as when it was saved

    def pieces(self) -> list[TensorPiece]:
        """Return this rank's row of each error tensor, which has one row for each rank that is not lost."""
        group = self._group
        left = [rank for rank in group.ranks if rank in (self._left() or group.ranks)]
        row = left.index(group.ranks[group.rank])
        pieces = []
        for side, slot, value in self._reducer.residuals():
            shape, part = (len(left), *slot.shape), ((row, row + 1), *slot.part)
            axes = slot.axes | ({"replica"} if len(left) > 1 else set())
            pieces.append(
                TensorPiece(TensorSlot(f"{side}/{slot.name}", shape, part, axes), value.unsqueeze(0))
            )
        # The unit is saved with the errors, because another rule may use another factor.
        if pieces:
            unit = self._unit
            pieces.append(_scalar_piece(SCALE, unit.scale))
            pieces += [] if unit.items is None else [_scalar_piece(ITEMS, unit.items)]
        return pieces

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, SlotIndex]:
        """Return this rank's rows. The first sender also takes the rows of ranks that send no more.

        If the number of ranks has changed, it takes all rows.
        """
        rank, first = self._group.rank, self._first
        # Ranks before `first` serve and code nothing: they take no row, and the first sender adopts theirs.
        own_rows = slice(rank if rank > first else 0, rank + 1 if rank >= first else 0)
        wanted: dict[str, SlotIndex] = {word: () for word in (SCALE, ITEMS) if word in shapes}
        for full, (rows, *_) in shapes.items():
            side, _, name = full.partition("/")
            if name not in self._slots:  # belongs to another rank
                continue
            self._same_num_ranks[full] = rows == self._group.size
            if self._same_num_ranks[full]:
                wanted[full] = (own_rows, *self._slots[name].index)
            elif not side.endswith("factor"):  # low-rank factors are no error: they are computed again
                wanted[full] = (slice(0, rows if rank == first else 0), *self._slots[name].index)
        return wanted

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load these rows; the first rank adopts the sum of the others' rows."""
        residuals: dict[tuple[str, str], Tensor] = {}
        for full, rows in tensors.items():
            side, _, name = full.partition("/")
            if not name:
                continue
            value = rows[0] if len(rows) == 1 else rows.sum(0)
            target_side = side
            # Sides belong to ranks (sent, received): a sum over other ranks is an error of what this rank
            # sends.
            if not self._same_num_ranks[full]:
                target_side = "velocity" if side.endswith("velocity") else "sent"
            residuals[target_side, name] = (
                value + residuals[target_side, name] if (target_side, name) in residuals else value
            )
        scale = float(tensors[SCALE]) if SCALE in tensors else self._unit.scale
        factor = self._unit.resume(scale, float(tensors[ITEMS]) if ITEMS in tensors else None)
        # A factor of 1 is the usual case, and multiplying would copy every error.
        if factor != 1.0:
            residuals = {side_and_name: value * factor for side_and_name, value in residuals.items()}
        self._reducer.set_residuals(residuals)


def _scalar_piece(word: str, value: float) -> TensorPiece:
    scalar = torch.tensor([value], dtype=torch.float64)
    return TensorPiece(TensorSlot.whole(word, scalar), scalar)


_SHARE_PREFIX = "share/"
"""In front of the names of tensors that hold `ParameterDelta.share`, by parameter."""


class DeltaResidualState(ExtraState):
    """The errors of parameter deltas, for a rule that sends deltas.

    Args:
        residuals: of the reductions of these deltas.
        deltas: of all parameters.
    """

    def __init__(self, residuals: ResidualState, deltas: Sequence[ParameterDelta]) -> None:
        self._residuals, self._deltas = residuals, deltas

    def pieces(self) -> list[TensorPiece]:
        """Return the errors, and for each parameter how far it moves for a unit of error."""
        pieces = self._residuals.pieces()
        for delta in self._deltas if pieces else ():
            share = torch.tensor([delta.share], dtype=torch.float64)
            for slot in delta.anchors:
                slot_of_share = TensorSlot.whole(f"{_SHARE_PREFIX}{slot.name}", share)
                pieces.append(TensorPiece(replace(slot_of_share, axes=slot.axes), share))
        return pieces

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, SlotIndex]:
        shares = [name for name in shapes if name.startswith(_SHARE_PREFIX)]
        residual_shapes = {name: shape for name, shape in shapes.items() if name not in shares}
        return {**self._residuals.wanted(residual_shapes), **dict.fromkeys(shares, ())}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the errors, rescaled so that they move the parameters as far as under the rule that saved
        them.
        """
        shares, residuals = strip_prefix(tensors, _SHARE_PREFIX), dict[str, Tensor]()
        # All deltas of a rule have the same outer optimizer, hence the same share.
        own_share = next((delta.share for delta in self._deltas), 1.0)
        for full, rows in tensors.items():
            side, _, name = full.partition("/")
            if name and f"{side}/" != _SHARE_PREFIX:
                factor = float(shares[name]) / own_share
                residuals[full] = rows if factor == 1.0 else rows * factor
        self._residuals.load(residuals)


class DeltaResidualFlush(ExtraState):
    """The errors of parameter deltas, for a rule that sends no deltas: it applies them when it takes over.

    Args:
        sharded_model: this rank's parameters, which are changed in place.
    """

    def __init__(self, sharded_model: ShardedModel) -> None:
        self._parameters: dict[str, tuple[TensorSlot, Tensor]] = {}
        for name, placement in sharded_model.held.items():
            # A parameter that every rank keeps whole is changed there; otherwise each rank changes the part
            # that it updates.
            if placement.kept:
                self._parameters[name] = placement.computes, sharded_model.computes[placement.computes]
            elif placement.updates is not None:
                self._parameters[name] = placement.updates, sharded_model.updates[placement.updates]

    def pieces(self) -> list[TensorPiece]:
        """Return nothing: all errors have been applied."""
        return []

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, SlotIndex]:
        """Return the rows of all ranks for this rank's parameters."""
        wanted: dict[str, SlotIndex] = {}
        for full in shapes:
            side, _, name = full.partition("/")
            if name in self._parameters and f"{side}/" != _SHARE_PREFIX:
                wanted[full] = (slice(None), *self._parameters[name][0].index)
            elif name in self._parameters:
                wanted[full] = ()
        return wanted

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Move the parameters by the sum of the errors over all ranks and sides."""
        sides_and_names = {
            full: full.partition("/") for full in tensors if not full.startswith(_SHARE_PREFIX)
        }
        sums = {(side, name): tensors[full].sum(0) for full, (side, _, name) in sides_and_names.items()}
        with torch.no_grad():
            for name, error in sum_residuals(sums).items():
                self._parameters[name][1].sub_(error * float(tensors[f"{_SHARE_PREFIX}{name}"]))
