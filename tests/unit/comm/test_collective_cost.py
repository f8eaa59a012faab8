"""Closed forms: against a count of the messages of the textbook algorithms."""

import pytest

from paceline.comm import CollectiveCost, native_cost

OPS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
)


def ring_all_reduce(num_bytes: int, world: int) -> CollectiveCost:
    """Count the chunks of a ring: P-1 rounds of reduce-scatter, P-1 rounds of all-gather."""
    chunk = num_bytes // world
    sends = [chunk for _phase in ("reduce_scatter", "all_gather") for _round in range(world - 1)]
    return CollectiveCost(sum(sends), sum(sends), len(sends))


@pytest.mark.capability("G14")
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_all_reduce_costs_what_a_ring_sends(world: int) -> None:
    assert native_cost("all_reduce", 4 * 840, world) == ring_all_reduce(4 * 840, world)


@pytest.mark.capability("G14")
def test_two_ranks_move_the_payload_once_in_an_all_reduce() -> None:
    assert native_cost("all_reduce", 1000, 2) == CollectiveCost(1000.0, 1000.0, 2)


@pytest.mark.capability("G14")
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_the_other_closed_forms(world: int) -> None:
    n = 840
    assert native_cost("all_gather", n, world) == CollectiveCost((world - 1) * n, (world - 1) * n, world - 1)
    for op in ("all_to_all", "reduce_scatter"):
        assert native_cost(op, n, world).sent_bytes == pytest.approx(n - n / world)  # own part stays at home
    for op in ("scatter", "gather"):  # world - 1 parts cross the wire once: the average over all ranks
        assert native_cost(op, n, world).sent_bytes == pytest.approx((n - n / world) / world)
    assert native_cost("broadcast", n, world).received_bytes == pytest.approx(
        n - n / world
    )  # the source: nothing
    # Gloo: a reduce-scatter on a ring, then all parts but one go to the root
    assert native_cost("reduce", n, world).sent_bytes == pytest.approx(
        (n - n / world) + (n - n / world) / world
    )
    assert native_cost("barrier", n, world).sent_bytes == 0


@pytest.mark.parametrize("op", OPS)
def test_what_is_sent_is_received_and_one_rank_alone_moves_nothing(op: str) -> None:
    assert native_cost(op, 1 << 20, 1) == CollectiveCost(0.0, 0.0, 0)
    found = native_cost(op, 1 << 20, 5)
    assert found.sent_bytes == found.received_bytes
    assert found.rounds >= 1


def test_an_unknown_operation_is_not_free() -> None:
    with pytest.raises(KeyError, match="all_reduc"):
        native_cost("all_reduc", 8, 2)
