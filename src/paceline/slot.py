"""Names and places of tensors: which part of which whole a rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.errors import TaskError


@dataclass(frozen=True)
class Slot:
    """One trained tensor by its logical name: the key of reduction, comparison and checkpoint.

    Args:
        name: the parameter's first name in the model; tied weights are one slot.
        shape: of the whole tensor.
        part: what this rank holds of it: (start, stop) for each dimension.
        axes: mesh axes that split it; empty if every rank of a replica holds all of it.
    """

    name: str
    shape: tuple[int, ...]
    part: tuple[tuple[int, int], ...]
    axes: frozenset[str] = frozenset()

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> Slot:
        """A slot that this rank holds in full."""
        return cls(name, tuple(tensor.shape), tuple((0, n) for n in tensor.shape))

    @property
    def rows(self) -> slice:
        """The rows of the whole tensor (its first dimension) that this rank holds."""
        return slice(*self.part[0]) if self.part else slice(None)


@dataclass(frozen=True)
class Piece:
    """A tensor of the state and its place in the whole: what a checkpoint stores and a resize moves."""

    slot: Slot
    tensor: Tensor

    def under(self, word: str) -> Piece:
        """The same, with `word/` before its name."""
        return Piece(replace(self.slot, name=f"{word}/{self.slot.name}"), self.tensor)


class Keeper(Protocol):
    """Who holds state beside model and optimizer: a rule, a codec's residuals."""

    def pieces(self) -> Sequence[Piece]:
        """Tensors, by names that no other keeper uses."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over whole tensors, by the names of `pieces`; the number of ranks may have changed."""


def trained_parameters(model: nn.Module) -> dict[Slot, nn.Parameter]:
    """The parameters that take gradients, by slot, in the model's order; tied weights once.

    Raises:
        TaskError: there are none.
    """
    found = {Slot.whole(name, p): p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise TaskError(
            "the model has no parameter that takes a gradient",
            next_step="unfreeze what should be trained: parameter.requires_grad_(True)",
        )
    return found


def first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """For each name the first name of the same tensor, which is another one where tensors are tied."""
    seen: dict[tuple[int, torch.Size], str] = {}
    return {
        name: seen.setdefault((value.data_ptr(), value.shape), name) if value.numel() else name
        for name, value in tensors.items()
    }
