"""Every collective on real ranks, for every type and shape, and a broken twin of each that must be found."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm import Handle, Net
from paceline.errors import CommunicationError
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh, RankGroup
from paceline.testing import run_ranks
from tests.dist.comm.collective_checks import CHECKS, COMPLEX, DTYPES, check_sums, close, value


class BrokenNet(Net):
    """One mistake in every collective."""

    def all_reduce(self, x: Tensor, group: RankGroup, reduction: str = "sum") -> Handle:
        if group.rank == 1:
            x.zero_()  # one rank is forgotten
        return super().all_reduce(x, group, reduction)

    def broadcast(self, x: Tensor, group: RankGroup, source: int = 0) -> Handle:
        return super().broadcast(x, group, (source + 1) % group.size)

    def reduce(self, x: Tensor, group: RankGroup, destination: int = 0, reduction: str = "sum") -> Handle:
        return super().reduce(x, group, (destination + 1) % group.size, reduction)

    def all_gather(self, x: Tensor, group: RankGroup) -> Handle:
        return super().all_gather(x, group).then(lambda parts: parts[::-1])

    def reduce_scatter(self, x: Tensor, group: RankGroup, reduction: str = "sum") -> Handle:
        return super().reduce_scatter(x.roll(x.shape[0] // group.size, 0), group, reduction)

    def all_to_all(self, parts: Sequence[Tensor], group: RankGroup) -> Handle:
        return super().all_to_all(parts[::-1], group)

    def gather(self, x: Tensor, group: RankGroup, destination: int = 0) -> Handle:
        return super().gather(x, group, destination).then(lambda parts: parts[::-1])

    def scatter(
        self, parts: Sequence[Tensor] | None, like: Tensor, group: RankGroup, source: int = 0
    ) -> Handle:
        return super().scatter(parts and parts[::-1], like, group, source)

    def barrier(self, group: RankGroup) -> None:
        return None


def run_checks(cluster, kind: type[Net], folder: Path) -> dict[str, list[str]]:
    group = Mesh.build(cluster, {"replica": cluster.world_size}).replica
    problems: dict[str, list[str]] = {}
    for op, check in CHECKS.items():
        net = kind(deadline_seconds=20.0)
        (folder / op).mkdir(exist_ok=True)
        problems[op] = []
        try:
            problems[op] += check(net, group, folder / op)
        except (
            RuntimeError
        ) as error:  # of the backend, on all ranks alike: the next operation is not affected
            problems[op].append(f"raised {error}")
    return problems


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory):
    """What the checks find, by (world, net); every world is started once."""

    @functools.cache
    def find(world: int, kind: type[Net]) -> list[dict[str, list[str]]]:
        return run_ranks(run_checks, world, kind, tmp_path_factory.mktemp("barrier"))

    return find


ROWS = {"all_reduce": "G1", "all_gather": "G2"}


def by_row(ops: Sequence[str]) -> list[Any]:
    return [pytest.param(op, marks=pytest.mark.capability(ROWS.get(op, "G3"))) for op in ops]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("op", by_row(list(CHECKS)))
def test_a_collective_equals_its_reference_on_every_rank(op: str, world: int, problems) -> None:
    assert [found[op] for found in problems(world, Net)] == [[]] * world


@pytest.mark.parametrize("op", by_row(list(CHECKS)))
def test_a_mistake_in_a_collective_is_found(op: str, problems) -> None:
    lines = [line for found in problems(3, BrokenNet) for line in found[op]]
    assert [line for line in lines if not line.startswith("raised")]


def of_eight(cluster) -> tuple[dict[str, tuple[bool, list[int]]], list[str]]:
    """Sums over all; then complex ones over the first 1 to 8 of them, and all others over 5, 6 and 7."""
    net, world = Net(20.0), Mesh.build(cluster, {"replica": 8}).world
    results, problems = {}, []
    for dtype in DTYPES:
        inputs = [value(rank, dtype, "transposed") for rank in range(8)]
        x = net.all_reduce(inputs[world.rank].clone(), world).wait()
        results[str(dtype)] = (close(x, inputs, "sum"), x.contiguous().view(torch.uint8).tolist())
    for size in range(world.rank + 1, 9):
        group = world.subgroup(f"the first {size}", tuple(range(size)))
        problems += check_sums(net, group, (*DTYPES, *COMPLEX) if size in (5, 6, 7) else COMPLEX)
    return results, problems


@pytest.mark.capability("G1")
def test_eight_ranks_agree_to_the_bit_and_any_number_of_them_with_the_reference() -> None:
    (first, problems), *others = run_ranks(of_eight, 8)
    assert [name for name, (right, _) in first.items() if not right] == []
    assert all(other == first for other, _ in others)
    assert [*problems, *(line for _, lines in others for line in lines)] == []


@pytest.mark.capability("G1")
def test_a_wrong_imaginary_part_is_seen() -> None:
    """The twin for complex numbers."""
    inputs = [value(rank, torch.complex64, "plain") for rank in range(3)]
    right = torch.stack(inputs).sum(0)
    assert close(right, inputs, "sum") and not close(right.conj().resolve_conj(), inputs, "sum")


@pytest.mark.capability("G1")
@pytest.mark.parametrize("reduction", ["max", "min", "product"])
def test_only_sums_of_complex_numbers_are_known(reduction: str) -> None:
    """They travel as pairs of real numbers, of which a product would be another one."""
    group = Mesh.build(Cluster.single(), {}).replica
    with pytest.raises(CommunicationError, match=f"reduction '{reduction}' is not supported for complex"):
        Net().all_reduce(torch.ones(2, dtype=torch.complex64), group, reduction)
