"""The collectives of an MPI library keep the contract: mpirun starts three ranks, which run all of its tests.

The ranks of a test are the first of them; a test that fails on one rank ends all. By hand:
`mpirun -n 3 python -m tests.contract.test_mpi_route`.
"""

from __future__ import annotations

import inspect
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from paceline.comm import Collective, Net
from paceline.comm.routes.mpi_route import MpiCollective, build_mpi
from paceline.comm.routes.native import NativeCollective
from paceline.comm.routes.route_context import RouteContext
from paceline.errors import DeadlineError
from paceline.job.cluster import Cluster, process_environment
from paceline.job.mesh import Mesh, RankGroup
from paceline.testing import run_ranks
from paceline.testing.contracts import CollectiveContract
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
RANKS = 3
KEPT: list[torch.Tensor] = []


def build(net: Net, group: RankGroup, warn: Callable[[str], object] | None = None) -> Collective:
    cluster = Cluster(group.rank, group.size, group.rank, group.size, 0, 1, "", 0, None, "", None)
    device, said = torch.device("cpu"), warn or pytest.fail
    return build_mpi(group, RouteContext(cluster, group, net, device, said, [], lambda path: path, False))


def run_under_mpirun(function: Callable[..., Any], n: int, *args: Any) -> list[Any]:
    """Call a function on the first n ranks of mpirun; returns what they returned, on every rank."""
    from mpi4py import MPI

    world, result = MPI.COMM_WORLD, None
    port, token = world.bcast((free_port(), secrets.token_hex(8)))
    if world.rank < n:
        cluster = Cluster(world.rank, n, world.rank, n, 0, 1, "127.0.0.1", port, None, token, None)
        cluster = cluster.connect("cpu", 30.0)
        result = function(cluster, *args)
        world.Create_group(world.group.Incl(range(n))).Barrier()
        cluster.disconnect()
    return world.allgather(result)[:n]


class MpiContract(CollectiveContract):
    """The contract, on ranks of mpirun."""

    __test__ = False  # pytest is not started by mpirun

    run_ranks: ClassVar = staticmethod(run_under_mpirun)

    def collective(self, net: Net, group: RankGroup) -> Collective:
        collective = build(net, group)
        assert type(collective) is MpiCollective
        return collective

    def test_values_of_other_dtypes_are_summed_and_a_rank_that_does_not_call_is_a_deadline(self) -> None:
        def run(cluster: Cluster) -> list[list[complex]]:
            collective, group = self.start(cluster)
            sums = []
            for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.complex64):
                x = torch.full((2, 2), group.rank + 1, dtype=dtype)
                assert collective.all_reduce(x, "0").wait() is x
                sums.append(x.flatten().tolist())
            late = torch.ones(4)
            KEPT.append(late)  # MPI may write to it as long as the job runs
            if group.rank == 0:
                with pytest.raises(DeadlineError, match="all_reduce did not finish within"):
                    collective.all_reduce(late, "late").wait(0.2)
            net = Net(30.0)
            net.barrier(group)
            if group.rank == 1:
                collective.all_reduce(late, "late").wait()
            return sums

        assert self.run_ranks(run, 2) == [[[3] * 4] * 5] * 2


@pytest.mark.capability("G11")
def test_the_contract_holds_on_ranks_of_mpirun() -> None:
    pytest.importorskip("mpi4py", reason="needs mpi4py (make engines)")
    if shutil.which("mpirun") is None:
        pytest.skip("needs mpirun of Open MPI (make engines)")
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    words += ["--mca", "mpi_yield_when_idle", "1", "-n", str(RANKS)]
    variables = process_environment()
    done = subprocess.run(
        [*words, sys.executable, "-m", "tests.contract.test_mpi_route"],
        cwd=ROOT,
        env={**variables, "PYTHONPATH": f"{variables.get('PYTHONPATH', ROOT / 'src')}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    names = [name for name, _ in inspect.getmembers(MpiContract) if name.startswith("test_")]
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == names and len(names) > 7


@pytest.mark.capability("G11")
def test_without_mpirun_the_ranks_agree_on_the_native_route_and_say_why() -> None:
    def run(cluster: Cluster) -> tuple[bool, list[str]]:
        group, said = Mesh.build(cluster, {"replica": cluster.world_size}).replica, list[str]()
        return type(build(Net(30.0), group, said.append)) is NativeCollective, said

    for is_native, said in run_ranks(run, 2):
        assert is_native and len(said) == 1
        assert "route=mpi is not possible: mpirun has not started these ranks" in said[0]


def main() -> None:
    """Run the tests of the contract on a rank of mpirun; rank 0 prints the name of each that has passed."""
    from mpi4py import MPI

    torch.set_num_threads(1)
    contract = MpiContract()
    for name, test in inspect.getmembers(contract, inspect.ismethod):
        if name.startswith("test_"):
            test()
            if MPI.COMM_WORLD.rank == 0:
                sys.stdout.write(f"{name}\n")


if __name__ == "__main__":
    main()
