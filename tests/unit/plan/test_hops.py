"""What routes of messages keep is found on a few ranks, of large buffers alone."""

from __future__ import annotations

import pytest
import torch

from paceline.comm.routes.grid_route import GridRoute
from paceline.comm.routes.message_route import MessageRoute
from paceline.comm.routes.recursive_doubling import RecursiveDoublingRoute
from paceline.comm.routes.ring_route import RingRoute
from paceline.comm.routes.tree_route import TreeRoute
from paceline.job.mesh import RankGroup
from paceline.plan.not_planned_coding import Buffer, Path, kept_bytes, some_ranks


@pytest.mark.capability("L3")
@pytest.mark.parametrize("does", ["sum", "scatter", "gather"])
@pytest.mark.parametrize("hops", [RingRoute(), TreeRoute(), RecursiveDoublingRoute(), GridRoute()])
def test_some_ranks_keep_as_much_as_any(hops: MessageRoute, does: str) -> None:
    for size in range(2, 20):
        buffers = [Buffer(size * n, torch.float32, ()) for n in (7, 1001, 90)]
        path = Path(RankGroup("shard", tuple(range(size)), 0), does, buffers)
        all_of_them = [kept_bytes([hops], path, rank) for rank in range(size)]
        assert max(all_of_them[rank] for rank in some_ranks(size)) == max(all_of_them)
    assert len(some_ranks(1024)) == 12
