"""Coded sums in chunks and launched in different orders: sums, losses and bytes are those of the whole."""

from __future__ import annotations

from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from paceline.comm import Codec, CodedCollective, Handle, NativeCollective, Net
from paceline.comm.codecs.bf16_fp16 import Bf16Codec
from paceline.comm.codecs.int8_int4_int2 import BlockIntCodec
from paceline.comm.codecs.sign import SignCodec
from paceline.comm.collectives import coded_collective
from paceline.comm.collectives.error_feedback import ErrorFeedback
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh, RankGroup
from paceline.testing import run_ranks
from tests.marks import soak_param

CODECS: dict[str, Codec] = {
    "bf16": Bf16Codec(),
    "int8": BlockIntCodec(8),
    "int2": BlockIntCodec(2),
    "sign": SignCodec(),
}
STRETCH, STEPS = 3072, 4
LENGTHS = (5 * STRETCH + 1, 2 * STRETCH, 700)  # the last one is short, or a buffer is one stretch


class Found(NamedTuple):
    """Of all steps: sums, what is lost at the end, bytes sent, and the tags of exchanges in their order."""

    sums: list[Tensor]
    lost: list[Tensor]
    sent: int
    tags: list[int]


def summed(cluster: Cluster, word: str, values: int, scatters: bool) -> Found:
    """Sums of buffers, in stretches of so many values of all rows."""
    net, tags = Net(60.0), list[int]()
    path = CodedCollective(
        NativeCollective(net, Mesh.build(cluster, {"replica": cluster.world_size}).replica), CODECS[word]
    )
    real = NativeCollective.all_to_all

    def noting(self: NativeCollective, x: Tensor, key: str, out: Tensor, tag: int = 0) -> Handle:
        tags.append(tag)
        return real(self, x, key, out, tag)

    sums, lost = [], []
    with (
        patch.object(coded_collective, "_MIN_CHUNK_VALUES", values),
        patch.object(NativeCollective, "all_to_all", noting),
    ):
        for net.step in range(STEPS):
            for length in LENGTHS:
                drawn = torch.Generator().manual_seed(100 * cluster.global_rank + 10 * net.step + length)
                x = torch.randn(length, generator=drawn)
                size = cluster.world_size
                rows = x[: length // size * size].view(size, -1)
                key = f"{length}"
                handle = path.reduce_scatter(rows, key) if scatters else path.all_reduce(x, key)
                sums.append(handle.wait().clone())
            path.feedback.commit()
        for length in LENGTHS:
            lost += path.feedback.residuals(f"{length}", length // size * size).values()
    path.close()
    return Found(sums, [x.clone() for x in lost], net.ledger.total().sent_bytes, tags)


@pytest.mark.capability("H1", "G10")
@pytest.mark.parametrize("size", [soak_param(2), 3])
def test_in_stretches_there_are_the_bits_of_the_whole(size: int) -> None:
    cases = [(word, scatters) for word in CODECS for scatters in (False, True)]

    def whole_and_in_stretches(cluster: Cluster) -> list[tuple[Found, Found]]:
        return [(summed(cluster, w, 1 << 30, s), summed(cluster, w, STRETCH, s)) for w, s in cases]

    for rank in run_ranks(whole_and_in_stretches, size):
        for case, (one, other) in zip(cases, rank, strict=True):
            tags = {0, 2} if case[1] else {0, 1, 2, 3}
            assert len(one.tags) < len(other.tags) and {*other.tags} == tags, case
            assert one.sent == other.sent, case
            assert len(one.lost) == len(other.lost) >= len(LENGTHS), case
            pairs = zip(one.sums + one.lost, other.sums + other.lost, strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), case


@pytest.mark.capability("H1", "G10")
def test_the_twin_that_adds_what_another_stretch_has_lost_is_seen() -> None:
    def planted(cluster: Cluster) -> Found:
        real = ErrorFeedback.add

        def first(
            self: ErrorFeedback, x: Tensor, before: ErrorFeedback | None, momentum: float, some: slice
        ) -> Tensor:
            return real(self, x, before, momentum, slice(0, some.stop - some.start))

        with patch.object(ErrorFeedback, "add", first):
            return summed(cluster, "int2", STRETCH, False)

    right, wrong = run_ranks(summed, 2, "int2", STRETCH, False)[0], run_ranks(planted, 2)[0]
    assert not all(torch.equal(a, b) for a, b in zip(right.sums, wrong.sums, strict=True))


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
