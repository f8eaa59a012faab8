"""The contract of gradient reductions: sums, norms, aborts and residuals of error feedback."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from paceline.comm.collectives.collective_protocol import Collective
from paceline.comm.net import Net
from paceline.comm.reduction.bucket_buffers import PartsBySlot
from paceline.comm.reduction.bucket_reducer import BucketReducer, UnorderedSum
from paceline.comm.reduction.gradient_norm import SharedNorm
from paceline.comm.reduction.gradients import GradientReduction, Gradients
from paceline.errors import CommunicationError
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh, RankGroup
from paceline.parallel.placement import ModelPlacement, ShardTransform
from paceline.state.slot import TensorSlot
from paceline.testing.rank_processes import run_ranks

_SHAPES = ((5, 3), (7,), (2, 2, 2), (), (11, 4))


class ReducerContract(ABC):
    """Tests of a reduction, which turns gradients of this rank into sums over ranks.

    Attributes:
        degrees: degrees of the mesh.
        relative_error: error of a sum of integers.
    """

    degrees: ClassVar[Mapping[str, int]] = {"replica": 2}
    relative_error: float = 0.0

    @abstractmethod
    def collective(self, net: Net, group: RankGroup) -> Collective:
        """Return a new collective of the shard group or of the replicas."""

    def reduction(self, mesh: Mesh, net: Net) -> GradientReduction:
        """Return a new reduction."""
        shard = mesh.axes["shard"]
        placement = ModelPlacement(tuple(_tensors()))
        if shard.size > 1:
            placement = placement.cut(ShardTransform(shard.size, {}))
        held = placement.at({"shard": shard.rank})
        parts = {tensor_placement.computes: tensor_placement.parts for tensor_placement in held.values()}
        return self.reducer(_tensors(), parts, mesh, net)

    def reducer(
        self, tensors: Mapping[TensorSlot, Tensor], parts: PartsBySlot, mesh: Mesh, net: Net
    ) -> GradientReduction:
        """Return a reduction of tensors of which every rank gets parts."""
        shard, replica = self.collective(net, mesh.axes["shard"]), self.collective(net, mesh.replica)
        return BucketReducer(tensors, parts, UnorderedSum(shard, replica), 64)

    def num_ranks(self) -> int:
        """Return the number of ranks of the mesh."""
        return int(torch.tensor(list(self.degrees.values())).prod())

    def start(self, cluster: Cluster) -> GradientReduction:
        """Return a new reduction over the mesh."""
        return self.reduction(Mesh.build(cluster, self.degrees), Net(30.0))

    def test_the_parts_of_all_ranks_are_the_sums(self) -> None:
        """Every value of every sum is on at least one rank, in rows of the parameter, and correct."""

        def run(cluster: Cluster) -> list[Tensor | None]:
            return _copy_sums(_reduce_once(self.start(cluster), cluster.global_rank))

        ranks = run_ranks(run, self.num_ranks())
        for i, shape in enumerate(_SHAPES):
            right = torch.stack([_grad(i, rank) for rank in range(len(ranks))]).sum(0)
            parts = [sums[i] for sums in ranks if sums[i] is not None]
            assert sum(part.numel() for part in parts) >= right.numel()
            bound = 2 * self.relative_error * float(right.abs().max() + 100 * len(ranks))
            for part in parts:
                assert part.shape[1:] == torch.Size(shape[1:])
                assert _is_some_rows(part, right, bound)

    def test_the_norms_are_those_of_the_whole_sum(self) -> None:
        def run(cluster: Cluster) -> float:
            mesh, net = Mesh.build(cluster, self.degrees), Net(30.0)
            grads = _reduce_once(self.reduction(mesh, net), cluster.global_rank)
            return SharedNorm(mesh.inside, net)(grads)

        num_ranks = self.num_ranks()
        sums = [torch.stack([_grad(i, r) for r in range(num_ranks)]).sum(0) for i in range(len(_SHAPES))]
        right = float(torch.cat([s.reshape(-1) for s in sums]).norm())
        tolerance = 1e-5 + 4 * self.relative_error
        assert all(abs(norm - right) <= tolerance * right for norm in run_ranks(run, num_ranks))

    def test_a_parameter_without_a_gradient_counts_as_zero(self) -> None:
        def run(cluster: Cluster) -> list[Tensor | None]:
            reducer, rank = self.start(cluster), cluster.global_rank
            _reduce_once(reducer, rank)  # leaves values in the buffers
            reducer.begin()
            for i in reversed(range(len(_SHAPES))):
                reducer.ready(_SLOTS[i], _grad(i, rank) if rank == 0 else None)
            reducer.close()
            return _copy_sums(reducer.finish())

        for sums in run_ranks(run, self.num_ranks()):
            for i in range(len(_SHAPES)):
                part = sums[i]
                if part is not None:
                    right = _grad(i, 0)
                    assert _is_some_rows(part, right, 800 * self.relative_error)

    def test_a_missing_announcement_is_an_error_that_names_it(self) -> None:
        def run(cluster: Cluster) -> str:
            reducer = self.start(cluster)
            reducer.begin()
            for i in reversed(range(1, len(_SHAPES))):
                reducer.ready(_SLOTS[i], _grad(i, cluster.global_rank))
            try:
                reducer.close()
            except CommunicationError as error:
                reducer.abort()
                return str(error)
            return ""

        assert all("['0']" in text for text in run_ranks(run, self.num_ranks()))

    def test_an_aborted_step_changes_nothing(self) -> None:
        def run(cluster: Cluster, aborts: bool) -> list[Tensor | None]:
            reducer, rank = self.start(cluster), cluster.global_rank
            _reduce_once(reducer, rank)
            if aborts:
                reducer.begin()
                for i in reversed(range(2, len(_SHAPES))):
                    reducer.ready(_SLOTS[i], _grad(i, rank + 5))
                reducer.abort()
            return _copy_sums(_reduce_once(reducer, rank))

        plain, disturbed = (run_ranks(run, self.num_ranks(), aborts) for aborts in (False, True))
        for a, b in zip(plain, disturbed, strict=True):
            assert _same_bits(a, b)

    def test_residuals_survive_being_taken_out_and_put_back(self) -> None:
        def run(cluster: Cluster, moves: bool) -> list[Tensor | None]:
            reducer, rank = self.start(cluster), cluster.global_rank
            _reduce_once(reducer, rank)
            if moves:
                residuals = {(side, slot.name): value.clone() for side, slot, value in reducer.residuals()}
                reducer = self.start(cluster)
                reducer.set_residuals(residuals)
            return _copy_sums(_reduce_once(reducer, rank))

        plain, restored = (run_ranks(run, self.num_ranks(), moves) for moves in (False, True))
        assert all(map(_same_bits, plain, restored))

    def test_taking_out_what_was_lost_changes_no_sum(self) -> None:
        """Whoever reads a gradient after a save reads what was applied; and putting it back changes none."""

        def run(cluster: Cluster) -> list[bool]:
            reducer = self.start(cluster)
            _reduce_once(reducer, cluster.global_rank)
            grads = _reduce_once(reducer, cluster.global_rank)
            before, flats = _copy_sums(grads), [flat.clone() for flat in grads.flats]
            residuals = {(side, slot.name): value.clone() for side, slot, value in reducer.residuals()}
            same = [_same_bits(before, _copy_sums(grads)), _same_bits(flats, grads.flats)]
            reducer.set_residuals(residuals)
            return [*same, _same_bits(before, _copy_sums(grads)), _same_bits(flats, grads.flats)]

        assert all(all(same) for same in run_ranks(run, self.num_ranks()))

    def test_residuals_follow_what_gradients_are_multiples_of(self) -> None:
        """A power of two changes no digit: all is four times as much."""

        def run(cluster: Cluster, factor: float) -> list[Tensor | None]:
            reducer, rank = self.start(cluster), cluster.global_rank
            _reduce_once(reducer, rank)
            reducer.rescale(factor)
            return [
                None if x is None else x / factor for x in _copy_sums(_reduce_once(reducer, rank, factor))
            ]

        plain, rescaled = (run_ranks(run, self.num_ranks(), factor) for factor in (1.0, 4.0))
        assert all(map(_same_bits, plain, rescaled))

    def test_what_coding_had_lost_of_a_tensor_that_nobody_uses_is_lost_still(self) -> None:
        """Its sum is dropped, so nothing of it has been sent; and the norm is that of the others."""

        def run(cluster: Cluster) -> tuple[bool, float, float]:
            mesh, net = Mesh.build(cluster, self.degrees), Net(30.0)
            reducer, rank = self.reduction(mesh, net), cluster.global_rank
            _reduce_once(reducer, rank)
            before = _residuals_of(reducer, _UNUSED)
            reducer.begin()
            for i in reversed(range(len(_SHAPES))):
                reducer.ready(_SLOTS[i], _grad(i, rank) if i != _UNUSED else None)
            reducer.close()
            used = {slot.name for slot in _SLOTS} - {str(_UNUSED)}
            grads, norm = reducer.finish().agreed(used, 1.0), SharedNorm(mesh.inside, net)
            of_used = replace(grads, norms=[g.norm() for g in grads.tensors.values() if g is not None])
            norms = norm(grads), norm(of_used)
            reducer.commit(used)
            after = _residuals_of(reducer, _UNUSED)
            unchanged = all(torch.equal(value, after[side]) for side, value in before.items())
            return unchanged and before.keys() == after.keys(), *norms

        for unchanged, norm, right in run_ranks(run, self.num_ranks()):
            assert unchanged and abs(norm - right) <= 1e-5 * right


_SLOTS = tuple(TensorSlot.whole(str(i), torch.zeros(shape)) for i, shape in enumerate(_SHAPES))


def _tensors() -> dict[TensorSlot, Tensor]:
    return {slot: torch.zeros(slot.shape) for slot in _SLOTS}


def _grad(index: int, rank: int) -> Tensor:
    g = torch.Generator().manual_seed(100 * index + rank)
    return torch.randint(-100, 100, _SHAPES[index], generator=g).float()


_UNUSED = 4


def _residuals_of(reducer: GradientReduction, index: int) -> dict[str, Tensor]:
    """Return the residuals of a tensor by side, without the factors of low-rank codecs."""
    residuals = reducer.residuals()
    return {s: x.clone() for s, slot, x in residuals if slot.name == str(index) and not s.endswith("factor")}


def _reduce_once(reducer: GradientReduction, rank: int, factor: float = 1.0) -> Gradients:
    reducer.begin()
    for i in reversed(range(len(_SHAPES))):
        reducer.ready(_SLOTS[i], _grad(i, rank) * factor)
    reducer.close()
    grads = reducer.finish()
    reducer.commit()
    return grads


def _copy_sums(grads: Gradients) -> list[Tensor | None]:
    by_name = {slot.name: g for slot, g in grads.tensors.items()}
    return [None if (g := by_name.get(slot.name)) is None else g.clone() for slot in _SLOTS]


def _is_some_rows(part: Tensor, whole: Tensor, bound: float) -> bool:
    """Return whether `part` is a block of rows of `whole`, up to an error."""
    if part.dim() == 0:
        return float((part - whole).abs()) <= bound
    n = part.shape[0]
    starts = range(whole.shape[0] - n + 1)
    return any(float((whole[k : k + n] - part).abs().max()) <= bound for k in starts)


def _same_bits(actual: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> bool:
    """Return whether both have the same bits, and None at the same positions."""
    pairs = zip(actual, right, strict=True)
    return all(a is None if b is None else a is not None and torch.equal(a, b) for a, b in pairs)
