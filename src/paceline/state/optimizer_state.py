"""The state of an optimizer, as pieces with slots and JSON values, and back.

Everything in `state_dict()` is saved, or refused with an error that names it. A moment is split as its
parameter is; its slot follows from the parameter's. An entry that is a tensor of the parameter's shape, a
number or a string stands under its own key. Lists, tuples, deques and dicts become a JSON value that
describes the container, and their tensors get names of their own: `KEY%0`, `KEY%1`. Names are `NAME/KEY`,
by the parameter; entries under keys that are no parameter have an empty NAME.

Param groups hold state too: schedule-free optimizers and Prodigy keep values there. Only values that steps
have changed are saved, so a run that is resumed with other options (betas, weight decay) trains with those.

Invariant: `rebuild_entries` of what `flatten_entries` returned is equal to the original, with the same
types, and `restore` of `changed` gives a new optimizer the groups of the saved one. Attributes of the
optimizer object are not saved; they are in no `state_dict()` either.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import CheckpointError
from paceline.state.slot import ModelShard, SlotIndex, TensorPiece, TensorSlot, index_of_span

_CACHED_SLOTS = 2**14


def moment_slot(name: str, value: Tensor, of: TensorSlot) -> TensorSlot:
    """Return the slot of a moment: it is split as the parameter's slot `of` along dimensions of equal length.

    A moment that is whole still gets the axes of `of`: ranks that hold nothing of it have to receive it.
    """
    if value.dim() != len(of.shape) or not value.dim():
        return whole_moment(name, value, of)
    return _moment_slot_of_shape(name, tuple(value.shape), of)


@lru_cache(_CACHED_SLOTS)  # copies of the state ask for all slots before every step
def _moment_slot_of_shape(name: str, sizes: tuple[int, ...], of: TensorSlot) -> TensorSlot:
    fits = [size == held for size, held in zip(sizes, of.sizes, strict=True)]
    shape = tuple(whole if fit else n for fit, whole, n in zip(fits, of.shape, sizes, strict=True))
    part = tuple(span if fit else (0, n) for fit, span, n in zip(fits, of.part, sizes, strict=True))
    return TensorSlot(name, shape, part, of.axes)


def whole_moment(name: str, value: Tensor, of: TensorSlot) -> TensorSlot:
    """Return the slot of a moment that is whole on each rank, whatever its shape."""
    return replace(TensorSlot.whole(name, value), axes=of.axes)


def moment_part(shape: tuple[int, ...], of: TensorSlot) -> SlotIndex:
    """Return the index of a slot's part in a whole moment; one with fewer dimensions is whole on every
    rank.
    """
    if len(shape) != len(of.shape) or not shape:
        return ()
    sizes = zip(shape, of.shape, of.part, strict=True)
    return tuple(index_of_span(span) if n == whole else slice(None) for n, whole, span in sizes)


def broadcasts_to(shape: tuple[int, ...], of: tuple[int, ...]) -> bool:
    """Return whether a moment broadcasts to its parameter, as factored moments and counters do."""
    pairs = zip(reversed(shape), reversed(of), strict=False)
    return len(shape) <= len(of) and all(n in (1, whole) for n, whole in pairs)


@lru_cache(_CACHED_SLOTS)
def splits_with_slot(shape: tuple[int, ...], of: TensorSlot) -> bool:
    """Return whether ranks can hold parts of a moment: no value of it belongs to the parts of several
    ranks.
    """
    if of.is_whole or all(n == 1 for n in shape):
        return broadcasts_to(shape, of.sizes)
    if len(shape) != len(of.shape):
        return False
    return all(
        n == held or (n == 1 and held == whole)
        for n, held, whole in zip(shape, of.sizes, of.shape, strict=True)
    )


def place_with_parameter(value: Any, p: nn.Parameter, group: Mapping[str, Any]) -> Any:
    """Return a moment on the device of its parameter; counters stay on the host, except for fused
    optimizers.
    """
    if not isinstance(value, Tensor):
        return value
    with_parameter = value.dim() > 0 or group.get("fused") or group.get("capturable")
    if value.shape == p.shape:  # kernels expect the memory layout of the parameter
        return torch.empty_like(p, dtype=value.dtype).copy_(value).detach()
    return value.to(p.device, copy=True) if with_parameter else value.clone()


_PLAIN = (bool, int, float, str, type(None))
_ROWS: Mapping[str, type[Any]] = {"list": list, "tuple": tuple}

ContainerSpec = Mapping[str, Any]
NamedTensors = dict[str, Tensor]


class UnsavableEntryError(Exception):
    """An internal error with the key of an entry that cannot be saved, and its type."""


def flatten_entries(
    entries: Mapping[Any, Any], suits: Callable[[Tensor], bool]
) -> tuple[NamedTensors, dict[str, Any]]:
    """Return the tensors and the JSON values of a parameter's entries by name; neither is copied.

    Args:
        entries: what the optimizer keeps for one parameter.
        suits: whether a tensor is split as its parameter; any other tensor gets a numbered name.
    Raises:
        UnsavableEntryError: a key is no string, or a value is no tensor, number, string, list or dict.
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


