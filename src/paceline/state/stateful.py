"""State without tensors as JSON values: what callbacks and learning-rate schedulers keep.

Invariant: `state_from_json` of what `state_to_json` returned is equal to the original, also with keys that
are no strings, except that tuples come back as lists. What JSON cannot hold is refused when it is saved, by
name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from paceline.errors import CheckpointError

_PAIRS = "#pairs"


class Stateful(Protocol):
    """An object whose state is saved and loaded, such as a module or a scheduler."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def state_to_json(name: str, value: Any) -> Any:
    """Convert a state to JSON values.

    Args:
        name: of the state, for the error message.
        value: numbers, strings, lists, tuples and mappings of these.
    Raises:
        CheckpointError: it holds something else.
    """
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and _PAIRS not in value:
            return {key: state_to_json(f"{name}.{key}", item) for key, item in value.items()}
        # Keys of JSON objects are strings, so other keys are kept in pairs.
        items = value.items()
        return {_PAIRS: [[state_to_json(name, k), state_to_json(f"{name}.{k}", item)] for k, item in items]}
    if type(value) in (list, tuple):
        return [state_to_json(f"{name}[{i}]", item) for i, item in enumerate(value)]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise CheckpointError(
        f"'{name}' is {type(value).__name__}, but only numbers, strings, lists and dicts can be saved",
        next_step="return only such values from state_dict",
    )


def state_from_json(value: Any) -> Any:
    """Convert JSON values back to a state; tuples come back as lists."""
    if isinstance(value, list):
        return [state_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_PAIRS}:
        return {state_from_json(key): state_from_json(item) for key, item in value[_PAIRS]}
    return {key: state_from_json(item) for key, item in value.items()}


def convert_updates(scalars: Mapping[str, Any], updates_per_step: int) -> int:
    """Convert the updates of a saved state to those of a rule with another number of updates per step."""
    saved_per_step = int(scalars.get("updates_per_step", updates_per_step))  # older states lack it
    return round(int(scalars["updates"]) * updates_per_step / saved_per_step)
