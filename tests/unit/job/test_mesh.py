"""The mesh: every rank has one place on every axis, and a wrong product of degrees is refused."""

from math import prod

import pytest

from paceline.errors import StrategyError
from paceline.job.cluster import Cluster
from paceline.job.mesh import AXES, Mesh, RankGroup, duplicate_group, span_ranks

SHAPES = [(1, 1, 1, 1, 1), (4, 1, 1, 1, 1), (2, 1, 3, 1, 2), (2, 2, 2, 2, 2), (1, 5, 1, 1, 3)]


@pytest.mark.parametrize("sizes", SHAPES)
@pytest.mark.parametrize("axis", AXES)
def test_groups_of_an_axis_are_a_partition_of_the_world(axis: str, sizes: tuple[int, ...]) -> None:
    groups = span_ranks((axis,), sizes)
    assert {len(ranks) for ranks in groups} == {sizes[AXES.index(axis)]}
    assert sorted(rank for ranks in groups for rank in ranks) == list(range(prod(sizes)))
    assert all(list(ranks) == sorted(ranks) for ranks in groups)


@pytest.mark.parametrize("sizes", SHAPES)
def test_a_rank_is_named_by_its_coordinates(sizes: tuple[int, ...]) -> None:
    places = {
        rank: tuple(
            next(ranks.index(rank) for ranks in span_ranks((axis,), sizes) if rank in ranks) for axis in AXES
        )
        for rank in range(prod(sizes))
    }
    assert len(set(places.values())) == prod(sizes)
    assert sorted(places, key=lambda rank: places[rank]) == sorted(places)  # the last axis changes fastest


def test_tensor_peers_are_neighbours_and_replicas_are_far_apart() -> None:
    sizes = (2, 1, 1, 1, 4)
    assert span_ranks(("tensor",), sizes) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert span_ranks(("replica",), sizes) == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_a_span_joins_axes() -> None:
    sizes = (2, 2, 2, 1, 1)
    assert span_ranks(("replica", "shard"), sizes) == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert span_ranks(AXES[1:], sizes) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_one_process_has_a_group_of_one_on_every_axis_and_no_wire() -> None:
    mesh = Mesh.build(Cluster.single(), {})
    assert set(mesh.axes) == set(AXES)
    for group in (mesh.world, *mesh.axes.values()):
        assert (group.size, group.rank, group.ranks, group.handle) == (1, 0, (0,), None)
    assert mesh.replica == RankGroup("replica", (0,), 0)


def test_degrees_that_do_not_fit_the_world_are_refused_with_both_numbers() -> None:
    with pytest.raises(StrategyError, match=r"'replica': 3.* holds 6 ranks, but the job has 1 process"):
        Mesh.build(Cluster.single(), {"replica": 3, "tensor": 2})


def test_a_twin_has_the_same_ranks_and_one_rank_needs_no_process_group() -> None:
    assert duplicate_group(RankGroup("replica", (0,), 0), "tree") == RankGroup("replica-tree", (0,), 0)


def test_all_of_an_axis_are_the_group_of_the_axis() -> None:
    mesh = Mesh.build(Cluster.single(), {})
    assert mesh.subgroup_along("pipeline", [0]) is mesh.axes["pipeline"]
    assert mesh.coordinate("pipeline") == 0
