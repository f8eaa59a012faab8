"""The mesh: which ranks work together, axis by axis.

Invariant: every rank has one coordinate on every axis, and all ranks derive the same mesh from the same
degrees. A mesh is of one membership, whose process groups it uses; only the ranks of a group make it.

A group whose ranks lie on several nodes, in two levels: inside a node, and between nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from paceline.errors import StrategyError

if TYPE_CHECKING:
    from paceline.job.cluster import Cluster
    from paceline.job.membership import GroupLease
    from paceline.job.process_group import OwnedProcessGroup

AXES = ("replica", "shard", "pipeline", "context", "tensor")
"""From the slowest changing rank to the fastest: tensor peers are neighbours, replicas are far apart."""

DATA_AXES = ("replica", "shard")


@dataclass(frozen=True)
class RankGroup:
    """Ranks that communicate.

    Args:
        name: the axis, used in the byte ledger and in errors.
        ranks: global ranks in the group, ascending.
        rank: this process's place in `ranks`.
        made: the process group; None if the group has one rank and no wire.
        groups: makes more of the same mesh; None: there is one process.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    made: OwnedProcessGroup | None = field(default=None, compare=False)
    groups: GroupLease | None = field(default=None, compare=False, repr=False)

    @property
    def handle(self) -> Any:
        """Torch's process group; None: there is no wire. An error once it has ended (`Mesh.give_back`)."""
        return None if self.made is None else self.made.handle

    @property
    def size(self) -> int:
        return len(self.ranks)

    def part(self, name: str, ranks: tuple[int, ...]) -> RankGroup:
        """A group of some of the job's ranks, this one among them; collective over these."""
        me = self.ranks[self.rank]
        made = self.groups.make(name, ranks) if self.groups is not None and len(ranks) > 1 else None
        return RankGroup(name, ranks, ranks.index(me), made, self.groups)


@dataclass(frozen=True)
class Mesh:
    """The groups of one rank.

    Args:
        world: all ranks.
        axes: by axis.
        data: ranks that share the samples of a step, each running micro-batches of its own: replica x shard.
            Over which ranks a gradient is summed is another question, which each tensor answers (`over`).
        inside: ranks that together are one replica: every axis but `replica`.
    """

    world: RankGroup
    axes: Mapping[str, RankGroup]
    data: RankGroup
    inside: RankGroup

    @property
    def replica(self) -> RankGroup:
        """The ranks that hold the same part of the model and train it on different data."""
        return self.axes["replica"]

    def place(self, axis: str) -> int:
        """This rank's coordinate on an axis."""
        return self.axes[axis].rank

    def size_over(self, axes: Iterable[str]) -> int:
        """How many ranks a group along some axes has."""
        return prod(self.axes[axis].size for axis in axes)

    def over(self, axes: Collection[str]) -> RankGroup:
        """This rank's group along some axes; collective over it. Along none it is this rank alone."""
        large = [axis for axis in AXES if axis in axes and self.axes[axis].size > 1]
        if len(large) == 1:
            return self.axes[large[0]]
        sizes = tuple(self.axes[axis].size for axis in AXES)
        whole = self.world if self.axes["replica"].size > 1 else self.inside
        return _axis_group(
            " x ".join(large) or "alone", large, sizes, [whole, *self.axes.values(), self.data]
        )

    def single_replica_mesh(self) -> Mesh:
        """As this rank's replica sees it by itself: no other replica shares its samples, or its sums."""
        alone = replace(self.over(()), name="replica")
        return replace(self, axes={**self.axes, "replica": alone}, data=self.axes["shard"])

    def among(self, axis: str, places: Sequence[int]) -> RankGroup:
        """Some ranks of this rank's group on an axis; collective over these, of which this rank is one."""
        whole = self.axes[axis]
        ranks = tuple(whole.ranks[place] for place in places)
        if ranks == whole.ranks:
            return whole
        return self.world.part(f"{axis} {','.join(map(str, places))}", ranks)

    def surviving_mesh(self, ranks: tuple[int, ...]) -> Mesh:
        """The mesh of the ranks that are left, when all of them are replicas; collective over these.

        Args:
            ranks: ascending, this one among them; empty: nobody is lost.
        """
        if ranks in ((), self.world.ranks):
            return self
        left = self.world.part(f"{len(ranks)} that are left", ranks)
        axes = {name: left if group.size > 1 else group for name, group in self.axes.items()}
        return replace(self, world=left, axes=axes, data=left)

    def give_back(self) -> None:
        """Use the groups made for this mesh no more: they end when all ranks have given theirs."""
        if (lease := self.world.groups) is not None:
            lease.give_back()

    @classmethod
    def build(cls, cluster: Cluster, degrees: Mapping[str, int]) -> Mesh:
        """Create this rank's groups of every axis; collective: all ranks call with equal degrees.

        Args:
            cluster: a connected cluster.
            degrees: size of each axis; missing axes have size 1.
        Raises:
            StrategyError: the product of the degrees is not the world size.
        """
        sizes = tuple(degrees.get(axis, 1) for axis in AXES)
        if prod(sizes) != cluster.world_size:
            raise StrategyError(
                f"the mesh {dict(zip(AXES, sizes, strict=True))} holds {prod(sizes)} ranks, "
                f"but {cluster.world_size} processes run",
                next_step="make the product of the degrees equal to the number of processes (-n)",
            )
        ranks, groups = tuple(range(cluster.world_size)), None
        if cluster.world_size > 1:
            groups = cluster.connected.groups.lease()
        world = RankGroup("world", ranks, cluster.global_rank, groups.world if groups else None, groups)
        return cls._from_world(world, sizes)

    @classmethod
    def planned(cls, degrees: Mapping[str, int], rank: int) -> Mesh:
        """What a rank of such a job would have, without any process group: to ask who is where."""
        sizes = tuple(degrees.get(axis, 1) for axis in AXES)
        return cls._from_world(RankGroup("world", tuple(range(prod(sizes))), rank), sizes)

    @classmethod
    def _from_world(cls, world: RankGroup, sizes: tuple[int, ...]) -> Mesh:
        known = [world]
        for name, axes in (*((axis, (axis,)) for axis in AXES), ("data", DATA_AXES), ("inside", AXES[1:])):
            known.append(_axis_group(name, axes, sizes, known))
        found = {group.name: group for group in known}
        return cls(world, {axis: found[axis] for axis in AXES}, found["data"], found["inside"])


