"""The mesh: which ranks work together, axis by axis.

Invariant: every rank has one coordinate on every axis, and all ranks derive the same mesh from the same
degrees. A mesh is of one membership, whose process groups it uses; only the ranks of a group make it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from paceline.errors import StrategyError

if TYPE_CHECKING:
    from paceline.cluster import Cluster
    from paceline.lease import Lease
    from paceline.process_group import Made

AXES = ("replica", "shard", "pipeline", "context", "tensor")
"""From the slowest changing rank to the fastest: tensor peers are neighbours, replicas are far apart."""

DATA_AXES = ("replica", "shard")


@dataclass(frozen=True)
class Group:
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
    made: Made | None = field(default=None, compare=False)
    groups: Lease | None = field(default=None, compare=False, repr=False)

    @property
    def handle(self) -> Any:
        """Torch's process group; None: there is no wire. An error once it has ended (`Mesh.give_back`)."""
        return None if self.made is None else self.made.handle

    @property
    def size(self) -> int:
        return len(self.ranks)

    def part(self, name: str, ranks: tuple[int, ...]) -> Group:
        """A group of some of the job's ranks, this one among them; collective over these."""
        me = self.ranks[self.rank]
        made = self.groups.make(name, ranks) if self.groups is not None and len(ranks) > 1 else None
        return Group(name, ranks, ranks.index(me), made, self.groups)


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

    world: Group
    axes: Mapping[str, Group]
    data: Group
    inside: Group

    @property
    def replica(self) -> Group:
        """The ranks that hold the same part of the model and train it on different data."""
        return self.axes["replica"]

    def place(self, axis: str) -> int:
        """This rank's coordinate on an axis."""
        return self.axes[axis].rank

    def size_over(self, axes: Iterable[str]) -> int:
        """How many ranks a group along some axes has."""
        return prod(self.axes[axis].size for axis in axes)

    def over(self, axes: Collection[str]) -> Group:
        """This rank's group along some axes; collective over it. Along none it is this rank alone."""
        large = [axis for axis in AXES if axis in axes and self.axes[axis].size > 1]
        if len(large) == 1:
            return self.axes[large[0]]
        sizes = tuple(self.axes[axis].size for axis in AXES)
        whole = self.world if self.axes["replica"].size > 1 else self.inside
        return _span(" x ".join(large) or "alone", large, sizes, [whole, *self.axes.values(), self.data])

    def of_one_replica(self) -> Mesh:
        """As this rank's replica sees it by itself: no other replica shares its samples, or its sums."""
        alone = replace(self.over(()), name="replica")
        return replace(self, axes={**self.axes, "replica": alone}, data=self.axes["shard"])

    def among(self, axis: str, places: Sequence[int]) -> Group:
        """Some ranks of this rank's group on an axis; collective over these, of which this rank is one."""
        whole = self.axes[axis]
        ranks = tuple(whole.ranks[place] for place in places)
        if ranks == whole.ranks:
            return whole
        return self.world.part(f"{axis} {','.join(map(str, places))}", ranks)

    def among_left(self, ranks: tuple[int, ...]) -> Mesh:
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
        world = Group("world", ranks, cluster.global_rank, groups.world if groups else None, groups)
        return cls._spanned(world, sizes)

    @classmethod
    def planned(cls, degrees: Mapping[str, int], rank: int) -> Mesh:
        """What a rank of such a job would have, without any process group: to ask who is where."""
        sizes = tuple(degrees.get(axis, 1) for axis in AXES)
        return cls._spanned(Group("world", tuple(range(prod(sizes))), rank), sizes)

    @classmethod
    def _spanned(cls, world: Group, sizes: tuple[int, ...]) -> Mesh:
        known = [world]
        for name, axes in (*((axis, (axis,)) for axis in AXES), ("data", DATA_AXES), ("inside", AXES[1:])):
            known.append(_span(name, axes, sizes, known))
        found = {group.name: group for group in known}
        return cls(world, {axis: found[axis] for axis in AXES}, found["data"], found["inside"])


def twin_group(group: Group, suffix: str) -> Group:
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


def _span(name: str, axes: Sequence[str], sizes: tuple[int, ...], known: Sequence[Group]) -> Group:
    """This rank's group along some axes; a process group that exists for the same ranks is used again."""
    world = known[0]
    places = next(places for places in span_ranks(axes, sizes) if world.rank in places)
    mine = tuple(world.ranks[place] for place in places)
    same = next((group for group in known if group.ranks == mine), None)
    if same is not None:
        return replace(same, name=name)
    return world.part(name, mine)
