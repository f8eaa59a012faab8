"""What a collective costs by its closed form: bytes through this rank and rounds. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Bytes sent and received by one rank, averaged over the group, and the number of rounds."""

    sent_bytes: float
    received_bytes: float
    rounds: int


def _ring_all_reduce(num_bytes: int, world: int) -> Cost:
    moved = 2 * (world - 1) / world * num_bytes
    return Cost(moved, moved, 2 * (world - 1))


def _everyone_gets_all(num_bytes: int, world: int) -> Cost:
    return Cost((world - 1) * num_bytes, (world - 1) * num_bytes, world - 1)


def _one_part_each(num_bytes: int, world: int) -> Cost:
    moved = (world - 1) / world * num_bytes
    return Cost(moved, moved, 1)


def _one_root(num_bytes: int, world: int) -> Cost:
    """All parts but the root's own cross one wire: (P-1)/P n in all, 1/P of that on average."""
    moved = (world - 1) / world * num_bytes / world
    return Cost(moved, moved, 1)


def _ring_reduce(num_bytes: int, world: int) -> Cost:
    """Gloo: a reduce_scatter on a ring, then all parts but one go to the root."""
    moved = (world - 1) / world * num_bytes * (1 + 1 / world)
    return Cost(moved, moved, world)


def _as_it_is(num_bytes: int, world: int) -> Cost:
    return Cost(float(num_bytes), 0.0, 1)


def _nothing(num_bytes: int, world: int) -> Cost:
    return Cost(0.0, 0.0, 1)


_CLOSED_FORMS: dict[str, Callable[[int, int], Cost]] = {
    "all_reduce": _ring_all_reduce,
    "all_gather": _everyone_gets_all,
    "reduce_scatter": _one_part_each,
    "all_to_all": _one_part_each,
    "broadcast": _one_part_each,
    "reduce": _ring_reduce,
    "gather": _one_root,
    "scatter": _one_root,
    "barrier": _nothing,
    "send": _as_it_is,
    "exchange": _as_it_is,
}


def cost(op: str, num_bytes: int, world: int) -> Cost:
    """The closed form of one collective on the native route.

    Args:
        op: name of the collective.
        num_bytes: payload: the tensor that each rank passes in; for broadcast, scatter and gather the whole.
        world: number of ranks in the group.
    Source: Thakur, Rabenseifner, Gropp 2005, Optimization of Collective Communication Operations in
        MPICH, section 4 (ring algorithms).
    """
    if world == 1:
        return Cost(0.0, 0.0, 0)
    return _CLOSED_FORMS[op](num_bytes, world)


def hierarchical_cost(num_bytes: int, num_nodes: int, ranks_per_node: int) -> tuple[Cost, Cost]:
    """The closed form of an all_reduce on the hierarchical route: inside the node, and between nodes.

    Between nodes a rank sends 2 (N-1)/N n/L bytes, so a node sends 2 (N-1)/N n. On the native ring the one
    rank whose neighbour is on another node sends 2 (P-1)/P n there.

    Args:
        num_bytes: of the buffer, filled up to a multiple of `ranks_per_node` values.
        num_nodes, ranks_per_node: N and L; the group has N L ranks.
    """
    part = num_bytes // ranks_per_node
    scatter, gather = (
        cost("reduce_scatter", num_bytes, ranks_per_node),
        cost("all_gather", part, ranks_per_node),
    )
    moved = scatter.sent_bytes + gather.sent_bytes
    return Cost(moved, moved, scatter.rounds + gather.rounds), cost("all_reduce", part, num_nodes)
