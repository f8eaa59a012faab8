"""What an optimizer keeps, as pieces and JSON values: all of its `state_dict()`, or a refusal that says what.

Names are `NAME/KEY`, by the parameter; what it keeps under keys that are no parameter has an empty NAME.
Not here: its groups (`groups`), and attributes of the object, which are in no `state_dict()` either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.errors import CheckpointError
from paceline.optim.entries import CannotBeSaved, is_numbered, join, take_apart, tensors_of
from paceline.optim.moments import moment_part, moment_slot, placed_with, suits, suits_part, whole_moment
from paceline.slot import Index, Piece, Slot

if TYPE_CHECKING:
    from paceline.layout import Holding

_TABLES = {"state", "param_groups"}
_OTHER = "choose another optimizer, or keep it in self.state[parameter] as tensors, numbers, lists or dicts"
_WHOLE = "choose a strategy in which every rank updates all parameters: leave out shard, tensor and pipeline"


class KeptByOptimizer:
    """The state of one optimizer.

    Args:
        optimizer: over what a rank updates.
        holding: of that rank.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, holding: Holding) -> None:
        self._optimizer, self._holding = optimizer, holding
        self._kind = type(optimizer).__name__

    def optimized(self) -> list[tuple[Slot, nn.Parameter]]:
        """What it updates, in the order of its groups."""
        slots = {p: slot for slot, p in self._holding.updates.items()}
        named = self._holding.model.named_parameters()
        slots = {p: Slot.whole(name, p) for name, p in named if p not in slots} | slots
        return [(slots[p], p) for group in self._optimizer.param_groups for p in group["params"]]

    def pieces(self) -> list[Piece]:
        """Its tensors: `optimizer/NAME/KEY`; not copied.

        Raises:
            CheckpointError: it keeps what nobody could save.
        """
        found = []
        for slot, tensors, _ in self._kept():
            for key, value in tensors.items():
                place = whole_moment if is_numbered(key) or not slot.name else moment_slot
                found.append(Piece(place(f"optimizer/{slot.name}/{key}", value, slot), value))
        return found

    def values(self) -> dict[str, Any]:
        """All that is no tensor: `NAME/KEY`, JSON values."""
        return {f"{slot.name}/{key}": value for slot, _, kept in self._kept() for key, value in kept.items()}

    def _kept(self) -> Iterator[tuple[Slot, dict[str, Tensor], dict[str, Any]]]:
        """By parameter, tensors and JSON values."""
        self._refuse_the_rest()
        optimized = self.optimized()
        for slot, p in optimized:
            tensors, values = self._apart(slot, self._optimizer.state.get(p, {}))
            if not slot.is_whole and any(map(is_numbered, tensors)):
                name = next(filter(is_numbered, tensors))
                raise CheckpointError(
                    f"{self._kind} keeps '{name.partition('%')[0]}' of '{slot.name}' in a shape of its own,"
                    " and this rank updates a part of that tensor",
                    next_step=_WHOLE,
                )
            yield slot, tensors, values
        own = {id(p) for _, p in optimized}
        yield Slot("", (), ()), *self._beside(own)

    def _apart(self, slot: Slot, entries: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        try:
            return take_apart(entries, lambda value: suits_part(tuple(value.shape), slot))
        except CannotBeSaved as error:
            key, kind = error.args
            raise CheckpointError(
                f"{self._kind} keeps '{key}'{f' of {slot.name!r}' if slot.name else ''} {kind}, and only"
                " tensors, numbers and words can be saved, and lists and tables of them",
                next_step=_OTHER,
            ) from error

    def _beside(self, own: set[int]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What it keeps under keys that are none of its parameters."""
        beside = {key: value for key, value in self._optimizer.state.items() if id(key) not in own}
        if any(isinstance(key, Tensor) for key in beside):
            raise CheckpointError(
                f"{self._kind} keeps state of a tensor that is in none of its groups", next_step=_OTHER
            )
        if beside and self._is_shared_out():
            raise CheckpointError(
                f"{self._kind} keeps {next(iter(beside))!r} of all parameters together,"
                " and ranks update some each",
                next_step=_WHOLE,
            )
        tensors, values = self._apart(Slot("", (), ()), beside)
        return tensors, values

    def _is_shared_out(self) -> bool:
        return self._holding.is_cut or len(self._holding.updates) < len(self._holding.slots)

    def _refuse_the_rest(self) -> None:
        """What its `state_dict()` has beside state and groups, and what a second optimizer inside it has."""
        kept = type(self._optimizer).state_dict is not torch.optim.Optimizer.state_dict
        beside: set[str] = set()
        if kept or self._optimizer._optimizer_state_dict_post_hooks:
            beside = self._optimizer.state_dict().keys() - _TABLES
        inside = [
            name
            for name, value in vars(self._optimizer).items()
            if isinstance(value, torch.optim.Optimizer) and value.state is not self._optimizer.state
        ]
        if beside or inside:
            what = (
                f"{sorted(beside)[0]!r} in its state_dict()" if beside else f"an optimizer in '{inside[0]}'"
            )
            raise CheckpointError(
                f"{self._kind} keeps {what}, beside state and groups, which are what is saved",
                next_step=_OTHER,
            )

    def misfits(self, shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, Any]) -> list[str]:
        """Names of what a saved state has and this optimizer cannot take."""
        known = {slot.name: slot.shape for slot in self._holding.slots}
        known |= {slot.name: slot.shape for slot, _ in self.optimized()} | {"": ()}
        wrong = []
        for full, shape in shapes.items():
            name, key = _split(full)
            free = is_numbered(key) or not name
            if full.startswith("optimizer/") and (
                name not in known or not (free or suits(shape, known[name]))
            ):
                wrong.append(full)
        for full, value in values.items():
            name = full.rpartition("/")[0]
            inside = (f"optimizer/{name}/{key}" for key in tensors_of(value))
            if name not in known or any(one not in shapes for one in inside):
                wrong.append(f"optimizer/{full}")
        return wrong

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Index]]:
        """The tensors of what this rank updates, and which part of each."""
        own = {slot.name: slot for slot, _ in self.optimized()} | {"": None}
        for full, shape in shapes.items():
            name, key = _split(full)
            if full.startswith("optimizer/") and name in own:
                slot = own[name]
                yield full, () if slot is None or is_numbered(key) else moment_part(shape, slot)

    def take(self, tensors: MutableMapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Give the optimizer a saved state; what it has is forgotten.

        Args:
            tensors: by full name; those that are taken are gone, others are left alone.
            values: as `values` gave them.
        """
        given: dict[str, Any] = {f"optimizer/{name}": value for name, value in values.items()}
        given |= {full: tensors.pop(full) for full in [*tensors] if full.startswith("optimizer/")}
        found: dict[str, dict[str, Any]] = {}
        for full in [*given]:
            name, key = _split(full)
            found.setdefault(name, {})[key] = given.pop(full)
        self._optimizer.state.clear()
        slots = {p: slot for slot, p in self.optimized()}
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                if slots[p].name in found:
                    place = partial(placed_with, p=p, group=group)
                    self._optimizer.state[p] = join(found.pop(slots[p].name), place)
        beside: dict[Any, Any] = join(found.get("", {}), _copied)
        self._optimizer.state.update(beside)


def _split(full: str) -> tuple[str, str]:
    """NAME and KEY of a full name."""
    name, _, key = full.removeprefix("optimizer/").rpartition("/")
    return name, key


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
