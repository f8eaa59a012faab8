"""The ledger against the kernel: bytes that really crossed the loopback of a network namespace of its own."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.dist.comm import loopback
from tests.dist.comm.loopback import LARGE, NUM_CALLS, OPS, WORLDS


def namespace_command() -> list[str]:
    """How to start a process in a network of its own; skips the test where that is not allowed."""
    if shutil.which("unshare") is None:
        pytest.skip("counting bytes needs a network namespace, and there is no `unshare`")
    for flags in (["-n"], ["-r", "-n"]):
        if subprocess.run(["unshare", *flags, "true"], capture_output=True, check=False).returncode == 0:
            return ["unshare", *flags]
    return pytest.skip("counting bytes needs a network namespace, and this user may not make one")


@pytest.fixture(scope="module")
def counted() -> dict[str, list[dict[str, tuple[int, float]]]]:
    """By world: what every rank found. One process, for all tests."""
    command = [*namespace_command(), sys.executable, loopback.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=360, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.capability("G14")
@pytest.mark.parametrize("op", OPS)
def test_the_kernel_moves_what_the_ledgers_of_all_ranks_add_up_to(op: str, counted) -> None:
    found = {world: (ranks[0][op][0], sum(rank[op][1] for rank in ranks)) for world, ranks in counted.items()}
    assert {int(world) for world in found} == set(WORLDS)
    wrong = {world: moved / said for world, (moved, said) in found.items() if abs(moved / said - 1.0) > 0.1}
    assert wrong == {}  # by number of ranks: moved / said


@pytest.mark.capability("G14")
@pytest.mark.parametrize("world", WORLDS)
def test_all_reduces_move_twice_the_payload_for_every_rank_but_one(world: int, counted) -> None:
    moved = counted[str(world)][0]["all_reduce"][0]
    assert moved == pytest.approx(NUM_CALLS * 2 * (world - 1) * LARGE, rel=0.1)
