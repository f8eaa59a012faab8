"""Sums by every codec, in one group of ranks: equal everywhere, and nothing is lost for good."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm import Collective, NativeCollective, Net
from paceline.comm.codecs.low_rank import MatrixSpan
from paceline.comm.codecs.strategy_codec import build_codec, build_coded_collective
from paceline.comm.collectives import CodingCollective
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh, duplicate_group
from paceline.recipe import Strategy
from paceline.testing.rank_processes import run_ranks

WORLD, STEPS, N = 3, 6, 999
LOSSY = (
    "bf16",
    "fp16",
    "int8",
    "int4",
    "int2",
    "fixed:8",
    "sign",
    "topk:0.1",
    "topk:20",
    "randomk:0.1",
    "lowrank:2",
    "topk:0.1+int4",
    "int4+lossless",
)
OTHERS = ("int8:stochastic", "lossless")


def values(step: int, rank: int, n: int = N) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(100 * step + rank))


def for_every_codec(run: Callable[[CodingCollective, Net], Any]) -> list[dict[str, Any]]:
    """What `run` finds on every rank, by codec, each with a net of its own."""

    def ranks(cluster: Cluster) -> dict[str, Any]:
        group = duplicate_group(Mesh.build(cluster, {"replica": WORLD}).replica, "coded")
        found = {}
        for word in LOSSY + OTHERS:
            net = Net(60.0)
            path = build_coded_collective(NativeCollective(net, group), Strategy(codec=word), seed=5)
            found[word] = run(path, net)
            path.close()
        return found

    return run_ranks(ranks, WORLD)


def steps(
    path: CodingCollective,
    net: Net,
    reduce: Callable[[CodingCollective, Tensor], Tensor],
    *,
    aborts: bool = False,
) -> list[Tensor]:
    """What some steps sum."""
    found = []
    for step in range(STEPS):
        net.step = step
        x = values(step, path.group.rank)
        if aborts:  # a step that is not applied, with other values
            reduce(path, x * 3)
            path.abort()
        found.append(reduce(path, x))
        if path.feedback is not None:
            path.feedback.commit()
    return found


def all_reduced(path: Collective, x: Tensor) -> Tensor:
    found: Tensor = path.all_reduce(x.clone(), "0").wait()
    return found


def scattered(path: Collective, x: Tensor) -> Tensor:
    found: Tensor = path.reduce_scatter(x.view(WORLD, -1), "0").wait()
    return found.clone()  # the next sum is made in the same memory


@pytest.mark.capability("H5", "H8")
def test_what_is_sent_and_what_is_kept_is_all_that_there_was() -> None:
    """Over some steps sums and residuals of all ranks add up to the values."""

    def run(
        path: CodingCollective, net: Net
    ) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
        sums = steps(path, net, all_reduced)
        kept = (
            {}
            if path.feedback is None
            else {k: v.clone() for k, v in path.feedback.residuals("0", N).items()}
        )
        if path.feedback is not None:
            path.feedback.clear("0")
        rows = steps(path, net, scattered)
        again = {} if path.feedback is None else path.feedback.residuals("0", N)
        return sums, rows, kept, dict(again)

    ranks = for_every_codec(run)
    right = sum(values(step, rank).double() for step in range(STEPS) for rank in range(WORLD))
    for word in LOSSY:
        for k, which in enumerate((0, 1)):
            outs = [found[word][which] for found in ranks]
            total = sum(outs[0]) if which == 0 else torch.cat([sum(out) for out in outs])
            if which == 0:
                assert all(torch.equal(a, b) for out in outs for a, b in zip(out, outs[0], strict=True)), word
            losses = [v for found in ranks for side, v in found[word][2 + k].items() if side != "factor"]
            lost = sum(loss.double() for loss in losses)
            assert float((total.double() + lost - right).abs().max()) < 1e-4, word
            assert float(lost.abs().max()) > 1e-3, word


@pytest.mark.capability("H6")
def test_lossless_sums_are_those_of_the_ranks_in_order() -> None:
    def run(path: CodingCollective, net: Net) -> list[Tensor]:
        return steps(path, net, all_reduced)

    ranks = for_every_codec(run)
    for step in range(STEPS):
        total = values(step, 0).clone()
        for rank in range(1, WORLD):
            total += values(step, rank)
        assert all(torch.equal(found["lossless"][step], total) for found in ranks)
        off = (ranks[0]["int8:stochastic"][step] - total).abs().max()
        assert 0 < float(off) < 8 * float(total.abs().max()) / 127


@pytest.mark.capability("H5")
def test_an_aborted_step_leaves_no_trace_and_residuals_survive_a_move() -> None:
    def run(path: CodingCollective, net: Net) -> list[list[Tensor]]:
        return [steps(path, net, all_reduced, aborts=aborts) for aborts in _fresh(path, (False, True))]

    def _fresh(path: CodingCollective, kinds: tuple[bool, ...]) -> Any:
        for kind in kinds:
            if path.feedback is not None:
                path.feedback.clear("0")
            yield kind

    for found in for_every_codec(run):
        for word, (plain, disturbed) in found.items():
            assert all(torch.equal(a, b) for a, b in zip(plain, disturbed, strict=True)), word


@pytest.mark.capability("H5")
def test_residuals_survive_a_move_to_another_collective() -> None:
    def ranks(cluster: Cluster) -> list[str]:
        group, net = duplicate_group(Mesh.build(cluster, {"replica": WORLD}).replica, "coded"), Net(60.0)
        wrong = []
        for word in LOSSY:
            one, other = (
                build_coded_collective(NativeCollective(net, group), Strategy(codec=word), seed=5)
                for _ in range(2)
            )
            assert one.feedback is not None and other.feedback is not None
            for step in range(2):
                net.step = step
                all_reduced(one, values(step, group.rank))
                one.feedback.commit()
            other.feedback.set_residuals(
                "0", {k: v.clone() for k, v in one.feedback.residuals("0", N).items()}
            )
            a, b = (all_reduced(path, values(9, group.rank)) for path in (one, other))
            wrong += [] if torch.equal(a, b) else [word]
            for path in (one, other):
                path.close()
        return wrong

    assert run_ranks(ranks, WORLD) == [[]] * WORLD


@pytest.mark.capability("H2", "Z4")
def test_the_ledger_shows_the_bytes_of_the_closed_form() -> None:
    """2 (P-1) c for a coded part of c bytes, for an all_reduce; what is ragged stays below it."""

    def run(path: CodingCollective, net: Net) -> float:
        all_reduced(path, values(0, path.group.rank))
        return net.ledger.total().sent_bytes

    part = -(-N // WORLD)
    for found in for_every_codec(run):
        for word, sent in found.items():
            codec = build_codec(Strategy(codec=word))
            assert codec is not None
            most = 2 * (WORLD - 1) * codec.num_bytes(part)
            if codec.ragged:
                assert 0 < sent <= most + 2 * 8 * (WORLD - 1), word
            elif word != "lowrank:2":
                assert sent == pytest.approx(most), word


@pytest.mark.capability("H8")
def test_matrices_of_low_rank_are_found_exactly_and_vectors_are_summed_as_they_are() -> None:
    shape, bias = (30, 20), 7

    def ranks(cluster: Cluster) -> tuple[float, float, float]:
        group, net = duplicate_group(Mesh.build(cluster, {"replica": WORLD}).replica, "coded"), Net(60.0)
        path = build_coded_collective(NativeCollective(net, group), Strategy(codec="lowrank:2"), seed=5)
        assert path.feedback is not None
        path.feedback.describe("0", [MatrixSpan(bias, *shape)])
        g = torch.Generator().manual_seed(0)
        left, right = torch.randn(30, 2, generator=g), torch.randn(2, 20, generator=g)
        parts = [
            torch.cat([values(0, rank, bias), ((1 + rank) * left @ right).view(-1)]) for rank in range(WORLD)
        ]
        found = all_reduced(path, parts[group.rank])
        total = sum(parts)
        errors = (found - total).abs()
        path.close()
        return float(errors[:bias].max()), float(errors[bias:].max()), net.ledger.total().sent_bytes

    for vectors, matrix, sent in run_ranks(ranks, WORLD):
        assert vectors < 1e-5 and matrix < 1e-3
        assert sent == pytest.approx(2 * (WORLD - 1) / WORLD * 4 * (bias + 2 * 30 + 2 * 20))
