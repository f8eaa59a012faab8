"""Bytes of the trained tensors of one rank, as a placement says what it holds of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paceline.layout.placement import Held
from paceline.slot import Slot


@dataclass(frozen=True)
class Sizes:
    """Bytes of one rank's trained tensors.

    Args:
        computes: of what it computes with.
        updates: of what it updates.
        shared: of what it computes with and another stage too.
        largest: of one tensor that it computes with.
    """

    computes: int
    updates: int
    shared: int
    largest: int


def sizes_of(held: Iterable[Held], item_bytes: Mapping[str, int]) -> Sizes:
    """Add up what a rank holds.

    Args:
        item_bytes: by name, of one value.
    """
    computes = updates = shared = largest = 0
    for one in held:
        own = bytes_of(one.computes, item_bytes)
        computes += own
        updates += 0 if one.updates is None else bytes_of(one.updates, item_bytes)
        shared += own if one.holders else 0
        largest = max(largest, own)
    return Sizes(computes, updates, shared, largest)


def bytes_of(slot: Slot, item_bytes: Mapping[str, int]) -> int:
    """Of one part of a tensor."""
    return slot.numel * item_bytes[slot.name]
