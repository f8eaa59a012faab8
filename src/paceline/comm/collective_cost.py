"""Closed forms of the cost of collectives: bytes sent and received by a rank, and rounds. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class CollectiveCost:
    """Bytes sent and received by one rank, averaged over the group, and the number of rounds."""

    sent_bytes: float
    received_bytes: float
    rounds: int


def _ring_all_reduce(num_bytes: int, world: int) -> CollectiveCost:
    num_moved_bytes = 2 * (world - 1) / world * num_bytes
    return CollectiveCost(num_moved_bytes, num_moved_bytes, 2 * (world - 1))


def _all_gather(num_bytes: int, world: int) -> CollectiveCost:
    return CollectiveCost((world - 1) * num_bytes, (world - 1) * num_bytes, world - 1)


def _pairwise_exchange(num_bytes: int, world: int) -> CollectiveCost:
    num_moved_bytes = (world - 1) / world * num_bytes
    return CollectiveCost(num_moved_bytes, num_moved_bytes, 1)


def _rooted(num_bytes: int, world: int) -> CollectiveCost:
    """Return the average cost of a rank: (P-1)/P n bytes cross one wire in all, and each of P ranks has 1/P
    of them.
    """
    num_moved_bytes = (world - 1) / world * num_bytes / world
    return CollectiveCost(num_moved_bytes, num_moved_bytes, 1)


def _ring_reduce(num_bytes: int, world: int) -> CollectiveCost:
    """Return the cost of Gloo's reduce: a reduce_scatter on a ring, then all parts but one are sent to the
    root.
    """
    num_moved_bytes = (world - 1) / world * num_bytes * (1 + 1 / world)
    return CollectiveCost(num_moved_bytes, num_moved_bytes, world)


def _point_to_point(num_bytes: int, world: int) -> CollectiveCost:
    return CollectiveCost(float(num_bytes), 0.0, 1)


def _barrier(num_bytes: int, world: int) -> CollectiveCost:
    return CollectiveCost(0.0, 0.0, 1)


# Rows are operations as the ledger names them; "exchange" is an all-to-all with parts of different sizes.
_CLOSED_FORMS: dict[str, Callable[[int, int], CollectiveCost]] = {
    "all_reduce": _ring_all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _pairwise_exchange,
    "all_to_all": _pairwise_exchange,
    "broadcast": _pairwise_exchange,
    "reduce": _ring_reduce,
    "gather": _rooted,
    "scatter": _rooted,
    "barrier": _barrier,
    "send": _point_to_point,
    "exchange": _point_to_point,
}


def native_cost(op: str, num_bytes: int, world: int) -> CollectiveCost:
    """Return the closed form of one collective on the native route.

    Args:
        op: name of the collective.
        num_bytes: payload: the tensor that each rank passes in; for broadcast, scatter and gather the whole.
        world: number of ranks in the group.
    Source: Thakur, Rabenseifner, Gropp 2005, Optimization of Collective Communication Operations in
        MPICH, section 4 (ring algorithms).
    """
    # A group of one rank communicates nothing, whatever the closed form says for P = 1.
    if world == 1:
        return CollectiveCost(0.0, 0.0, 0)
    return _CLOSED_FORMS[op](num_bytes, world)


def hierarchical_cost(
    num_bytes: int, num_nodes: int, ranks_per_node: int
) -> tuple[CollectiveCost, CollectiveCost]:
    """Return the closed form of an all_reduce on the hierarchical route: inside a node, and between nodes.

    Between nodes a rank sends 2 (N-1)/N n/L bytes, so a node sends 2 (N-1)/N n. On the native ring the one
    rank whose neighbour is on another node sends 2 (P-1)/P n there.

    Args:
        num_bytes: size of the buffer, padded to a multiple of `ranks_per_node` values.
        num_nodes, ranks_per_node: N and L; the group has N L ranks.
    """
    slice_bytes = num_bytes // ranks_per_node
    scatter, gather = (
        native_cost("reduce_scatter", num_bytes, ranks_per_node),
        native_cost("all_gather", slice_bytes, ranks_per_node),
    )
    num_moved_bytes = scatter.sent_bytes + gather.sent_bytes
    return CollectiveCost(num_moved_bytes, num_moved_bytes, scatter.rounds + gather.rounds), native_cost(
        "all_reduce", slice_bytes, num_nodes
    )
