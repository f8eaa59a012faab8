"""The net without a wire: a group of one copies and costs nothing; failures are named."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm import LedgerEntry, Net
from paceline.comm.net import handle_of_work
from paceline.errors import CommunicationError, DeadlineError
from paceline.job.mesh import RankGroup

ALONE = RankGroup("replica", (0,), 0)
PAIR = RankGroup("replica", (4, 6), 1)

ON_ONE_RANK: dict[str, Callable[[Net, Tensor], Any]] = {
    "all_reduce": lambda net, x: net.all_reduce(x, ALONE).wait(),
    "broadcast": lambda net, x: net.broadcast(x, ALONE).wait(),
    "reduce": lambda net, x: net.reduce(x, ALONE).wait(),
    "all_gather": lambda net, x: net.all_gather(x, ALONE).wait()[0],
    "reduce_scatter": lambda net, x: net.reduce_scatter(x, ALONE).wait(),
    "all_to_all": lambda net, x: net.all_to_all([x], ALONE).wait()[0],
    "gather": lambda net, x: net.gather(x, ALONE).wait()[0],
    "scatter": lambda net, x: net.scatter([x], x, ALONE).wait(),
}
NEW_TENSOR = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")


class StuckWork:
    """A collective that ends with an error, as the backend words it."""

    def __init__(self, message: str) -> None:
        self.message = message
        self.limit = timedelta()

    def wait(self, limit: timedelta) -> None:
        self.limit = limit
        raise RuntimeError(self.message)


@pytest.mark.capability("G1", "G2", "G3")
@pytest.mark.parametrize("op", ON_ONE_RANK)
def test_on_one_rank_a_collective_is_a_copy_and_is_not_counted(op: str) -> None:
    net, x = Net(), torch.arange(6).view(3, 2)
    result = ON_ONE_RANK[op](net, x)
    assert torch.equal(result, torch.arange(6).view(3, 2))
    assert (result.data_ptr() == x.data_ptr()) == (op not in NEW_TENSOR)
    assert not net.ledger.rows


def test_a_barrier_of_one_returns_at_once() -> None:
    net = Net()
    net.barrier(ALONE)
    assert not net.ledger.rows


@pytest.mark.parametrize("shape", [(3, 2), ()])
def test_reduce_scatter_refuses_what_it_cannot_split(shape: tuple[int, ...]) -> None:
    with pytest.raises(CommunicationError, match="over 2 ranks cannot split shape"):
        Net().reduce_scatter(torch.zeros(shape), PAIR)


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(KeyError, match="mean"):
        Net().all_reduce(torch.zeros(2), ALONE, "mean")


@pytest.mark.parametrize(
    "message, kind",
    [
        ("[..] Timed out waiting 50ms for recv operation to complete", DeadlineError),
        ("Wait timed out", DeadlineError),
        ("Connection closed by peer [127.0.0.1]:4711", CommunicationError),
    ],
)
def test_a_failure_names_operation_rank_group_and_step(message: str, kind: type[CommunicationError]) -> None:
    net = Net(deadline_seconds=60.0, times_calls=False)
    net.step = 23
    work = StuckWork(message)
    entry = LedgerEntry()
    with pytest.raises(CommunicationError) as caught:
        handle_of_work("all_to_all", PAIR, net, work, entry, lambda: None).wait()
    assert type(caught.value) is kind
    assert "rank 6, all_to_all over group 'replica' (4, 6), step 23" in str(caught.value)
    assert message in str(caught.value)
    assert caught.value.next_step
    assert work.limit == timedelta(seconds=60)
    assert entry.exposed_seconds > 0.0  # waiting in vain is waiting, too


def test_a_wait_of_its_own_length_is_what_the_error_says() -> None:
    work = StuckWork("Wait timed out")
    with pytest.raises(DeadlineError, match=r"within 0\.5 s"):
        handle_of_work("all_reduce", PAIR, Net(deadline_seconds=60.0), work, None, lambda: None).wait(0.5)
    assert work.limit == timedelta(seconds=0.5)