def rebuild_entries(names: Mapping[str, Any], copy_to_device: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the entries from which `flatten_entries` made these tensors and values.

    Args:
        names: tensors and JSON values by name.
        copy_to_device: copies a tensor to where the optimizer holds it.
    """
    return {
        _unquoted(name): _rebuild(value, names, copy_to_device)
        if isinstance(value, Mapping)
        else copy_to_device(value)
        for name, value in names.items()
        if not is_nested_name(name)
    }


def is_nested_name(name: str) -> bool:
    """Return whether this is the numbered name of a tensor in a container, or of one with its own shape."""
    return "%" in name.replace("%25", "").replace("%2F", "")


def nested_tensor_names(shape: Any) -> Iterator[str]:
    """Yield the names of the tensors to which the description of a container refers."""
    if not isinstance(shape, Mapping):
        return
    if "tensor" in shape:
        yield str(shape["tensor"])
    rows: list[Any] = [*shape.get("list", []), *shape.get("tuple", [])]
    rows += shape["deque"][1] if "deque" in shape else []
    rows += [item for _, item in shape.get("table", [])]
    for item in rows:
        yield from nested_tensor_names(item)


def _describe_container(value: Any, key: str, tensors: NamedTensors) -> dict[str, Any]:
    """Return the description of a container; add its tensors to `tensors`."""
    if isinstance(value, Tensor):
        name = f"{key}%{sum(other.startswith(f'{key}%') for other in tensors)}"
        tensors[name] = value
        return {"tensor": name}
    if _is_plain(value):
        return {"is": value}
    for word, kind in _ROWS.items():
        if type(value) is kind:
            return {word: [_describe_container(item, key, tensors) for item in value]}
    if type(value) is deque:
        return {"deque": [value.maxlen, [_describe_container(item, key, tensors) for item in value]]}
    if type(value) is dict and all(map(_is_plain, value)):
        return {"table": [[k, _describe_container(item, key, tensors)] for k, item in value.items()]}
    raise UnsavableEntryError(_unquoted(key), f"as {type(value).__name__}")


def _rebuild(shape: ContainerSpec, names: Mapping[str, Any], copy_to_device: Callable[[Any], Any]) -> Any:
    if "tensor" in shape:
        return copy_to_device(names[shape["tensor"]])
    if "is" in shape:
        return shape["is"]
    for word, kind in _ROWS.items():
        if word in shape:
            return kind(_rebuild(item, names, copy_to_device) for item in shape[word])
    if "deque" in shape:
        longest, rows = shape["deque"]
        return deque((_rebuild(item, names, copy_to_device) for item in rows), longest)
    return {k: _rebuild(item, names, copy_to_device) for k, item in shape["table"]}


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN)


def _quoted(key: str) -> str:
    """Escape the characters that separate names."""
    return key.replace("%", "%25").replace("/", "%2F")


def _unquoted(name: str) -> str:
    return name.replace("%2F", "/").replace("%25", "%")


_SET_ELSEWHERE = ("params", "param_names", "lr", "initial_lr")  # by the layout, and by the schedule
_COMPARED = (*_PLAIN, list, tuple, dict)
_IN_PLACE = (torch.Tensor, list, dict)


class ParamGroupState:
    """The state in the param groups of an optimizer: the values that differ from those of a new one.

    Args:
        optimizer: before its first step; its options are copied.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._initial = [_copy_options(_state_options(group)) for group in optimizer.param_groups]

    def changed(self) -> list[dict[str, Any]]:
        """Return for each group the values that have changed or are new, as JSON values.

        Raises:
            CheckpointError: a value is a tensor or an object.
        """
        changes = []
        for group, initial in zip(self._optimizer.param_groups, self._initial, strict=True):
            options = _state_options(group)
            is_changed = {k: k not in initial or not _same(v, initial[k]) for k, v in options.items()}
            changes.append({key: value for key, value in options.items() if is_changed[key]})
        for key, value in (entry for values in changes for entry in values.items()):
            if not (isinstance(value, _PLAIN) or _is_plain_tuple(value)):
                raise _cannot_be_saved(self._optimizer, key, value)
        return changes

    def restore(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Load what `changed` returned; all other values become those of a new optimizer."""
        groups = zip(self._optimizer.param_groups, self._initial, saved, strict=True)
        for group, initial, values in groups:
            for key in _state_options(group).keys() - initial.keys():
                del group[key]
            group.update(_copy_options(initial) | {key: _as_tuple(value) for key, value in values.items()})


def _state_options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _SET_ELSEWHERE}


def _is_plain_tuple(value: Any) -> bool:
    """Return whether a value is a tuple of JSON values, such as betas that a scheduler changes."""
    return type(value) is tuple and all(isinstance(item, _PLAIN) for item in value)


def _as_tuple(value: Any) -> Any:
    """Convert lists back to tuples, which JSON does not have; lists are never saved."""
    return tuple(value) if isinstance(value, list) else value


def _copy_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy options; containers and tensors can change in place, so they are copied deeply."""
    return {k: copy.deepcopy(v) if isinstance(v, _IN_PLACE) else v for k, v in values.items()}


def _same(a: Any, b: Any) -> bool:
    # By type as well: True equals 1, but an optimizer can tell them apart.
    if a is b or type(a) is not type(b):
        return a is b
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else isinstance(a, _COMPARED) and bool(a == b)


def _cannot_be_saved(optimizer: torch.optim.Optimizer, key: str, value: Any) -> CheckpointError:
    return CheckpointError(
        f"{type(optimizer).__name__} keeps {type(value).__name__} in group[{key!r}], but only numbers,"
        " strings and tuples of these can be saved from a param group",
        next_step="keep tensors in self.state[parameter], which is saved, and numbers in the group",
    )


_TABLES = {"state", "param_groups"}
_OTHER = "choose another optimizer, or keep it in self.state[parameter] as tensors, numbers, lists or dicts"
_WHOLE = "choose a strategy in which every rank updates all parameters: leave out shard, tensor and pipeline"


class OptimizerState:
    """The per-parameter state of an optimizer.

    Args:
        optimizer: over the parameters that the rank updates.
        sharded_model: the rank's part of the model.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, sharded_model: ModelShard) -> None:
        self._optimizer, self._sharded_model = optimizer, sharded_model
        self._kind = type(optimizer).__name__
        # Those of a `SlotOptimizer`: whole on every rank, whatever part of the parameter it has.
        self._whole_keys: frozenset[str] = getattr(optimizer, "whole_moments", frozenset())
        self._shared_keys: frozenset[str] = getattr(optimizer, "shared_moments", frozenset())

    def optimized(self) -> list[tuple[TensorSlot, nn.Parameter]]:
        """Return the parameters that it updates with their slots, in the order of its groups."""
        slots = {p: slot for slot, p in self._sharded_model.updates.items()}
        named = self._sharded_model.model.named_parameters()
        slots = {p: TensorSlot.whole(name, p) for name, p in named if p not in slots} | slots
        return [(slots[p], p) for group in self._optimizer.param_groups for p in group["params"]]

    def pieces(self) -> list[TensorPiece]:
        """Return its tensors as `optimizer/NAME/KEY`; not copied.

        Raises:
            CheckpointError: it keeps something that cannot be saved.
        """
        pieces = []
        for slot, tensors, _ in self._entries():
            for key, value in tensors.items():
                is_whole = is_nested_name(key) or not slot.name or key in self._whole_keys
                make_slot = whole_moment if is_whole else moment_slot
                pieces.append(TensorPiece(make_slot(f"optimizer/{slot.name}/{key}", value, slot), value))
        return pieces

    def values(self) -> dict[str, Any]:
        """Return everything that is no tensor as JSON values by `NAME/KEY`."""
        return {
            f"{slot.name}/{key}": value
            for slot, _, values in self._entries()
            for key, value in values.items()
        }

    def _entries(self) -> Iterator[tuple[TensorSlot, dict[str, Tensor], dict[str, Any]]]:
        """Yield for each parameter its slot, its tensors and its JSON values."""
        self._refuse_unsaved_state()
        optimized = self.optimized()
        for slot, p in optimized:
            tensors, values = self._flatten(slot, self._optimizer.state.get(p, {}))
            if not slot.is_whole and any(map(is_nested_name, tensors)):
                name = next(filter(is_nested_name, tensors))
                raise CheckpointError(
                    f"{self._kind} keeps '{name.partition('%')[0]}' of '{slot.name}' in a shape of its own,"
                    " but this rank updates only a part of that tensor",
                    next_step=_WHOLE,
                )
            yield slot, tensors, values
        parameter_ids = {id(p) for _, p in optimized}
        yield TensorSlot("", (), ()), *self._shared_entries(parameter_ids)

    def _flatten(self, slot: TensorSlot, entries: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        try:
            whole = {key: entries[key] for key in self._whole_keys & entries.keys()}
            entries = {key: value for key, value in entries.items() if key not in whole}
            tensors, values = flatten_entries(
                entries, lambda value: splits_with_slot(tuple(value.shape), slot)
            )
            return tensors | whole, values
        except UnsavableEntryError as error:
            key, kind = error.args
            raise CheckpointError(
                f"{self._kind} keeps '{key}'{f' of {slot.name!r}' if slot.name else ''} {kind}, but only"
                " tensors, numbers, strings, lists and dicts can be saved",
                next_step=_OTHER,
            ) from error

    def _shared_entries(self, parameter_ids: set[int]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the entries under keys that are no parameter."""
        state = self._optimizer.state
        shared = {key: value for key, value in state.items() if id(key) not in parameter_ids}
        if any(isinstance(key, Tensor) for key in shared):
            raise CheckpointError(
                f"{self._kind} keeps state of a tensor that is in none of its groups", next_step=_OTHER
            )
        model = self._sharded_model
        is_divided = model.updates_partially or len(model.updates) < len(model.slots)
        unknown = [key for key in shared if key not in self._shared_keys]
        if unknown and is_divided:
            raise CheckpointError(
                f"{self._kind} keeps {unknown[0]!r} for all parameters together, but each rank"
                " updates only some of them",
                next_step=_WHOLE,
            )
        return self._flatten(TensorSlot("", (), ()), shared)

    def _refuse_unsaved_state(self) -> None:
        """Refuse other entries of `state_dict()`, and an inner optimizer with a state of its own."""
        is_custom = type(self._optimizer).state_dict is not torch.optim.Optimizer.state_dict
        extra_keys: set[str] = set()
        if is_custom or self._optimizer._optimizer_state_dict_post_hooks:
            # Only a changed `state_dict` can have other entries, and calling it costs time in every save.
            extra_keys = self._optimizer.state_dict().keys() - _TABLES
        inner = [
            name
            for name, value in vars(self._optimizer).items()
            if isinstance(value, torch.optim.Optimizer) and value.state is not self._optimizer.state
        ]
        if extra_keys or inner:
            unsaved = (
                f"{min(extra_keys)!r} in its state_dict()" if extra_keys else f"an optimizer in '{inner[0]}'"
            )
            raise CheckpointError(
                f"{self._kind} keeps {unsaved}, but only its state and its param groups are saved",
                next_step=_OTHER,
            )

    def mismatches(self, shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, Any]) -> list[str]:
        """Return the names of a saved state that this optimizer cannot load."""
        known = {slot.name: slot.shape for slot in self._sharded_model.slots}
        known |= {slot.name: slot.shape for slot, _ in self.optimized()} | {"": ()}
        wrong = []
        for full, shape in shapes.items():
            name, key = _split(full)
            has_any_shape = is_nested_name(key) or not name
            if full.startswith("optimizer/") and (
                name not in known or not (has_any_shape or broadcasts_to(shape, known[name]))
            ):
                wrong.append(full)
        for full, value in values.items():
            name = full.rpartition("/")[0]
            nested = (f"optimizer/{name}/{key}" for key in nested_tensor_names(value))
            if name not in known or any(tensor not in shapes for tensor in nested):
                wrong.append(f"optimizer/{full}")
        return wrong

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, SlotIndex]]:
        """Yield the names of the tensors that this rank needs, and the index of its part in each."""
        slots = {slot.name: slot for slot, _ in self.optimized()} | {"": None}
        for full, shape in shapes.items():
            name, key = _split(full)
            if full.startswith("optimizer/") and name in slots:
                slot = slots[name]
                is_whole = slot is None or is_nested_name(key) or key in self._whole_keys
                yield full, () if slot is None or is_whole else moment_part(shape, slot)

    def take(self, tensors: MutableMapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Load a saved state in place of the current one.

        Args:
            tensors: by full name; those of the optimizer are removed, so that their memory can be freed.
            values: as `values` returned them.
        """
        entries: dict[str, Any] = {f"optimizer/{name}": value for name, value in values.items()}
        entries |= {full: tensors.pop(full) for full in [*tensors] if full.startswith("optimizer/")}
        by_name: dict[str, dict[str, Any]] = {}
        for full in [*entries]:
            name, key = _split(full)
            # Moved one by one, so that no table keeps a tensor alive that was loaded.
            by_name.setdefault(name, {})[key] = entries.pop(full)
        self._optimizer.state.clear()
        slots = {p: slot for slot, p in self.optimized()}
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                if slots[p].name in by_name:
                    copy_to_device = partial(place_with_parameter, p=p, group=group)
                    self._optimizer.state[p] = rebuild_entries(by_name.pop(slots[p].name), copy_to_device)
        shared: dict[Any, Any] = rebuild_entries(by_name.get("", {}), _clone_tensor)
        self._optimizer.state.update(shared)


def _split(full: str) -> tuple[str, str]:
    """Split a full name into NAME and KEY."""
    name, _, key = full.removeprefix("optimizer/").rpartition("/")
    return name, key


def _clone_tensor(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
