"""What `plan_memory` says of servers and workers that code what they send, or add it in a fixed order.

Runs have rounds of two steps, so that tickets travel both in full and coded. Planned are each server and the
first worker; others have as much, or less where their parts of a step are fewer nodes of the tree.
"""

from __future__ import annotations

from typing import Any

import pytest

from paceline.testing import run_ranks
from tests.allocations import Case, allocated, case, require_close

ROUNDS_OF_TWO = 40


def served(words: str, task: str = "gpt", **more: Any) -> Case:
    return case(f"replicas={words}", task, **({"steps": ROUNDS_OF_TWO} | more))


FEW = [
    served("1 servers=1 sync=server codec=int8", "chain", shards=2),
    served("1 servers=1 sync=server codec=lossless", shards=2),
    served("1 servers=1 sync=server", "chain", shards=3, reproducible=True),
]
TWO = [
    *FEW,
    served("1 servers=1 sync=server codec=int8"),
    served("1 servers=1 sync=server codec=topk:0.01", "chain", shards=2),
    served("1 servers=1 sync=server codec=lossless", "chain", shards=2),
    served("1 servers=1 sync=server codec=lowrank:2"),
    served("1 servers=1 sync=server codec=bf16", optimizer="sgd"),
    served("1 servers=1 sync=server codec=topk:0.01+int4", "chain", shards=2),
    served("1 servers=1 sync=server-async codec=int8:stochastic", "chain", shards=2),
    served("1 servers=1 sync=server", reproducible=True),
    served("1 servers=1 sync=bounded:0", "chain", reproducible=True),
]
FOUR = [
    served("2 servers=2 sync=server codec=int8"),
    served("2 servers=2 sync=server codec=topk:0.01", "chain", shards=2),
    served("1 servers=3 sync=server codec=int8", "chain", shards=2),
    served("3 servers=1 sync=server codec=lossless", shards=3),
    served("3 servers=1 sync=backup:1 codec=int8", "chain", shards=3),
    served("3 servers=1 sync=bounded:0 codec=sign", "chain", shards=3),
    served("3 servers=1 sync=bounded:1 codec=int8+lossless", "chain", shards=3),
    served("3 servers=1 sync=server-async codec=lowrank:2", shards=3),
    served("3 servers=1 sync=server", "chain", shards=6, reproducible=True),
    served("3 servers=1 sync=bounded:0", shards=7, reproducible=True),
]
PLAIN = [
    served("2 servers=2 sync=server", "chain", shards=2),
    served("3 servers=1 sync=server", shards=3),
    served("3 servers=1 sync=backup:1", "chain", shards=3),
    served("3 servers=1 sync=bounded:0", shards=3),
    served("3 servers=1 sync=bounded:1", "chain", shards=3),
    served("3 servers=1 sync=server-async", "chain", shards=3),
]


@pytest.mark.capability("L3", "L4")
def test_servers_that_code_and_their_workers_allocate_what_was_planned() -> None:
    require_close(FEW, 2, run_ranks(allocated, 2, FEW))


@pytest.mark.soak
@pytest.mark.capability("L3", "L4")
def test_every_codec_of_a_server_allocates_what_was_planned() -> None:
    require_close(TWO, 2, run_ranks(allocated, 2, TWO))


@pytest.mark.soak
@pytest.mark.capability("L3", "L4")
def test_several_servers_and_workers_allocate_what_was_planned() -> None:
    require_close(FOUR, 4, run_ranks(allocated, 4, FOUR))
    require_close(PLAIN, 4, run_ranks(allocated, 4, PLAIN))
