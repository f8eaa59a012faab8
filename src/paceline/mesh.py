"""The mesh: which ranks work together, axis by axis.

Invariant: every rank has one coordinate on every axis, and all ranks derive the same mesh from the same
degrees. The mesh owns the process groups; nobody else creates one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import TYPE_CHECKING

import torch.distributed as dist

from paceline.errors import StrategyError

if TYPE_CHECKING:
    from paceline.cluster import Cluster

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
        handle: the process group; None if the group has one rank and no wire.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    handle: dist.ProcessGroup | None = field(default=None, compare=False)

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Mesh:
    """The groups of one rank.

    Args:
        world: all ranks.
        axes: by axis.
        data: ranks that share the samples of a step, each running units of its own: replica x shard.
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

    @classmethod
    def build(cls, cluster: Cluster, degrees: Mapping[str, int]) -> Mesh:
        """Create the groups of every axis; collective: all ranks call with equal degrees.

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
        world = tuple(range(cluster.world_size))
        rank = cluster.global_rank
        whole = Group("world", world, rank, _default_group(cluster.world_size))
        axes = {axis: _span(axis, (axis,), sizes, whole, ()) for axis in AXES}
        known = tuple(axes.values())
        data = _span("data", DATA_AXES, sizes, whole, known)
        return cls(whole, axes, data, _span("inside", AXES[1:], sizes, whole, known))


def span_ranks(axes: Sequence[str], sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All groups that span some axes, as global ranks in ascending order; pure.

    Args:
        axes: some of `AXES`.
        sizes: the size of every axis, in the order of `AXES`.
    """
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(product(*(range(n) for n in sizes))):
        outside = tuple(c for axis, c in zip(AXES, place, strict=True) if axis not in axes)
        found.setdefault(outside, []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def _span(
    name: str, axes: Sequence[str], sizes: tuple[int, ...], world: Group, known: Sequence[Group]
) -> Group:
    """This rank's group along some axes; a process group that exists for the same ranks is used again."""
    groups = span_ranks(axes, sizes)
    mine = next(ranks for ranks in groups if world.rank in ranks)
    same = next((g for g in known if g.ranks == mine), None)
    if same is not None:
        return Group(name, mine, same.rank, same.handle)
    handles = {ranks: _new_group(ranks, world) for ranks in groups}
    return Group(name, mine, mine.index(world.rank), handles[mine])


def _new_group(ranks: tuple[int, ...], world: Group) -> dist.ProcessGroup | None:
    if len(ranks) == 1:
        return None
    if len(ranks) == world.size:
        return world.handle
    return dist.new_group(list(ranks))


def _default_group(world_size: int) -> dist.ProcessGroup | None:
    return dist.group.WORLD if world_size > 1 else None
