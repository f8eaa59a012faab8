"""The device mesh: the groups of ranks along each axis, and groups in two levels, inside and between nodes.

Invariant: every rank has one coordinate on every axis, and all ranks derive the same mesh from the same
degrees. A mesh belongs to one membership, whose process groups it uses; only the ranks of a group create it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from paceline.errors import StrategyError, format_count

if TYPE_CHECKING:
    from paceline.job.cluster import Cluster
    from paceline.job.membership import GroupLease
    from paceline.job.process_group import OwnedProcessGroup

AXES = ("replica", "shard", "pipeline", "context", "tensor")
"""From the axis that changes slowest with the rank to the fastest: tensor peers are neighbours."""

DATA_AXES = ("replica", "shard")


@dataclass(frozen=True)
class RankGroup:
    """A group of ranks that communicate.

    Args:
        name: the axis, as in the byte ledger and in errors.
        ranks: global ranks in the group, ascending.
        rank: this process's rank in the group.
        process_group: torch's group; None if the group has one rank and thus does not communicate.
        lease: creates more groups of the same mesh; None: there is one process.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    process_group: OwnedProcessGroup | None = field(default=None, compare=False)
    lease: GroupLease | None = field(default=None, compare=False, repr=False)

    @property
    def handle(self) -> Any:
        """Torch's process group, None for one rank; an error once it has ended (`Mesh.give_back`)."""
        return None if self.process_group is None else self.process_group.handle

    @property
    def size(self) -> int:
        return len(self.ranks)

    def subgroup(self, name: str, ranks: tuple[int, ...]) -> RankGroup:
        """Create a group of some of the job's ranks, of which this is one; collective over these."""
        group = self.lease.make(name, ranks) if self.lease is not None and len(ranks) > 1 else None
        return RankGroup(name, ranks, ranks.index(self.ranks[self.rank]), group, self.lease)


@dataclass(frozen=True)
class Mesh:
    """The groups that one rank belongs to.

    Args:
        world: all ranks.
        axes: the group along each axis.
        data: ranks that share the samples of a step, each with its own micro-batches: replica x shard. The
            ranks over which a gradient is summed can be others, depending on the tensor (`group_over`).
        inside: ranks that together form one replica: every axis but `replica`.
    """

    world: RankGroup
    axes: Mapping[str, RankGroup]
    data: RankGroup
    inside: RankGroup

    @property
    def replica(self) -> RankGroup:
        """The group of ranks that hold the same part of the model and train it on different data."""
        return self.axes["replica"]

    def coordinate(self, axis: str) -> int:
        """Return this rank's coordinate on an axis."""
        return self.axes[axis].rank

    def size_over(self, axes: Iterable[str]) -> int:
        """Return the number of ranks of a group along some axes."""
        return prod(self.axes[axis].size for axis in axes)

    def group_over(self, axes: Collection[str]) -> RankGroup:
        """Return this rank's group along some axes (none: this rank alone); collective over it."""
        large = [axis for axis in AXES if axis in axes and self.axes[axis].size > 1]
        if len(large) == 1:
            return self.axes[large[0]]
        sizes = tuple(self.axes[axis].size for axis in AXES)
        whole = self.world if self.axes["replica"].size > 1 else self.inside
        return _axis_group(
            " x ".join(large) or "alone", large, sizes, [whole, *self.axes.values(), self.data]
        )

    def single_replica_mesh(self) -> Mesh:
        """Return the mesh of this replica alone, which shares samples and sums with no other one."""
        alone = replace(self.group_over(()), name="replica")
        return replace(self, axes={**self.axes, "replica": alone}, data=self.axes["shard"])

    def subgroup_along(self, axis: str, coordinates: Sequence[int]) -> RankGroup:
        """Return the group of some coordinates on an axis; collective over these ranks."""
        whole = self.axes[axis]
        ranks = tuple(whole.ranks[coordinate] for coordinate in coordinates)
        if ranks == whole.ranks:
            return whole
        return self.world.subgroup(f"{axis} {','.join(map(str, coordinates))}", ranks)

    def surviving_mesh(self, ranks: tuple[int, ...]) -> Mesh:
        """Return the mesh of the remaining ranks, all of which are replicas; collective over these.

        Args:
            ranks: ascending, this one among them; empty: no rank is lost.
        """
        if ranks in ((), self.world.ranks):
            return self
        remaining = self.world.subgroup(f"{len(ranks)} remaining", ranks)
        axes = {name: remaining if group.size > 1 else group for name, group in self.axes.items()}
        return replace(self, world=remaining, axes=axes, data=remaining)

    def give_back(self) -> None:
        """Stop using the groups of this mesh; they end when all ranks have given theirs back."""
        if (lease := self.world.lease) is not None:
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
                f"the mesh {dict(zip(AXES, sizes, strict=True))} holds {format_count(prod(sizes), 'rank')}, "
                f"but the job has {format_count(cluster.world_size, 'process')}",
                next_step="make the product of the degrees equal to the number of processes (-n)",
            )
        ranks, lease = tuple(range(cluster.world_size)), None
        if cluster.world_size > 1:
            lease = cluster.connected.groups.lease()
        world = RankGroup("world", ranks, cluster.global_rank, lease.world if lease else None, lease)
        return cls._from_world(world, sizes)

    @classmethod
    def without_groups(cls, degrees: Mapping[str, int], rank: int) -> Mesh:
        """Return the mesh of a rank without any process group, to plan a job that does not run."""
        sizes = tuple(degrees.get(axis, 1) for axis in AXES)
        return cls._from_world(RankGroup("world", tuple(range(prod(sizes))), rank), sizes)

    @classmethod
    def _from_world(cls, world: RankGroup, sizes: tuple[int, ...]) -> Mesh:
        known = [world]
        for name, axes in (*((axis, (axis,)) for axis in AXES), ("data", DATA_AXES), ("inside", AXES[1:])):
            known.append(_axis_group(name, axes, sizes, known))
        groups = {group.name: group for group in known}
        return cls(world, {axis: groups[axis] for axis in AXES}, groups["data"], groups["inside"])


