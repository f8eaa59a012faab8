"""Coded sums take turns: ranks launch rounds of two buffers in different orders, and sums stay apart."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from paceline.comm import CodedCollective, Handle, NativeCollective, Net
from paceline.comm.codecs.int8_int4_int2 import BlockIntCodec
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh, RankGroup
from paceline.testing import run_ranks

NUM_VALUES, NUM_BUFFERS, NUM_STEPS = 600, 5, 3


class Untagged(Net):
    """The twin: exchanges are told apart by their order alone."""

    def exchange_rows(self, x: Tensor, out: Tensor, group: RankGroup, tag: int = 0) -> Handle:
        return super().exchange_rows(x, out, group)


def values(rank: int, step: int, buffer: int) -> Tensor:
    drawn = torch.Generator().manual_seed(100 * rank + 10 * step + buffer)
    return torch.randn(NUM_VALUES, generator=drawn)


def sums(cluster: Cluster, kind: type[Net], at_once: bool) -> tuple[list[Tensor], list[str]]:
    """Sums of every buffer and step; the last rank waits for each one before it launches the next.

    The others launch all of a step `at_once`. Also the rounds that this rank launched, in their order.
    """
    net, order = kind(60.0), []
    path = CodedCollective(
        NativeCollective(net, Mesh.build(cluster, {"replica": cluster.world_size}).replica), BlockIntCodec(8)
    )
    real = NativeCollective.all_to_all

    def noting(self: NativeCollective, x: Tensor, key: str, out: Tensor, tag: int = 0) -> Handle:
        order.append(key)
        return real(self, x, key, out, tag)

    found = []
    with patch.object(NativeCollective, "all_to_all", noting):
        for step in range(NUM_STEPS):
            net.step = step
            handles = []
            for buffer in range(NUM_BUFFERS):
                handles.append(path.all_reduce(values(cluster.global_rank, step, buffer), str(buffer)))
                if not at_once or cluster.global_rank == cluster.world_size - 1:
                    handles[-1].wait()
            found += [handle.wait() for handle in handles]
            path.feedback.commit()
    path.close()
    return found, order


@pytest.mark.capability("G10")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_launch_rounds_in_different_orders_get_the_sums_of_those_that_do_not(size: int) -> None:
    one_by_one = run_ranks(sums, size, Net, False)
    by_turns = run_ranks(sums, size, Net, True)
    assert by_turns[0][1] != by_turns[-1][1] == one_by_one[0][1]  # and they did
    for (expected, _), (found, _) in zip(one_by_one, by_turns, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.timeout(240)
def test_the_twin_whose_messages_do_not_say_to_whom_they_belong_adds_up_others() -> None:
    (expected, _), _ = run_ranks(sums, 2, Net, False)
    (found, _), _ = run_ranks(sums, 2, Untagged, True)
    assert not all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
