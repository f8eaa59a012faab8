"""Replace the forward or numbers of a module in place, such that it can be restored.

A module with parts of its tensors runs another forward. Where it gets whole tensors again, as in a copy for
evaluation by the user, `restore_module` makes it run as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

_UNDO = "_whole_again"


def swap_forward(module: nn.Module, word: str, forward: Callable[..., Any]) -> None:
    """Replace a module's forward by means of a subclass; unlike a replaced method it also works in copies."""
    kind = type(module)
    name = f"{word}{kind.__name__}"
    module.__class__ = type(name, (kind,), {"forward": forward, "__module__": kind.__module__})

    def undo(target: nn.Module) -> None:
        target.__class__ = kind

    register_undo(module, undo)


def override_attributes(module: nn.Module, numbers: Mapping[str, int]) -> None:
    """Set numbers that a module's own forward uses."""
    before = {name: getattr(module, name) for name in numbers}

    def undo(target: nn.Module) -> None:
        vars(target).update(before)

    # Written to the dict directly: a module may refuse or convert attributes when they are set.
    vars(module).update(numbers)
    register_undo(module, undo)


def register_undo(module: nn.Module, undo: Callable[[Any], None]) -> None:
    """Register a function that `restore_module` calls; the last one registered is called first."""
    vars(module)[_UNDO] = (undo, *vars(module).get(_UNDO, ()))


def restore_module(module: nn.Module) -> None:
    """Let a module that has whole tensors again run as before it was split."""
    for undo in vars(module).pop(_UNDO, ()):
        undo(module)
