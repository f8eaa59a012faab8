"""The buckets of a rank, laid out as a run lays them out, without memory; closed forms are made of them.

A bucket holds whole tensors, and its rows are as wide as the widest one, so sums over all tensors do not say
what is allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm.reduction.part_buffer import PartBuffer, bytes_in_turn, plan_buckets
from paceline.layout.placement import Held
from paceline.layout.sizes import bytes_of
from paceline.recipe import Recipe
from paceline.slot import Slot

_TYPES = {
    1: torch.uint8,
    2: torch.bfloat16,
    4: torch.float32,
    8: torch.float64,
    16: torch.complex128,
}


class Way(NamedTuple):
    """What buckets have in common that take memory in turn.

    Args:
        number: of their reduction, in the order of a run.
        item_bytes: of one value.
        axes: over which they are summed.
        meets: whether ranks of one replica put their parts together first.
    """

    number: int
    item_bytes: int
    axes: tuple[str, ...] = ()
    meets: bool = False


class Bucket(NamedTuple):
    """Bytes of all rows of one bucket, and of one of them."""

    whole: int
    row: int
    way: Way


class Laid(NamedTuple):
    """One reduction.

    Args:
        members: what it sums, in the model's order.
        buffers: its buckets, in the order of their launch.
        axes, meets: see `Way`.
    """

    members: Sequence[Held]
    buffers: Sequence[PartBuffer]
    axes: tuple[str, ...]
    meets: bool


def reductions_of(
    recipe: Recipe, held: Iterable[Held], item_bytes: Mapping[str, int], *, often: bool, multiple: int = 1
) -> list[Laid]:
    """All of a rank.

    Args:
        held: in the model's order; `item_bytes` by name, of one value.
        often: gradients leave with every micro-batch.
        multiple: see `PartBuffer`.
    """
    together = dict[tuple[tuple[str, ...], tuple[int, ...], tuple[str, ...], int], list[Held]]()
    for one in held:
        alike = one.sums, one.holders, tuple(sorted(one.computes.axes)), one.chunk if often else 0
        together.setdefault(alike, []).append(one)
    found, most = [], recipe.runtime.bucket_bytes
    for (axes, holders, *_), members in sorted(together.items()):
        meets = bool(holders) or "tensor" in axes
        buffers = _laid(members, item_bytes, most, in_turn=often and not meets, multiple=multiple)
        found.append(Laid(members, buffers, axes, meets))
    return found


def sizes_in(reductions: Sequence[Laid]) -> list[Bucket]:
    """Of all buckets."""
    return [
        Bucket(
            one.flat.nbytes,
            one.rows[0].nbytes,
            Way(number, one.flat.element_size(), reduction.axes, reduction.meets),
        )
        for number, reduction in enumerate(reductions)
        for one in reduction.buffers
    ]


def moved_together(held: Sequence[Held], item_bytes: Mapping[str, int], most_bytes: int) -> list[PartBuffer]:
    """Parameters that come together after an update, in their order.

    Args:
        most_bytes: see `bytes_in_turn`.
    """
    return _laid(held, item_bytes, most_bytes, in_turn=True)


def moved_at_once(held: Sequence[Held], item_bytes: Mapping[str, int]) -> list[PartBuffer]:
    """Parameters that come all at a time."""
    return _laid(held, item_bytes, sum(bytes_of(one.computes, item_bytes) for one in held), in_turn=False)


def _laid(
    held: Sequence[Held],
    item_bytes: Mapping[str, int],
    most_bytes: int,
    *,
    in_turn: bool,
    multiple: int = 1,
) -> list[PartBuffer]:
    tensors = without_memory(held, item_bytes)
    parts = {one.computes: one.parts for one in held}
    together = bytes_in_turn(tensors.values(), most_bytes) if in_turn else most_bytes
    return [
        PartBuffer(slots, tensors, parts, _without_memory, multiple)
        for slots in plan_buckets(tensors, together)
    ]


def without_memory(held: Iterable[Held], item_bytes: Mapping[str, int]) -> dict[Slot, Tensor]:
    """What a rank computes with, by slot: shapes alone."""
    slots = [one.computes for one in held]
    return {
        slot: torch.empty(slot.sizes, dtype=_TYPES[item_bytes[slot.name]], device="meta") for slot in slots
    }


def _without_memory(num_values: int, like: Tensor) -> Tensor:
    return like.new_empty(num_values, device="meta")