def duplicate_group(group: RankGroup, suffix: str) -> RankGroup:
    """The same ranks with a process group of their own, for a thread of its own; collective over them."""
    return group.part(f"{group.name}-{suffix}", group.ranks)


def span_ranks(axes: Sequence[str], sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All groups that span some axes, as places in the mesh in ascending order; pure.

    Args:
        axes: some of `AXES`.
        sizes: the size of every axis, in the order of `AXES`.
    """
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(product(*(range(n) for n in sizes))):
        outside = tuple(c for axis, c in zip(AXES, place, strict=True) if axis not in axes)
        found.setdefault(outside, []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def _axis_group(
    name: str, axes: Sequence[str], sizes: tuple[int, ...], known: Sequence[RankGroup]
) -> RankGroup:
    """This rank's group along some axes; a process group that exists for the same ranks is used again."""
    world = known[0]
    places = next(places for places in span_ranks(axes, sizes) if world.rank in places)
    mine = tuple(world.ranks[place] for place in places)
    same = next((group for group in known if group.ranks == mine), None)
    if same is not None:
        return replace(same, name=name)
    return world.part(name, mine)


@dataclass(frozen=True)
class NodeLevels:
    """A group on several nodes, with equally many ranks on each, in two levels.

    Args:
        scatter, gather: the ranks of this rank's node, as two process groups: parts of different buffers are
            under way at a time, and their order among each other differs from rank to rank.
        between: one rank of every node, all with this rank's place on it.
        order: places in the group, those with the first place on their nodes first.
    """

    scatter: RankGroup
    between: RankGroup
    gather: RankGroup
    order: tuple[int, ...]

    @classmethod
    def build(cls, group: RankGroup, parts: Sequence[tuple[int, ...]]) -> NodeLevels:
        """Create the process groups; collective over the group.

        Args:
            parts: the group's ranks by node, two or more of them on two nodes or more.
        Raises:
            StrategyError: a node has more ranks of the group than another.
        """
        if len({len(part) for part in parts}) > 1:
            counts = ", ".join(str(len(part)) for part in parts)
            raise StrategyError(
                f"the ranks of the group '{group.name}' are uneven over the nodes: {counts}; a buffer is cut "
                "among the ranks of a node, and each slice is summed over the nodes",
                next_step="start equally many processes on every node, or choose route=native",
            )
        me = group.ranks[group.rank]
        mine = next(part for part in parts if me in part)
        across = [tuple(sorted(place)) for place in zip(*parts, strict=True)]
        return cls(
            group.part(f"{group.name}-inside-nodes", mine),
            group.part(f"{group.name}-between-nodes", across[mine.index(me)]),
            group.part(f"{group.name}-inside-nodes", mine),
            tuple(group.ranks.index(rank) for place in across for rank in place),
        )


def group_ranks_by_node(ranks: Sequence[int], node_of: Sequence[int]) -> list[tuple[int, ...]]:
    """The ranks of a group by node, ascending; pure.

    Args:
        ranks: global ranks.
        node_of: the node of every global rank.
    """
    found: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        found.setdefault(node_of[rank], []).append(rank)
    return [tuple(part) for part in found.values()]