def duplicate_group(group: RankGroup, suffix: str) -> RankGroup:
    """Create a second process group of the same ranks, for another thread; collective over them."""
    return group.subgroup(f"{group.name}-{suffix}", group.ranks)


def span_ranks(axes: Sequence[str], sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return all groups along some axes, as ascending indices into the mesh; pure.

    Args:
        axes: some of `AXES`.
        sizes: the size of every axis, in the order of `AXES`.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, coordinates in enumerate(product(*(range(n) for n in sizes))):
        outside = tuple(c for axis, c in zip(AXES, coordinates, strict=True) if axis not in axes)
        groups.setdefault(outside, []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def _axis_group(
    name: str, axes: Sequence[str], sizes: tuple[int, ...], known: Sequence[RankGroup]
) -> RankGroup:
    """Return this rank's group along some axes; a process group of the same ranks is reused."""
    world = known[0]
    indices = next(indices for indices in span_ranks(axes, sizes) if world.rank in indices)
    ranks = tuple(world.ranks[index] for index in indices)
    same = next((group for group in known if group.ranks == ranks), None)
    if same is not None:
        return replace(same, name=name)
    return world.subgroup(name, ranks)


@dataclass(frozen=True)
class NodeLevels:
    """A group on several nodes, with equally many ranks on each, in two levels.

    Args:
        scatter, gather: the ranks of this rank's node, as two process groups, because reduce-scatters and
            all-gathers of different buffers overlap, in an order that differs from rank to rank.
        between: one rank of every node, all with the same index on their node as this one.
        order: ranks in the group, ordered by their index on their node.
    """

    scatter: RankGroup
    between: RankGroup
    gather: RankGroup
    order: tuple[int, ...]

    @classmethod
    def build(cls, group: RankGroup, parts: Sequence[tuple[int, ...]]) -> NodeLevels:
        """Create the process groups; collective over the group.

        Args:
            parts: the group's ranks by node: two nodes or more, with two ranks or more on each.
        Raises:
            StrategyError: a node has more ranks of the group than another.
        """
        if len({len(ranks) for ranks in parts}) > 1:
            counts = ", ".join(str(len(ranks)) for ranks in parts)
            raise StrategyError(
                f"the nodes have different numbers of ranks of the group '{group.name}': {counts}; a buffer"
                " is divided among the ranks of a node, and each slice is summed over the nodes",
                next_step="start equally many processes on every node, or choose route=native",
            )
        global_rank = group.ranks[group.rank]
        on_node = next(ranks for ranks in parts if global_rank in ranks)
        across = [tuple(sorted(ranks)) for ranks in zip(*parts, strict=True)]
        return cls(
            group.subgroup(f"{group.name}-inside-nodes", on_node),
            group.subgroup(f"{group.name}-between-nodes", across[on_node.index(global_rank)]),
            group.subgroup(f"{group.name}-inside-nodes", on_node),
            tuple(group.ranks.index(rank) for ranks in across for rank in ranks),
        )


def group_ranks_by_node(ranks: Sequence[int], node_of: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the ranks of a group by node, ascending; pure.

    Args:
        ranks: global ranks.
        node_of: the node of every global rank.
    """
    by_node: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        by_node.setdefault(node_of[rank], []).append(rank)
    return [tuple(on_node) for on_node in by_node.values()]
