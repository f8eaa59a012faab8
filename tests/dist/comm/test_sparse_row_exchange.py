"""Rows between ranks: a rank says what it receives before it sends, however late it is."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch

from paceline.comm import Net
from paceline.comm.net import start_row_exchange
from paceline.errors import DeadlineError
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh
from paceline.testing import run_ranks


class Noting:
    """A process group; the calls that it gets are noted.

    Args:
        group: the real one.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.calls: list[tuple[str, int]] = []

    def send(self, tensors: list[Any], to: int, tag: int) -> Any:
        """Note it, and send."""
        self.calls.append(("send", to))
        return self._group.send(tensors, to, tag)

    def recv(self, tensors: list[Any], source: int, tag: int) -> Any:
        """Note it, and receive."""
        self.calls.append(("receive", source))
        return self._group.recv(tensors, source, tag)


def talk(cluster: Cluster) -> tuple[list[str], list[tuple[int, int]], list[torch.Tensor], str]:
    """Two exchanges under way at a time, one after another; then one that the last rank never joins."""
    group, net = Mesh.build(cluster, {"replica": cluster.world_size}).replica, Net(60.0)
    noting = Noting(group.handle)
    x = torch.arange(12.0).view(cluster.world_size, -1) + 100 * cluster.global_rank
    outs = [torch.empty_like(x) for _ in range(2)]
    works = [start_row_exchange(noting, group.rank, x + number, out) for number, out in enumerate(outs)]
    for work in works:
        work.wait(timedelta(seconds=60))
    start_row_exchange(noting, group.rank, x[:, :0], outs[0][:, :0]).wait(timedelta(seconds=60))
    net.barrier(group)
    said = ""
    if group.rank != group.size - 1:
        with pytest.raises(DeadlineError) as late:
            net.exchange_rows(x, outs[0].clone(), replace(group)).wait(0.2)
        said = late.value.what
    return [name for name, _ in noting.calls], [*zip(*noting.calls, strict=True)][1], outs, said


@pytest.mark.capability("G4")
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_says_what_it_receives_before_it_sends(size: int) -> None:
    for rank, (names, peers, outs, said) in enumerate(run_ranks(talk, size)):
        once = ["receive"] * (size - 1) + ["send"] * (size - 1)
        assert names == once * 2  # an empty row is not sent
        assert {*peers} == {*range(size)} - {rank}
        for number, out in enumerate(outs):
            rows = [torch.arange(12.0).view(size, -1)[rank] + 100 * other + number for other in range(size)]
            assert torch.equal(out, torch.stack(rows))
        assert said == "" if rank == size - 1 else "all_to_all did not finish within 0.2 s" in said
