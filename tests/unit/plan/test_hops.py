"""What routes of messages keep is found on a few ranks, of large buffers alone."""

from __future__ import annotations

import pytest
import torch

from paceline.comm.routes.grid import Grid
from paceline.comm.routes.hops import Hops
from paceline.comm.routes.recursive_doubling import RecursiveDoubling
from paceline.comm.routes.ring import Ring
from paceline.comm.routes.tree import Tree
from paceline.mesh import Group
from paceline.plan.hops import kept_bytes, some_ranks
from paceline.plan.paths import Buffer, Path


@pytest.mark.capability("L3")
@pytest.mark.parametrize("does", ["sum", "scatter", "gather"])
@pytest.mark.parametrize("hops", [Ring(), Tree(), RecursiveDoubling(), Grid()])
def test_some_ranks_keep_as_much_as_any(hops: Hops, does: str) -> None:
    for size in range(2, 20):
        buffers = [Buffer(size * n, torch.float32, ()) for n in (7, 1001, 90)]
        path = Path(Group("shard", tuple(range(size)), 0), does, buffers)
        all_of_them = [kept_bytes([hops], path, rank) for rank in range(size)]
        assert max(all_of_them[rank] for rank in some_ranks(size)) == max(all_of_them)
    assert len(some_ranks(1024)) == 12
