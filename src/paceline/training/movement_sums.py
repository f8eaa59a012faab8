"""Sums of how replicas that train alone have moved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from paceline.comm.reduction import InAnyOrder, LocalReducer, Reducer, Reducers, Reduction
from paceline.layout import Holding
from paceline.slot import Slot
from paceline.training.arrange import Setting


def build_movement_sums(
    setting: Setting, holding: Holding, tensors: Mapping[Slot, Tensor], name: str = ""
) -> Reduction:
    """Sums over replicas of what each rank updates; collective over the ranks that update the same.

    Args:
        tensors: by the part that this rank updates; there may be none.
        name: see `Reducer`.
    """
    replicas, path = setting.mesh.replica, None
    if replicas.size > 1:
        path = InAnyOrder(setting.collective(setting.mesh.over(())), setting.collective(replicas))
    by_slot, built = dict[Slot, Reduction](), list[Reduction]()
    for label, counts, slots in _held_alike(holding, tensors):
        own, prefix = {slot: tensors[slot] for slot in slots}, f"{name}{label}/" if label else name
        one: Reduction = LocalReducer(own, counts)
        if path is not None:
            parts = {slot: (slot,) for slot in slots}
            one = Reducer(own, parts, path, setting.bucket_bytes, counts=counts, name=prefix)
        built.append(one)
        by_slot |= dict.fromkeys(slots, one)
    return Reducers(by_slot, built) if len(built) > 1 else next(iter(built), LocalReducer({}))


def _held_alike(holding: Holding, tensors: Mapping[Slot, Tensor]) -> Iterator[tuple[str, bool, list[Slot]]]:
    """Parts that the same ranks of a replica hold: what these are called, and whether this rank counts them.

    They lie in buckets of their own, alike on all of these ranks, so that copies get the same sums.
    """
    together: dict[tuple[tuple[int, ...], tuple[str, ...]], list[tuple[bool, Slot]]] = {}
    for held in holding.held.values():
        slot = held.updates
        if slot is not None and slot in tensors:
            alike = held.holders, tuple(sorted(slot.axes))
            together.setdefault(alike, []).append((held.counts, slot))
    for (holders, axes), members in sorted(together.items(), key=lambda entry: entry[0]):
        yield "-".join([*axes, *map(str, holders)]), members[0][0], [slot for _, slot in members]
