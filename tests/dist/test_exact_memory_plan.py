"""What `plan_memory` says of a sharded state, but for numbers to the byte: see tests/allocations.py."""

from __future__ import annotations

import pytest

from paceline.testing import run_ranks
from tests.allocations import allocated, case, require_close, require_exact

EXACT = [
    case("replicas=1 shard=2 zero=1"),
    case("replicas=1 shard=2 zero=1", "chain"),
    case("replicas=1 shard=2 zero=2"),
    case("replicas=1 shard=2 zero=2", "chain"),
    case("replicas=1 shard=2 zero=3", "chain"),
    case("replicas=1 shard=2 zero=2", reproducible=True),
    case("replicas=1 shard=2 zero=1", "chain", reproducible=True),
    case("replicas=1 shard=2 zero=1 route=native", "chain", reproducible=True),
    case("replicas=1 shard=2 zero=1 route=native", "chain", shards=2),
    case("replicas=1 shard=2 zero=2 route=native"),
    case("replicas=1 shard=2 zero=2 route=native", "chain"),
    case("replicas=1 shard=2 zero=3 route=native", "chain"),
]
SIX = {"size": 24, "shards": 6}  # so that a rank has two nodes of the tree
IN_ORDER = [
    case("replicas=1 shard=2 zero=1 route=native", "chain", reproducible=True),
    case("replicas=1 shard=2 zero=1 route=native", "chain", reproducible=True, batch=SIX),
    case("replicas=1 shard=2 zero=2 route=native", reproducible=True, batch=SIX),
    case("replicas=2 route=native", "chain", reproducible=True, batch=SIX),
]
EXACT_OF_FOUR = [
    case("replicas=1 shard=4 zero=1"),
    case("replicas=2 shard=2 zero=1", "chain"),
    case("replicas=2 shard=2 zero=1 sync=local:1", "chain"),
    case("replicas=1 shard=4 zero=2", "chain"),
    case("replicas=1 shard=4 zero=3", "chain"),
]


@pytest.mark.capability("L3", "A11")
def test_every_byte_of_a_sharded_state_is_planned() -> None:
    """Buckets as wide as their widest row, slices, parts that are gathered, what is being handed on."""
    require_exact(EXACT, 2, run_ranks(allocated, 2, EXACT))


@pytest.mark.capability("L3", "A2")
def test_every_byte_of_sums_in_one_order_is_planned() -> None:
    """One node of the tree leaves from where it lies, several are laid together first."""
    require_exact(IN_ORDER[:1], 2, run_ranks(allocated, 2, IN_ORDER[:1]))
    require_close(IN_ORDER[1:], 2, run_ranks(allocated, 2, IN_ORDER[1:]))  # others have what one rank has


@pytest.mark.capability("L3", "A11")
def test_every_byte_of_a_state_of_four_ranks_is_planned() -> None:
    require_exact(EXACT_OF_FOUR, 4, run_ranks(allocated, 4, EXACT_OF_FOUR))


@pytest.mark.capability("L3", "L4")
def test_scatters_once_a_step_are_planned_whatever_carries_them() -> None:
    """After an update of four ranks the most is what Gloo takes for itself, of which one row is not seen."""
    require_close(ONCE_OF_FOUR, 4, run_ranks(allocated, 4, ONCE_OF_FOUR))


ONCE_OF_FOUR = [case("replicas=1 shard=4 zero=1 route=native", "chain")]


SCATTERED = [
    case("replicas=1 shard=2 zero=2 pipeline=2 route=native", "chain"),
    case("replicas=1 shard=2 zero=2 context=2 route=native", "ring", shards=2),
]


@pytest.mark.capability("L3", "L4")
def test_parameters_come_through_the_memory_of_scatters_beside_other_cuts_too() -> None:
    require_close(SCATTERED, 4, run_ranks(allocated, 4, SCATTERED))
