"""Sums in shared memory: equal to the native ones, in every dtype.

A lost, a late and a strange rank; nothing left.
"""

import gc
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.comm import NativeCollective, Net
from paceline.comm.routes import SharedMemoryCollective, connect_single_host_group
from paceline.comm.routes.shared_memory import sum_slice_in_all
from paceline.errors import CommunicationError, DeadlineError
from paceline.job.mesh import Mesh, RankGroup
from paceline.testing import RanksFailed, run_ranks


def start(cluster, deadline_seconds: float = 20.0) -> tuple[SharedMemoryCollective, RankGroup, Net]:
    group, net = Mesh.build(cluster, {"replica": cluster.world_size}).replica, Net(deadline_seconds)
    links = connect_single_host_group(group, net)
    assert links is not None
    return SharedMemoryCollective(net, group, links), group, net


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_has_met_all_waits_for_nothing(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank calls all others and is called by none."""

    def run(cluster) -> None:
        monkeypatch.setattr("paceline.comm.routes.host_links._POLL_SECONDS", 1000.0)
        start(cluster)[0].close()

    run_ranks(run, world)


def values(n: int, dtype: torch.dtype, rank: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.capability("G1")
@pytest.mark.parametrize("world", [2, 3, 5])
def test_a_sum_is_the_sum_in_the_order_of_the_ranks(world: int) -> None:
    """Bit by bit, also for less values than ranks, more than a chunk, and views that lie elsewhere."""
    sizes, dtypes = (0, 1, 3, 1000, 200_001), (torch.float32, torch.float64, torch.bfloat16, torch.float16)

    def run(cluster) -> list[Tensor]:
        memory, group, _ = start(cluster)
        found = []
        for dtype in dtypes:
            for n in sizes:
                key = f"{dtype} {n}"
                own = memory.buffer(n, torch.zeros(0, dtype=dtype), key).copy_(values(n, dtype, group.rank))
                spread = torch.stack([values(n, dtype, group.rank)] * 2, 1)[:, 0]
                handles = memory.all_reduce(own, key), memory.all_reduce(spread, key + " elsewhere")
                found += [handle.wait().clone() for handle in handles]
        return found

    ranks = run_ranks(run, world)
    right = [
        sum_in_order([values(n, d, r) for r in range(world)]) for d in dtypes for n in sizes for _ in "ab"
    ]
    for found in ranks:
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


def sum_in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total.add_(part)
    return total


def test_slices_cover_every_value_once() -> None:
    for num_parts in (2, 3, 7):
        for n in (0, 1, 63, 64, 65, 1000):
            parts = [torch.full((n,), float(k + 1)) for k in range(num_parts)]
            for place in range(num_parts):
                sum_slice_in_all(parts, place)
            assert all(part.eq(num_parts * (num_parts + 1) / 2).all() for part in parts)


@pytest.mark.capability("G14")
def test_the_ledger_counts_a_sum_in_memory_as_one_on_a_wire() -> None:
    def run(cluster) -> list[dict]:
        memory, group, net = start(cluster)
        plain_net = Net(20.0)
        for each in (memory, NativeCollective(plain_net, group)):
            each.all_reduce(torch.ones(1000), "a").wait()
            each.reduce_scatter(torch.ones(3, 40), "b").wait()
        rows = [
            {op: (e.calls, e.payload_bytes, e.sent_bytes) for (op, _), e in n.ledger.rows.items()}
            for n in (net, plain_net)
        ]
        assert net.ledger.rows["all_reduce", "replica"].hidden_fraction < 0.5  # the one who waits adds
        return rows

    for memory, native in run_ranks(run, 3):
        assert memory.pop("all_gather")[0] == 2  # the ranks told each other where they are
        assert memory == native
        assert native["all_reduce"] == (1, 4000, 2 * 2 / 3 * 4000)


@pytest.mark.capability("G4", clause="a poll in shared memory")
def test_a_sum_is_complete_once_all_ranks_have_polled() -> None:
    """A poll adds this rank's share, so nobody has to wait; before the last rank has launched it is open."""

    def run(cluster) -> tuple[bool, bool, list[float]]:
        memory, group, net = start(cluster)
        x = torch.full((5,), float(group.rank + 1))
        memory.buffer(5, torch.zeros(0), "a")  # mapped by all ranks together, before either launches
        if group.rank == 1:
            net.barrier(group)
        handle = memory.all_reduce(x, "a")
        early = group.rank == 0 and handle.is_complete()
        if group.rank == 0:
            net.barrier(group)
        expires = time.monotonic() + 20
        while not handle.is_complete() and time.monotonic() < expires:
            time.sleep(0.001)
        found = handle.is_complete(), x.tolist() if handle.wait() is x else []
        memory.close()
        return early, *found

    assert run_ranks(run, 2) == [(False, True, [3.0] * 5)] * 2


def failing(function: Callable[..., object], world: int, *args: object) -> RanksFailed:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(function, world, *args)
    return caught.value


@pytest.mark.parametrize("said", [False, True])
def test_a_rank_that_is_killed_ends_the_wait_of_the_others_at_once(said: bool) -> None:
    """Before it has filled its buffer, or when the others wait for its slice."""

    def run(cluster) -> None:
        memory, group, net = start(cluster, 60.0)
        net.step = 7
        x = memory.buffer(1000, torch.zeros(0), "0")
        if group.rank == 1 and not said:
            os.kill(os.getpid(), signal.SIGKILL)
        handle = memory.all_reduce(x, "0")
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        handle.wait()

    failures = failing(run, 3)
    assert failures.of(1).headline.startswith("was killed by SIGKILL")
    for rank in (0, 2):
        text = failures.of(rank).details
        assert "rank 1 is gone" in text
        assert f"rank {rank}, shared memory of group 'replica' (0, 1, 2), step 7" in text


@pytest.mark.parametrize("op", ["all_reduce", "buffer"])
def test_a_rank_that_does_not_join_is_missed_at_the_deadline(op: str) -> None:
    def run(cluster) -> None:
        memory, group, net = start(cluster)
        net.deadline_seconds = 0.5  # they have met by now, which may take longer
        if group.rank == 1:
            time.sleep(600.0)
        if op == "buffer":
            memory.buffer(1000, torch.zeros(0), "0")
        memory.all_reduce(torch.ones(1000), "0").wait()

    text = failing(run, 2).of(0).details
    assert DeadlineError.__name__ in text and "ranks [1] did not join a sum within 0.5 s" in text


@pytest.mark.parametrize("sizes", [(10, 40), (10, 10)])
def test_ranks_out_of_step_are_an_error(sizes: tuple[int, int]) -> None:
    """Buffers in another order, also if they are equally large: never a wrong sum."""

    def run(cluster) -> None:
        memory, group, _ = start(cluster, 10.0)
        xs = {key: torch.ones(n) for key, n in zip("ab", sizes, strict=True)}
        for key, x in xs.items():
            memory.all_reduce(x, key).wait()
        for key in ("a", "b") if group.rank else ("b", "a"):
            memory.all_reduce(xs[key], key).wait()

    text = failing(run, 2).of(0).details
    assert CommunicationError.__name__ in text and "same buffers in the same order" in text


def test_many_sums_may_be_under_way() -> None:
    """More than the sockets hold: who tells, also listens."""

    def run(cluster) -> list[float]:
        memory, group, _ = start(cluster)
        handles = [memory.all_reduce(torch.full((2,), float(k)), "x" + str(k % 700)) for k in range(700)]
        if group.rank == 1:
            time.sleep(0.5)
        return [float(handle.wait()[0]) for handle in handles]

    for found in run_ranks(run, 2):
        assert found == [2.0 * k for k in range(700)]


@pytest.mark.capability("G8")
@pytest.mark.parametrize("world", [2, 3])
def test_threads_may_wait_side_by_side(world: int) -> None:
    """One maps memory for further keys while another waits for sums, as on the hierarchical route."""

    def run(cluster) -> list[float]:
        memory, group, _ = start(cluster, 60.0)
        waiting: queue.SimpleQueue = queue.SimpleQueue()
        found: list[float] = []

        def wait() -> None:
            for _ in range(300):
                found.append(float(waiting.get().wait(exposed=False).sum()))

        thread = threading.Thread(target=wait)
        thread.start()
        for number in range(300):
            waiting.put(memory.reduce_scatter(torch.full((group.size, 4), float(number)), f"key {number}"))
        thread.join(100.0)
        return found

    for found in run_ranks(run, world):
        assert found == [4.0 * world * number for number in range(300)]


def test_nothing_is_left_of_a_collective() -> None:
    def count() -> tuple[int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("paceline-sums")
        return maps, len(list(Path("/proc/self/fd").iterdir()))

    def run(cluster) -> list[tuple[int, int]]:
        memory, _, _ = start(cluster)
        for key in "abc":
            memory.all_reduce(memory.buffer(5000, torch.zeros(0), key), key).wait()
        held = count()
        memory.close()
        del memory
        left = count()
        memory, _, _ = start(cluster)
        memory.close()
        return [held, left, count()]

    for held, left, again in run_ranks(run, 3):
        assert held[0] == 9  # three buffers of three ranks
        assert left[0] == 0 and left[1] == again[1] < held[1]
