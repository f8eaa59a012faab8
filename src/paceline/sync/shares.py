"""What a server holds of a model, as every rank has it: parts of what it computes with, in the same memory.

With one server its share is everything. Invariant: on all ranks the share of a server has the same slots in
the same order, and each value of the model is in one share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from paceline.layout import Holding, Placed
from paceline.slot import Slot
from paceline.sync.residuals import Coder

SERVER = 0
"""The rank that decides; it is the first server."""


def shares_of(holding: Holding, server: int) -> Iterator[tuple[Slot, Slot]]:
    """What this rank computes with, and what a server has of it; without what it has nothing of."""
    for held in holding.held.values():
        part = held.parts[server]
        if part is not None:
            yield held.computes, part


def slots_of(holding: Holding, server: int) -> list[Slot]:
    """The parts of a server."""
    return [part for _, part in shares_of(holding, server)]


def share_of(holding: Holding, server: int) -> dict[Slot, Tensor]:
    """The values of a server's parts here; views."""
    return {part: cut(holding.computes[slot], slot, part) for slot, part in shares_of(holding, server)}


def cut(values: Tensor, slot: Slot, part: Slot) -> Tensor:
    """A part of the values of a slot; a view."""
    return values.detach()[part.inside(slot)]


def load_share(tensors: Sequence[Tensor], parts: Mapping[Slot, Tensor]) -> None:
    """Take over the values of a server's parts, in place."""
    with torch.no_grad():
        for part, value in zip(parts.values(), tensors, strict=True):
            part.copy_(value)


def load_buffers(tensors: Sequence[Tensor], placed: Placed) -> Sequence[Tensor]:
    """Take over the buffers, which come first; returns the other tensors."""
    count = len(placed.buffers.values())
    placed.buffers.reset([value.to(placed.holding.device) for value in tensors[:count]])
    return tensors[count:]


class Together:
    """What coding has lost on the way to some servers, by the whole tensor; see `residuals.Coder`.

    Args:
        coders: by server.
        holding: of this rank.
    """

    def __init__(self, coders: Mapping[int, Coder], holding: Holding) -> None:
        self._coders, self._holding = coders, holding

    def lost(self) -> Sequence[tuple[str, Slot, Tensor]]:
        """See `Coder`; zeros in what no server here has."""
        wholes = {slot.name: slot for slot in self._holding.computes}
        found: dict[tuple[str, Slot], Tensor] = {}
        for coder in self._coders.values():
            for side, part, value in coder.lost():
                whole = wholes[part.name]
                values = found.setdefault((side, whole), torch.zeros(whole.shape))
                values[part.inside(whole)] = value
        return [(side, whole, values) for (side, whole), values in found.items()]

    def set_lost(self, found: Mapping[tuple[str, str], Tensor]) -> None:
        """See `Coder`."""
        wholes = {slot.name: slot for slot in self._holding.computes}
        for server, coder in self._coders.items():
            parts = {part.name: part for part in slots_of(self._holding, server)}
            own = {
                (side, name): cut(value, wholes[name], parts[name])
                for (side, name), value in found.items()
                if name in parts
            }
            coder.set_lost(own)
