"""The mesh: which ranks work together, axis by axis.

Invariant: every rank has one coordinate on every axis, and all ranks derive the same mesh from the same
degrees. The mesh owns the process groups; nobody else creates one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import torch.distributed as dist

from paceline.errors import StrategyError

if TYPE_CHECKING:
    from paceline.cluster import Cluster

AXES = ("replica", "shard", "pipeline", "context", "tensor")
"""From the slowest changing rank to the fastest: tensor peers are neighbours, replicas are far apart."""


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
    """The groups of one rank, by axis, and the group of all."""

    world: Group
    axes: Mapping[str, Group]

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
        return cls(whole, {axis: _axis_group(axis, sizes, whole) for axis in AXES})


def axis_ranks(axis: str, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All groups along one axis, as global ranks; pure.

    Args:
        axis: one of `AXES`.
        sizes: the size of every axis, in the order of `AXES`.
    """
    place = AXES.index(axis)
    stride = prod(sizes[place + 1 :])
    block = stride * sizes[place]
    return [
        tuple(start + offset + i * stride for i in range(sizes[place]))
        for start in range(0, prod(sizes), block)
        for offset in range(stride)
    ]


def _axis_group(axis: str, sizes: tuple[int, ...], world: Group) -> Group:
    mine: Group | None = None
    for ranks in axis_ranks(axis, sizes):
        handle = _new_group(ranks, world)
        if world.rank in ranks:
            mine = Group(axis, ranks, ranks.index(world.rank), handle)
    if mine is None:
        raise AssertionError(f"rank {world.rank} has no coordinate on axis {axis}")
    return mine


def _new_group(ranks: tuple[int, ...], world: Group) -> dist.ProcessGroup | None:
    if len(ranks) == 1:
        return None
    if len(ranks) == world.size:
        return world.handle
    return dist.new_group(list(ranks))


def _default_group(world_size: int) -> dist.ProcessGroup | None:
    return dist.group.WORLD if world_size > 1 else None
