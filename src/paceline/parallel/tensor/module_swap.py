"""Modules that run otherwise while they are cut, and as before where they are whole again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

_UNDO = "_whole_again"


def swap_forward(module: nn.Module, word: str, forward: Callable[..., Any]) -> None:
    """Give a module another forward, by a subclass of its own: unlike a method it follows a copy."""
    kind = type(module)
    name = f"{word}{kind.__name__}"
    module.__class__ = type(name, (kind,), {"forward": forward, "__module__": kind.__module__})

    def undo(one: nn.Module) -> None:
        one.__class__ = kind

    register_undo(module, undo)


def override_attributes(module: nn.Module, numbers: Mapping[str, int]) -> None:
    """Set numbers by which a module's own forward goes."""
    before = {name: getattr(module, name) for name in numbers}

    def undo(one: nn.Module) -> None:
        vars(one).update(before)

    vars(module).update(numbers)
    register_undo(module, undo)


def register_undo(module: nn.Module, undo: Callable[[Any], None]) -> None:
    """What is to be undone where the module has whole tensors again."""
    vars(module)[_UNDO] = (undo, *vars(module).get(_UNDO, ()))


def restore_module(module: nn.Module) -> None:
    """Let a module, which has whole tensors now, run as it did before it was cut."""
    for undo in vars(module).pop(_UNDO, ()):
        undo(module)
