"""Where an optimizer's tensors lie: moments are cut as their parameter is.

What an optimizer keeps of one parameter, as tensors and JSON values: also in lists and tables.

A tensor of the parameter's shape, a number or a word stands under its own key. Anything else is a JSON value
that says how it is put together, and its tensors have names of their own: `KEY%0`, `KEY%1`.
Invariant: `rebuild_entries` of what `flatten_entries` gave is equal to what was taken apart, with the same types.

What an optimizer's groups remember: the values that its steps have changed there.

Schedule-free optimizers, Prodigy and rules of the user's own keep state in `param_groups`. What the recipe
gave (betas, weight decay) is not state: a run that is resumed with another value trains with that.
Invariant: `restore` of `changed` gives an optimizer that was built alike the groups of the saved one.

What an optimizer keeps, as pieces and JSON values: all of its `state_dict()`, or a refusal that says what.

Names are `NAME/KEY`, by the parameter; what it keeps under keys that are no parameter has an empty NAME.
Not here: its groups (`groups`), and attributes of the object, which are in no `state_dict()` either.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.errors import CheckpointError
from paceline.state.slot import SlotIndex, TensorPiece, TensorSlot, index_of_span

if TYPE_CHECKING:
    from paceline.parallel.sharded_model import ShardedModel


def moment_slot(name: str, value: Tensor, of: TensorSlot) -> TensorSlot:
    """The place of a moment of the part `of`: that part, on each dimension on which it is as long.

    One that is whole still has the axes of the part: ranks that hold nothing of it have to be told.
    """
    if value.dim() != len(of.shape) or not value.dim():
        return whole_moment(name, value, of)
    fits = [size == held for size, held in zip(value.shape, of.sizes, strict=True)]
    shape = tuple(whole if fit else n for fit, whole, n in zip(fits, of.shape, value.shape, strict=True))
    part = tuple(span if fit else (0, n) for fit, span, n in zip(fits, of.part, value.shape, strict=True))
    return TensorSlot(name, shape, part, of.axes)


def whole_moment(name: str, value: Tensor, of: TensorSlot) -> TensorSlot:
    """The place of a tensor that is whole, whatever its shape."""
    return replace(TensorSlot.whole(name, value), axes=of.axes)


def moment_part(shape: tuple[int, ...], of: TensorSlot) -> SlotIndex:
    """The part of a whole moment; what has fewer dimensions is whole on every rank."""
    if len(shape) != len(of.shape) or not shape:
        return ()
    sizes = zip(shape, of.shape, of.part, strict=True)
    return tuple(index_of_span(span) if n == whole else slice(None) for n, whole, span in sizes)


def broadcasts_to(shape: tuple[int, ...], of: tuple[int, ...]) -> bool:
    """Moments have the parameter's shape, or one that broadcasts to it (factored moments, counters)."""
    pairs = zip(reversed(shape), reversed(of), strict=False)
    return len(shape) <= len(of) and all(n in (1, whole) for n, whole in pairs)


def splits_with_slot(shape: tuple[int, ...], of: TensorSlot) -> bool:
    """Whether each rank can keep its own part of such a moment: no value is of several parts at a time."""
    if of.is_whole or all(n == 1 for n in shape):
        return broadcasts_to(shape, of.sizes)
    if len(shape) != len(of.shape):
        return False
    return all(
        n == held or (n == 1 and held == whole)
        for n, held, whole in zip(shape, of.sizes, of.shape, strict=True)
    )


def place_with_parameter(value: Any, p: nn.Parameter, group: Mapping[str, Any]) -> Any:
    """Moments live with their parameter; so do counters of fused optimizers, the others stay on the host."""
    if not isinstance(value, Tensor):
        return value
    with_parameter = value.dim() > 0 or group.get("fused") or group.get("capturable")
    if value.shape == p.shape:  # its values must lie as those of the parameter do
        return torch.empty_like(p, dtype=value.dtype).copy_(value).detach()
    return value.to(p.device, copy=True) if with_parameter else value.clone()


_PLAIN = (bool, int, float, str, type(None))
_ROWS: Mapping[str, type[Any]] = {"list": list, "tuple": tuple}

ContainerSpec = Mapping[str, Any]
NamedTensors = dict[str, Tensor]


class UnsavableEntryError(Exception):
    """Carries the key, and the type of what is there."""


def flatten_entries(
    entries: Mapping[Any, Any], suits: Callable[[Tensor], bool]
) -> tuple[NamedTensors, dict[str, Any]]:
    """Tensors and JSON values by name; neither is copied.

    Args:
        suits: whether a tensor is cut as its parameter is; any other gets a name with a number.
    Raises:
        CannotBeSaved: a key is no word, or something is no tensor, number, word, list or table.
    """
    tensors: NamedTensors = {}
    values: dict[str, Any] = {}
    for key, value in entries.items():
        if not isinstance(key, str):
            raise UnsavableEntryError(repr(key), f"under a key of type {type(key).__name__}")
        name = _quoted(key)
        if isinstance(value, Tensor) and suits(value):
            tensors[name] = value
        elif _is_plain(value):
            values[name] = value
        else:
            values[name] = _describe_container(value, name, tensors)
    return tensors, values


