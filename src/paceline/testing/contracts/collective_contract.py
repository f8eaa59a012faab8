"""The contract of collectives (a route, plain or with a codec): results, aborts and error feedback."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from paceline.comm.collectives.collective_protocol import Collective
from paceline.comm.net import Net
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh, RankGroup
from paceline.testing.rank_processes import run_ranks

_SIZES = (1, 7, 1000)


class CollectiveContract(ABC):
    """Tests of sums, gathers and broadcasts over a group.

    Attributes:
        worlds: world sizes for sums; tests with a single size use the first.
        relative_error: error of a sum of integers, relative to the sum of the largest magnitudes.
        uses_error_feedback: whether the error of a sum is added to the next one of the same buffer.
        run_ranks: calls a function on as many ranks, as `paceline.testing.run_ranks` does.
    """

    worlds: ClassVar[tuple[int, ...]] = (2, 3)
    relative_error: float = 0.0
    uses_error_feedback: bool = False
    run_ranks: ClassVar[Callable[..., list[Any]]] = staticmethod(run_ranks)

    @abstractmethod
    def collective(self, net: Net, group: RankGroup) -> Collective:
        """Return a new collective."""

    def start(self, cluster: Cluster) -> tuple[Collective, RankGroup]:
        """Return a new collective of all ranks, and their group."""
        group = Mesh.build(cluster, {"replica": cluster.world_size}).replica
        return self.collective(Net(30.0), group), group

    def test_all_reduce_gives_every_rank_the_same_sum_in_place(self) -> None:
        def run(cluster: Cluster) -> list[Tensor]:
            collective, group = self.start(cluster)
            xs = [_values(n, group.rank) for n in _SIZES]
            handles = [collective.all_reduce(x, str(k)) for k, x in enumerate(xs)]
            assert all(handle.wait() is x for handle, x in zip(handles, xs, strict=True))
            return xs

        for world in self.worlds:
            ranks = self.run_ranks(run, world)
            for k, n in enumerate(_SIZES):
                right = sum(_values(n, rank) for rank in range(world))
                bound = self.relative_error * sum(float(_values(n, r).abs().max()) for r in range(world))
                assert all(torch.equal(sums[k], ranks[0][k]) for sums in ranks)
                assert float((ranks[0][k] - right).abs().max()) <= 2 * bound

    def test_reduce_scatter_gives_each_rank_its_row(self) -> None:
        """With memory of the collective, or with memory of the caller."""

        def run(cluster: Cluster) -> tuple[Tensor, Tensor]:
            collective, group = self.start(cluster)
            rows = torch.stack([_values(40, 10 * group.rank + row) for row in range(group.size)])
            row_sum = collective.reduce_scatter(rows.clone(), "rows").wait().clone()
            in_buffer = collective.reduce_scatter(
                rows, "given", lambda: torch.empty(group.size - 1, 40)
            ).wait()
            return row_sum, in_buffer

        for world in self.worlds:
            for row, both in enumerate(self.run_ranks(run, world)):
                parts = [_values(40, 10 * rank + row) for rank in range(world)]
                bound = self.relative_error * sum(float(part.abs().max()) for part in parts)
                for row_sum in both:
                    assert row_sum.shape == (40,)
                    assert float((row_sum - sum(parts)).abs().max()) <= bound

    def test_all_gather_collects_rows_by_rank(self) -> None:
        def run(cluster: Cluster) -> Tensor:
            collective, group = self.start(cluster)
            found: Tensor = collective.all_gather(_values(13, group.rank), "gathered").wait()
            out = torch.zeros(group.size, 13)
            out[group.rank] = found[group.rank]
            assert collective.all_gather(out[group.rank], "in place", out).wait().data_ptr() == out.data_ptr()
            assert torch.equal(out, found)
            return found

        for world in self.worlds:
            right = torch.stack([_values(13, rank) for rank in range(world)])
            assert all(torch.equal(found, right) for found in self.run_ranks(run, world))

    def test_broadcast_copies_any_rank_to_all_in_place(self) -> None:
        def run(cluster: Cluster) -> list[Tensor]:
            collective, group = self.start(cluster)
            copies = []
            for source in range(group.size):
                x = _values(9, 50 + group.rank)
                assert collective.broadcast(x, "copied", source).wait() is x
                copies.append(x)
            return copies

        for world in self.worlds:
            for copies in self.run_ranks(run, world):
                assert all(torch.equal(x, _values(9, 50 + source)) for source, x in enumerate(copies))

    def test_an_aborted_step_changes_nothing(self) -> None:
        """Two steps, or two with an aborted one between them: the same bits."""

        def run(cluster: Cluster, aborts: bool) -> Tensor:
            collective, group = self.start(cluster)
            x = torch.zeros(0)
            for step in range(3):
                if step == 1 and not aborts:
                    continue
                x = _values(500, group.rank) / 3
                collective.all_reduce(x, "0").wait()
                if step == 1:
                    collective.abort()
                elif collective.feedback is not None:
                    collective.feedback.commit()
            return x

        plain, disturbed = (self.run_ranks(run, self.worlds[0], aborts) for aborts in (False, True))
        assert torch.equal(plain[0], disturbed[0])

    def test_what_one_step_loses_the_next_ones_bring(self) -> None:
        """The mean of many sums of one value is closer to it than one sum is, by the number of sums."""
        num_steps = 20

        def run(cluster: Cluster) -> tuple[float, float]:
            collective, group = self.start(cluster)
            right = sum(_values(500, rank) / 7 for rank in range(group.size))
            total, first = torch.zeros(500), 0.0
            for step in range(num_steps):
                x = _values(500, group.rank) / 7
                collective.all_reduce(x, "0").wait()
                if collective.feedback is not None:
                    collective.feedback.commit()
                total += x
                first = float((x - right).abs().max()) if step == 0 else first
            return first, float((total / num_steps - right).abs().max())

        first, mean = self.run_ranks(run, self.worlds[0])[0]
        if self.uses_error_feedback:
            assert first > 0 and mean <= 4 * first / num_steps
        else:
            assert max(first, mean) <= 1e-4  # rounding of sums up to 1,200

    def test_residuals_survive_being_taken_out_and_put_back(self) -> None:
        def run(cluster: Cluster, moves: bool) -> Tensor:
            collective, group = self.start(cluster)
            x = torch.zeros(0)
            for step in range(3):
                if step == 2 and moves and collective.feedback is not None:
                    residuals = {
                        side: flat.clone() for side, flat in collective.feedback.residuals("0", 500).items()
                    }
                    collective, group = self.start(cluster)
                    assert collective.feedback is not None
                    collective.feedback.set_residuals("0", residuals)
                x = _values(500, group.rank) / 3
                collective.all_reduce(x, "0").wait()
                if collective.feedback is not None:
                    collective.feedback.commit()
            return x

        whole, restored = (self.run_ranks(run, self.worlds[0], moves) for moves in (False, True))
        assert torch.equal(whole[1], restored[1])


def _values(n: int, seed: int) -> Tensor:
    """Return random integers, whose plain sum is exact in any order."""
    g = torch.Generator().manual_seed(1000 * n + seed)
    return torch.randint(-100, 100, (n,), generator=g).float()
