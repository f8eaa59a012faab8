"""What each collective waits for by each route: rounds that follow each other, and bytes that do. Pure.

Closed forms, written without the hops; a test runs the hops on clocks that count rounds and bytes, and they
must agree (tests/unit/comm/test_longest_way.py). A link carries one message each way at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from paceline.comm.cost import Cost, cost, hierarchical_cost
from paceline.comm.routes.grid import columns_of
from paceline.comm.routes.recursive_doubling import core_of

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
Way = Callable[[int, int, int], Cost]
"""Of the bytes that a rank passes in, the number of ranks, and those of each host."""


def longest_way(
    route: str, num_bytes: int, world: int, ranks_per_host: int = 1, op: str = "all_reduce"
) -> Cost:
    """What a collective waits for, one after another.

    Args:
        num_bytes: what each rank passes in: [n] of an all_reduce, an all_gather and a broadcast, [P, n] of a
            reduce_scatter.
    Sources: those of the routes. Of the hierarchical route it is what a host's link carries.
    """
    if world == 1:
        return Cost(0.0, 0.0, 0)
    return _WAYS[op][route](num_bytes, world, ranks_per_host)


def _moved(num_bytes: float, rounds: int) -> Cost:
    return Cost(float(num_bytes), float(num_bytes), rounds)


def _depth(world: int) -> int:
    """Rounds in which one rank reaches all."""
    return (world - 1).bit_length()


# -- all_reduce -----------------------------------------------------------------------------------------


def _ring(num_bytes: int, world: int, _: int) -> Cost:
    return cost("all_reduce", num_bytes, world)


def _tree(num_bytes: int, world: int, _: int) -> Cost:
    return _moved(2 * _depth(world) * num_bytes, 2 * _depth(world))


def _doubling(num_bytes: int, world: int, _: int) -> Cost:
    rounds = _doubling_rounds(world)
    return _moved(rounds * num_bytes, rounds)


def _grid(num_bytes: int, world: int, _: int) -> Cost:
    width = columns_of(world)
    height = world // width
    moved = 2 * (width - 1) / width * num_bytes + 2 * (height - 1) / height * num_bytes / width
    return _moved(moved, 2 * (width - 1) + 2 * (height - 1))


def _hierarchical(num_bytes: int, world: int, here: int) -> Cost:
    between = hierarchical_cost(num_bytes, world // here, here)[1]
    return Cost(here * between.sent_bytes, here * between.received_bytes, between.rounds)


# -- reduce_scatter: `num_bytes` of P rows ----------------------------------------------------------------


def _scatter_at_once(num_bytes: int, world: int, _: int) -> Cost:
    return cost("reduce_scatter", num_bytes, world)


def _scatter_by_ring(num_bytes: int, world: int, _: int) -> Cost:
    return _moved((world - 1) / world * num_bytes, world - 1)


def _scatter_by_doubling(num_bytes: int, world: int, _: int) -> Cost:
    extra = world - core_of(world)
    rows = _doubled_rows(world) + (world + 1 if extra else 0)
    return _moved(rows / world * num_bytes, _doubling_rounds(world))


def _scatter_by_grid(num_bytes: int, world: int, _: int) -> Cost:
    return _rows_of_grid(num_bytes / world, world)


def _scatter_by_hosts(num_bytes: int, world: int, here: int) -> Cost:
    nodes = world // here
    return _moved((nodes - 1) / nodes * num_bytes, 1)


# -- all_gather: `num_bytes` of one row -------------------------------------------------------------------


def _gather_by_ring(num_bytes: int, world: int, _: int) -> Cost:
    return _moved((world - 1) * num_bytes, world - 1)


def _gather_by_tree(num_bytes: int, world: int, _: int) -> Cost:
    depth = _depth(world)
    return _moved((world - 1 + depth * world) * num_bytes, 2 * depth)


def _gather_by_doubling(num_bytes: int, world: int, _: int) -> Cost:
    extra = world - core_of(world)
    rows = _doubled_rows(world) + (world + 1 if extra else 0)
    return _moved(rows * num_bytes, _doubling_rounds(world))


def _gather_by_grid(num_bytes: int, world: int, _: int) -> Cost:
    return _rows_of_grid(num_bytes, world)


def _gather_by_hosts(num_bytes: int, world: int, here: int) -> Cost:
    nodes = world // here
    return _moved((nodes - 1) * here * num_bytes, nodes - 1)


# -- broadcast, from rank 0 -------------------------------------------------------------------------------


def _cast_by_tree(num_bytes: int, world: int, _: int) -> Cost:
    return _moved(_depth(world) * num_bytes, _depth(world))


def _cast_by_ring(num_bytes: int, world: int, _: int) -> Cost:
    return _moved((world - 1) * num_bytes, world - 1)


def _cast_by_grid(num_bytes: int, world: int, _: int) -> Cost:
    width = columns_of(world)
    rounds = width - 1 + world // width - 1
    return _moved(rounds * num_bytes, rounds)


def _doubling_rounds(world: int) -> int:
    core = core_of(world)
    return core.bit_length() - 1 + (2 if core < world else 0)


def _doubled_rows(world: int) -> int:
    """Rows that the core of a doubling exchanges, with those of the ranks outside."""
    core = core_of(world)
    bits = [1 << k for k in range(core.bit_length() - 1)]
    return sum(bit + min(bit, world - core) for bit in bits)


def _rows_of_grid(row_bytes: float, world: int) -> Cost:
    width = columns_of(world)
    height = world // width
    return _moved(((width - 1) * height + height - 1) * row_bytes, width - 1 + height - 1)


_WAYS: Mapping[str, Mapping[str, Way]] = {
    "all_reduce": {
        "native": _ring,
        "ring": _ring,
        "tree": _tree,
        "recursive-doubling": _doubling,
        "grid": _grid,
        "hierarchical": _hierarchical,
    },
    "reduce_scatter": {
        "native": _scatter_at_once,
        "ring": _scatter_by_ring,
        "tree": _tree,
        "recursive-doubling": _scatter_by_doubling,
        "grid": _scatter_by_grid,
        "hierarchical": _scatter_by_hosts,
    },
    "all_gather": {
        "native": _gather_by_ring,
        "ring": _gather_by_ring,
        "tree": _gather_by_tree,
        "recursive-doubling": _gather_by_doubling,
        "grid": _gather_by_grid,
        "hierarchical": _gather_by_hosts,
    },
    "broadcast": {
        "native": _cast_by_tree,
        "ring": _cast_by_ring,
        "tree": _cast_by_tree,
        "recursive-doubling": _cast_by_tree,
        "grid": _cast_by_grid,
        "hierarchical": _cast_by_tree,
    },
}