def rebuild_entries(names: Mapping[str, Any], place: Callable[[Any], Any]) -> dict[str, Any]:
    """The inverse of `flatten_entries`.

    Args:
        names: tensors and JSON values.
        place: makes of a tensor what the optimizer shall hold.
    """
    return {
        _unquoted(name): _rebuild(value, names, place) if isinstance(value, Mapping) else place(value)
        for name, value in names.items()
        if not is_nested_name(name)
    }


def is_nested_name(name: str) -> bool:
    """Whether this is a tensor inside something, or one of a shape of its own."""
    return "%" in name.replace("%25", "").replace("%2F", "")


def nested_tensor_names(shape: Any) -> Iterator[str]:
    """The names of the tensors that a JSON value speaks of."""
    if not isinstance(shape, Mapping):
        return
    if "tensor" in shape:
        yield str(shape["tensor"])
    rows: list[Any] = [*shape.get("list", []), *shape.get("tuple", [])]
    rows += shape["deque"][1] if "deque" in shape else []
    rows += [one for _, one in shape.get("table", [])]
    for one in rows:
        yield from nested_tensor_names(one)


def _describe_container(value: Any, key: str, tensors: NamedTensors) -> dict[str, Any]:
    """How a container is put together; its tensors are added to the others."""
    if isinstance(value, Tensor):
        name = f"{key}%{sum(other.startswith(f'{key}%') for other in tensors)}"
        tensors[name] = value
        return {"tensor": name}
    if _is_plain(value):
        return {"is": value}
    for word, kind in _ROWS.items():
        if type(value) is kind:
            return {word: [_describe_container(one, key, tensors) for one in value]}
    if type(value) is deque:
        return {"deque": [value.maxlen, [_describe_container(one, key, tensors) for one in value]]}
    if type(value) is dict and all(map(_is_plain, value)):
        return {"table": [[k, _describe_container(one, key, tensors)] for k, one in value.items()]}
    raise UnsavableEntryError(_unquoted(key), f"as {type(value).__name__}")


def _rebuild(shape: ContainerSpec, names: Mapping[str, Any], place: Callable[[Any], Any]) -> Any:
    if "tensor" in shape:
        return place(names[shape["tensor"]])
    if "is" in shape:
        return shape["is"]
    for word, kind in _ROWS.items():
        if word in shape:
            return kind(_rebuild(one, names, place) for one in shape[word])
    if "deque" in shape:
        longest, rows = shape["deque"]
        return deque((_rebuild(one, names, place) for one in rows), longest)
    return {k: _rebuild(one, names, place) for k, one in shape["table"]}


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN)


def _quoted(key: str) -> str:
    """Without the characters that names are made of."""
    return key.replace("%", "%25").replace("/", "%2F")


def _unquoted(name: str) -> str:
    return name.replace("%2F", "/").replace("%25", "%")


_SET_ELSEWHERE = ("params", "param_names", "lr", "initial_lr")  # by the layout, and by the schedule
_GROUP_PLAIN = (bool, int, float, str, type(None))
_COMPARED = (*_GROUP_PLAIN, list, tuple, dict)
_IN_PLACE = (torch.Tensor, list, dict)


class ParamGroupState:
    """The groups of one optimizer, and what was in them when it was new.

    Args:
        optimizer: before its first step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._given = [_copy_options(_state_options(group)) for group in optimizer.param_groups]

    def changed(self) -> list[dict[str, Any]]:
        """By group, the values that are others now, or new; each is a JSON value.

        Raises:
            CheckpointError: one is a tensor or an object, which nobody could save.
        """
        found = []
        for group, given in zip(self._optimizer.param_groups, self._given, strict=True):
            own = _state_options(group)
            found.append(
                {key: own[key] for key in own if key not in given or not _same(own[key], given[key])}
            )
        for key, value in (entry for values in found for entry in values.items()):
            if not (isinstance(value, _GROUP_PLAIN) or _is_plain_tuple(value)):
                raise _cannot_be_saved(self._optimizer, key, value)
        return found

    def restore(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Take over what `changed` gave; all else is as it was when the optimizer was new."""
        groups = zip(self._optimizer.param_groups, self._given, saved, strict=True)
        for group, given, values in groups:
            for key in _state_options(group).keys() - given.keys():
                del group[key]
            group.update(_copy_options(given) | {key: _as_tuple(value) for key, value in values.items()})


def _state_options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _SET_ELSEWHERE}


def _is_plain_tuple(value: Any) -> bool:
    """Such as the betas that a scheduler moves."""
    return type(value) is tuple and all(isinstance(one, _GROUP_PLAIN) for one in value)


def _as_tuple(value: Any) -> Any:
    """JSON has lists in the place of tuples; no list is saved."""
    return tuple(value) if isinstance(value, list) else value


