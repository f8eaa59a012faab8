"""State that is no tensor, as JSON values: what callbacks and learning-rate schedulers keep.

Invariant: what `state_from_json` gives is equal to what `state_to_json` was given, also keys that are no text.
What JSON cannot hold is refused when it is saved, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from paceline.errors import CheckpointError

_PAIRS = "#pairs"


class Stateful(Protocol):
    """Has a state that is saved and loaded, as modules and schedulers have."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def state_to_json(name: str, value: Any) -> Any:
    """As JSON values.

    Raises:
        CheckpointError: it holds something else than numbers, words, lists and tables.
    """
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and _PAIRS not in value:
            return {key: state_to_json(f"{name}.{key}", one) for key, one in value.items()}
        items = value.items()
        return {_PAIRS: [[state_to_json(name, k), state_to_json(f"{name}.{k}", one)] for k, one in items]}
    if type(value) in (list, tuple):
        return [state_to_json(f"{name}[{i}]", one) for i, one in enumerate(value)]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise CheckpointError(
        f"'{name}' is {type(value).__name__}, and a checkpoint holds numbers, words, lists and tables",
        next_step="return what it needs as such values from state_dict",
    )


def state_from_json(value: Any) -> Any:
    """The inverse of `state_to_json`; tuples come back as lists."""
    if isinstance(value, list):
        return [state_from_json(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_PAIRS}:
        return {state_from_json(key): state_from_json(one) for key, one in value[_PAIRS]}
    return {key: state_from_json(one) for key, one in value.items()}


def convert_updates(scalars: Mapping[str, Any], updates_per_step: int) -> int:
    """The updates of a state, for a rule that makes so many of a batch; for its own rule, as they are."""
    theirs = int(scalars.get("updates_per_step", updates_per_step))  # older states lack it
    return round(int(scalars["updates"]) * updates_per_step / theirs)
