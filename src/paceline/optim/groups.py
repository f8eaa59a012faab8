"""What an optimizer's groups remember: the values that its steps have changed there.

Schedule-free optimizers, Prodigy and rules of the user's own keep state in `param_groups`. What the recipe
gave (betas, weight decay) is not state: a run that is resumed with another value trains with that.
Invariant: `restore` of `changed` gives an optimizer that was built alike the groups of the saved one.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.errors import CheckpointError

_SET_ELSEWHERE = ("params", "param_names", "lr", "initial_lr")  # by the layout, and by the schedule
_PLAIN = (bool, int, float, str, type(None))
_COMPARED = (*_PLAIN, list, tuple, dict)
_IN_PLACE = (torch.Tensor, list, dict)


class GroupMemory:
    """The groups of one optimizer, and what was in them when it was new.

    Args:
        optimizer: before its first step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._given = [_copied(_own(group)) for group in optimizer.param_groups]

    def changed(self) -> list[dict[str, Any]]:
        """By group, the values that are others now, or new; each is a JSON value.

        Raises:
            CheckpointError: one is a tensor or an object, which nobody could save.
        """
        found = []
        for group, given in zip(self._optimizer.param_groups, self._given, strict=True):
            own = _own(group)
            found.append(
                {key: own[key] for key in own if key not in given or not _same(own[key], given[key])}
            )
        for key, value in (entry for values in found for entry in values.items()):
            if not (isinstance(value, _PLAIN) or _is_plain_tuple(value)):
                raise _cannot_be_saved(self._optimizer, key, value)
        return found

    def restore(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Take over what `changed` gave; all else is as it was when the optimizer was new."""
        groups = zip(self._optimizer.param_groups, self._given, saved, strict=True)
        for group, given, values in groups:
            for key in _own(group).keys() - given.keys():
                del group[key]
            group.update(_copied(given) | {key: _as_tuple(value) for key, value in values.items()})


def _own(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _SET_ELSEWHERE}


def _is_plain_tuple(value: Any) -> bool:
    """Such as the betas that a scheduler moves."""
    return type(value) is tuple and all(isinstance(one, _PLAIN) for one in value)


def _as_tuple(value: Any) -> Any:
    """JSON has lists in the place of tuples; no list is saved."""
    return tuple(value) if isinstance(value, list) else value


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
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