def _copy_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Containers and tensors may be changed in place."""
    return {k: copy.deepcopy(v) if isinstance(v, _IN_PLACE) else v for k, v in values.items()}


def _same(a: Any, b: Any) -> bool:
    if a is b or type(a) is not type(b):
        return a is b
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else isinstance(a, _COMPARED) and bool(a == b)


def _cannot_be_saved(optimizer: torch.optim.Optimizer, key: str, value: Any) -> CheckpointError:
    return CheckpointError(
        f"{type(optimizer).__name__} keeps {type(value).__name__} in group[{key!r}], and of a group only"
        " numbers and strings are saved, and tuples of them",
        next_step="keep tensors in self.state[parameter], which is saved, and numbers in the group",
    )


_TABLES = {"state", "param_groups"}
_OTHER = "choose another optimizer, or keep it in self.state[parameter] as tensors, numbers, lists or dicts"
_WHOLE = "choose a strategy in which every rank updates all parameters: leave out shard, tensor and pipeline"


class OptimizerState:
    """The state of one optimizer.

    Args:
        optimizer: over what a rank updates.
        sharded_model: of that rank.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, sharded_model: ShardedModel) -> None:
        self._optimizer, self._holding = optimizer, sharded_model
        self._kind = type(optimizer).__name__

    def optimized(self) -> list[tuple[TensorSlot, nn.Parameter]]:
        """What it updates, in the order of its groups."""
        slots = {p: slot for slot, p in self._holding.updates.items()}
        named = self._holding.model.named_parameters()
        slots = {p: TensorSlot.whole(name, p) for name, p in named if p not in slots} | slots
        return [(slots[p], p) for group in self._optimizer.param_groups for p in group["params"]]

    def pieces(self) -> list[TensorPiece]:
        """Its tensors: `optimizer/NAME/KEY`; not copied.

        Raises:
            CheckpointError: it keeps what nobody could save.
        """
        found = []
        for slot, tensors, _ in self._kept():
            for key, value in tensors.items():
                place = whole_moment if is_nested_name(key) or not slot.name else moment_slot
                found.append(TensorPiece(place(f"optimizer/{slot.name}/{key}", value, slot), value))
        return found

    def values(self) -> dict[str, Any]:
        """All that is no tensor: `NAME/KEY`, JSON values."""
        return {f"{slot.name}/{key}": value for slot, _, kept in self._kept() for key, value in kept.items()}

    def _kept(self) -> Iterator[tuple[TensorSlot, dict[str, Tensor], dict[str, Any]]]:
        """By parameter, tensors and JSON values."""
        self._refuse_the_rest()
        optimized = self.optimized()
        for slot, p in optimized:
            tensors, values = self._apart(slot, self._optimizer.state.get(p, {}))
            if not slot.is_whole and any(map(is_nested_name, tensors)):
                name = next(filter(is_nested_name, tensors))
                raise CheckpointError(
                    f"{self._kind} keeps '{name.partition('%')[0]}' of '{slot.name}' in a shape of its own,"
                    " and this rank updates a part of that tensor",
                    next_step=_WHOLE,
                )
            yield slot, tensors, values
        own = {id(p) for _, p in optimized}
        yield TensorSlot("", (), ()), *self._beside(own)

    def _apart(self, slot: TensorSlot, entries: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        try:
            return flatten_entries(entries, lambda value: splits_with_slot(tuple(value.shape), slot))
        except UnsavableEntryError as error:
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
        tensors, values = self._apart(TensorSlot("", (), ()), beside)
        return tensors, values

    def _is_shared_out(self) -> bool:
        return self._holding.updates_partially or len(self._holding.updates) < len(self._holding.slots)

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

    def mismatches(self, shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, Any]) -> list[str]:
        """Names of what a saved state has and this optimizer cannot take."""
        known = {slot.name: slot.shape for slot in self._holding.slots}
        known |= {slot.name: slot.shape for slot, _ in self.optimized()} | {"": ()}
        wrong = []
        for full, shape in shapes.items():
            name, key = _split(full)
            free = is_nested_name(key) or not name
            if full.startswith("optimizer/") and (
                name not in known or not (free or broadcasts_to(shape, known[name]))
            ):
                wrong.append(full)
        for full, value in values.items():
            name = full.rpartition("/")[0]
            inside = (f"optimizer/{name}/{key}" for key in nested_tensor_names(value))
            if name not in known or any(one not in shapes for one in inside):
                wrong.append(f"optimizer/{full}")
        return wrong

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, SlotIndex]]:
        """The tensors of what this rank updates, and which part of each."""
        own = {slot.name: slot for slot, _ in self.optimized()} | {"": None}
        for full, shape in shapes.items():
            name, key = _split(full)
            if full.startswith("optimizer/") and name in own:
                slot = own[name]
                yield full, () if slot is None or is_nested_name(key) else moment_part(shape, slot)

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
                    place = partial(place_with_parameter, p=p, group=group)
                    self._optimizer.state[p] = rebuild_entries(found.pop(slots[p].name), place)
        beside: dict[Any, Any] = rebuild_entries(found.get("", {}), _clone_tensor)
        self._optimizer.state.update(beside)


def _split(full: str) -> tuple[str, str]:
    """NAME and KEY of a full name."""
    name, _, key = full.removeprefix("optimizer/").rpartition("/")
    return name, key


def _clone_tensor(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
