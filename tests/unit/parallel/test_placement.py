"""Placements are pure: whatever cuts what, every value has one owner in a replica, and is counted once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from typing import Any

import pytest
import torch

from paceline.job.mesh import DATA_AXES
from paceline.parallel.placement import (
    ModelPlacement,
    PipelineTransform,
    PlacementTransform,
    ShardTransform,
    TensorPlacement,
    TensorTransform,
    even_span,
)
from paceline.state.slot import TensorSlot

pytestmark = pytest.mark.capability("A11")

NUM_CASES = 300
Sizes = dict[str, int]
Coordinates = tuple[int, int, int]  # pipeline, tensor, shard


@dataclass(frozen=True)
class Case:
    """A model, and how it is cut.

    Args:
        sizes: ranks of a replica, by axis, in the order in which they cut; 1: nobody cuts.
        holders: by name, the stages that use a tensor.
        planned: by name, the dimension that the tensor plan cuts.
        sharded: by name, the dimension that the shard cuts.
    """

    slots: tuple[TensorSlot, ...]
    sizes: Sizes
    holders: Mapping[str, tuple[int, ...]]
    planned: Mapping[str, int]
    sharded: Mapping[str, int]
    keeps: bool

    @property
    def transforms(self) -> list[PlacementTransform]:
        found: list[PlacementTransform] = []
        if self.sizes["pipeline"] > 1:
            found.append(PipelineTransform(self.holders))
        if self.sizes["tensor"] > 1:
            found.append(TensorTransform(self.planned, self.sizes["tensor"]))
        if self.sizes["shard"] > 1:
            found.append(ShardTransform(self.sizes["shard"], self.sharded, self.keeps))
        return found

    def ranks(self) -> dict[Coordinates, dict[str, TensorPlacement]]:
        """What every rank of a replica holds."""
        placement = ModelPlacement(self.slots)
        for transform in self.transforms:
            placement = placement.cut(transform)
        places = product(*(range(n) for n in self.sizes.values()))
        return {place: placement.at(dict(zip(self.sizes, place, strict=True))) for place in places}


def slot(name: str, *shape: int) -> TensorSlot:
    return TensorSlot.whole(name, torch.empty(shape, device="meta"))


def case(number: int) -> Case:
    """A random one: 0-d and empty tensors, sizes that do not divide, tensors that several stages use."""
    draw = Random(number)
    sizes = {
        "pipeline": draw.choice([1, 2, 3]),
        "tensor": draw.choice([1, 2, 3]),
        "shard": draw.choice([1, 2, 3, 4]),
    }
    slots = tuple(
        slot(
            f"t{i}", *(draw.choice([0, 1, 1, 2, 3, 5, 7, 8]) for _ in range(draw.choice([0, 1, 1, 2, 2, 3])))
        )
        for i in range(draw.randint(1, 6))
    )
    stages = range(sizes["pipeline"])
    holders = {
        one.name: tuple(
            sorted(draw.sample(stages, draw.randint(1, min(len(stages), draw.choice([1, 1, 2, 3])))))
        )
        for one in slots
    }
    with_dims = [one for one in slots if one.shape]
    planned = {one.name: draw.randrange(len(one.shape)) for one in with_dims if draw.random() < 0.5}
    sharded = {one.name: draw.randrange(len(one.shape)) for one in with_dims if draw.random() < 0.5}
    return Case(slots, sizes, holders, planned, sharded, keeps=draw.random() < 0.5)


CASES = [case(number) for number in range(NUM_CASES)]


def times(parts: Sequence[TensorSlot | None], whole: TensorSlot) -> torch.Tensor:
    """How often each value of the whole tensor is in some parts."""
    found = torch.zeros(whole.shape, dtype=torch.int64)
    for part in parts:
        if part is not None:
            assert (part.name, part.shape) == (whole.name, whole.shape)
            found[part.index] += 1
    return found


def owners(the: Case) -> Iterator[tuple[TensorSlot, list[tuple[Coordinates, TensorPlacement]]]]:
    """Every tensor, with the ranks of a replica that hold it."""
    ranks = the.ranks()
    for whole in the.slots:
        yield whole, [(place, held[whole.name]) for place, held in ranks.items() if whole.name in held]


def counted_once(the: Case) -> bool:
    """Whether each value is counted by one rank of a replica."""
    return all(
        bool((times([held.updates for _, held in found if held.counts], whole) == 1).all())
        for whole, found in owners(the)
    )


def test_the_cases_have_everything_in_them() -> None:
    """What is not drawn is not tested."""
    assert {tuple(n > 1 for n in the.sizes.values()) for the in CASES} == set(
        product([False, True], repeat=3)
    )
    all_cuts = [the for the in CASES if len(the.transforms) == 3]
    assert len(all_cuts) > 30
    assert any(not one.shape for the in all_cuts for one in the.slots)
    assert any(one.shape and not one.numel for the in all_cuts for one in the.slots)
    assert any(len(the.holders[name]) > 1 for the in all_cuts for name in the.planned)
    assert any(len(the.holders[name]) == 3 for the in CASES for name in the.holders)
    assert any(the.planned.get(name) == dim for the in all_cuts for name, dim in the.sharded.items())
    assert any(the.planned.get(name, dim) != dim for the in all_cuts for name, dim in the.sharded.items())
    uneven = [
        one.shape[dim] % the.sizes["shard"]
        for the in all_cuts
        for one in the.slots
        for dim in [the.sharded.get(one.name, 0)]
        if one.shape
    ]
    assert any(uneven)


def test_every_value_is_counted_and_updated_by_one_rank_of_a_replica() -> None:
    for the in CASES:
        for whole, found in owners(the):
            counted = [held.updates for _, held in found if held.counts]
            assert bool((times(counted, whole) == 1).all()), (the, whole)


def test_what_is_not_counted_is_a_copy_of_what_is() -> None:
    """Stages that share a tensor, and tensor peers that hold it whole, update alike; nobody else twice."""
    for the in CASES:
        for whole, found in owners(the):
            copies = len(the.holders[whole.name]) if the.sizes["pipeline"] > 1 else 1
            copies *= 1 if whole.name in the.planned else the.sizes["tensor"]
            updated = times([held.updates for _, held in found], whole)
            assert bool((updated == copies).all()), (the, whole)
            counted = {held.updates for _, held in found if held.counts}
            assert {held.updates for _, held in found} <= counted | {None}, (the, whole)


def test_parts_are_disjoint_and_cover_what_is_computed_with() -> None:
    for the in CASES:
        for whole, found in owners(the):
            for (*_, shard), held in found:
                inside = torch.zeros(whole.shape, dtype=torch.int64)
                inside[held.computes.index] = 1
                assert torch.equal(times(held.parts, whole), inside), (the, whole)
                assert held.updates == held.parts[shard] and len(held.parts) == the.sizes["shard"]
                assert all(part.numel for part in held.parts if part is not None and the.sizes["shard"] > 1)


def test_ranks_that_sum_agree_in_what_they_sum() -> None:
    """Shard ranks compute with the same and know of the same parts; holders and axes of a sum are theirs."""
    for the in CASES:
        for whole, found in owners(the):
            stages = the.holders[whole.name] if the.sizes["pipeline"] > 1 else ()
            shared = stages if len(stages) > 1 else ()
            peers: dict[tuple[int, int], set[Any]] = {}
            for (stage, tensor, _), held in found:
                assert not stages or stage in stages
                assert held.holders == shared
                assert held.sums == (("pipeline", *DATA_AXES) if shared else DATA_AXES)
                peers.setdefault((stage, tensor), set()).add(
                    (held.computes, held.parts, held.counts, held.kept)
                )
            assert all(len(alike) == 1 for alike in peers.values())
            assert len({stage for (stage, *_), _ in found}) == max(1, len(stages))


def test_holders_of_one_tensor_have_equal_tensors_to_meet() -> None:
    for the in CASES:
        for _, found in owners(the):
            by_place: dict[tuple[int, int], set[Any]] = {}
            for (_, tensor, shard), held in found:
                by_place.setdefault((tensor, shard), set()).add((held.computes, held.parts))
            assert all(len(alike) == 1 for alike in by_place.values())


def test_the_axes_of_a_slot_are_those_along_which_ranks_hold_other_parts() -> None:
    """By them a snapshot knows what has to be gathered."""
    for the in CASES:
        for whole, found in owners(the):
            own = {"pipeline"} if the.sizes["pipeline"] > 1 else set()
            own |= {"tensor"} if the.sizes["tensor"] > 1 and whole.name in the.planned else set()
            for _, held in found:
                assert held.computes.axes == own
                if held.updates is not None:
                    assert held.updates.axes == own | ({"shard"} if the.sizes["shard"] > 1 else set())


def test_a_part_is_found_in_the_whole_and_in_what_covers_it() -> None:
    for the in CASES[::5]:
        for whole, found in owners(the):
            values = torch.arange(whole.numel).view(whole.shape)
            for _, held in found:
                outer = values[held.computes.index]
                assert tuple(outer.shape) == held.computes.sizes and outer.numel() == held.computes.numel
                for part in held.parts:
                    if part is not None:
                        assert torch.equal(outer[part.inside(held.computes)], values[part.index])
                        assert part.is_whole == (part.numel == whole.numel and part.sizes == whole.shape)


def test_names_come_in_the_order_of_the_model() -> None:
    for the in CASES:
        order = [one.name for one in the.slots]
        for held in the.ranks().values():
            assert list(held) == [name for name in order if name in held]


def test_without_a_transform_all_is_whole_and_updated() -> None:
    slots = (slot("w", 4, 3), slot("b"))
    assert ModelPlacement(slots).at({}) == {one.name: TensorPlacement(one, (one,)) for one in slots}


# By hand


def test_only_a_shard_that_keeps_nothing_lets_go_of_what_is_computed_with() -> None:
    for keeps in (True, False):
        assert ModelPlacement((slot("w", 4),)).cut(ShardTransform(2, {}, keeps)).at({})["w"].kept is keeps


def test_even_spans_follow_each_other() -> None:
    for items, parts in product(range(12), range(1, 7)):
        found = [even_span(items, parts, k) for k in range(parts)]
        assert [0, *(stop for _, stop in found)] == [*(start for start, _ in found), items]
        widths = {stop - start for start, stop in found}
        assert max(widths) - min(widths) <= 1


# Twins: each rule is needed, and the cases would see that it is gone


class CountsEverywhere(TensorTransform):
    def cut(self, held: TensorPlacement, coordinate: int) -> TensorPlacement | None:
        found = super().cut(held, coordinate)
        return None if found is None else replace(found, counts=held.counts)


class EveryHolderCounts(PipelineTransform):
    def cut(self, held: TensorPlacement, coordinate: int) -> TensorPlacement | None:
        found = super().cut(held, coordinate)
        return None if found is None else replace(found, counts=held.counts)


class EveryRankHasTheNumber(ShardTransform):
    def cut(self, held: TensorPlacement, coordinate: int) -> TensorPlacement | None:
        found = super().cut(held, coordinate)
        alike = (held.computes.on(self.axis),) * self.degree
        return found if held.computes.shape else replace(found, parts=alike) if found else None


TWINS = [
    (TensorTransform, CountsEverywhere),
    (PipelineTransform, EveryHolderCounts),
    (ShardTransform, EveryRankHasTheNumber),
]


@pytest.mark.parametrize(("right", "broken"), TWINS, ids=lambda kind: kind.__name__)
def test_a_broken_cut_is_seen(right: type[Any], broken: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(counted_once(the) for the in CASES)
    monkeypatch.setitem(globals(), right.__name__, broken)
    assert not all(counted_once(the) for the in CASES)
