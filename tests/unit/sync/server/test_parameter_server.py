"""Which workers a server has left, what was given back, and who is late."""

import pytest

from paceline.errors import CommunicationError
from paceline.sync.server.parameter_server import WorkerTable
from paceline.sync.server.server_policies import WorkTicket

TICKET = WorkTicket(3, 1)


def at_work(now: float = 0.0) -> WorkerTable:
    """Rank 2 is idle, rank 4 works since `now`, rank 7 has not said that it is ready."""
    worker_table = WorkerTable((2, 4, 7))
    worker_table.begin(now)
    assert worker_table.record_answer(2) is None and worker_table.record_answer(4) is None
    worker_table.assign_ticket(4, TICKET, 9, now)
    return worker_table


@pytest.mark.capability("B3")
def test_a_worker_is_idle_awaited_or_lost() -> None:
    worker_table = at_work()
    assert worker_table.idle == [2] and worker_table.left == [2, 4, 7] and not worker_table.all_idle
    assert worker_table.record_answer(4) == (TICKET, 9)
    assert worker_table.idle == [2, 4]
    assert worker_table.mark_lost(7, "it is gone") is None
    assert worker_table.all_idle and worker_table.left == [2, 4] and worker_table.lost == {7: "it is gone"}


@pytest.mark.capability("B3")
def test_the_ticket_of_a_lost_worker_comes_back_and_numbers_stay() -> None:
    worker_table = at_work()
    assert worker_table.mark_lost(4, "it is gone") == TICKET
    assert [worker_table.number(rank) for rank in worker_table.left] == [0, 2]
    worker_table.begin(1.0)
    assert worker_table.idle == [] and set(worker_table.deadlines(lambda rank: 0.0, 1.0)) == {2, 7}


@pytest.mark.capability("B3")
def test_a_worker_is_late_a_deadline_after_its_last_sign() -> None:
    """Not those that nothing is asked of; and who still reads or sends is not late."""
    signs = {2: 0.0, 4: 103.0, 7: 0.0}
    assert at_work(100.0).deadlines(signs.__getitem__, 5.0) == {4: 108.0, 7: 105.0}


@pytest.mark.capability("B3")
def test_the_last_one_lost_leaves_nobody() -> None:
    worker_table = at_work()
    for rank in (2, 4, 7):
        worker_table.mark_lost(rank, f"rank {rank} is gone")
    assert worker_table.left == [] and worker_table.all_idle and worker_table.idle == []
    with pytest.raises(CommunicationError, match="rank 2 is gone; rank 4 is gone; rank 7 is gone"):
        worker_table.require(1)


@pytest.mark.capability("B3", "I7")
def test_too_few_are_an_error_that_names_the_lost() -> None:
    worker_table = at_work()
    worker_table.mark_lost(7, "rank 7 is gone")
    worker_table.require(2)
    with pytest.raises(CommunicationError, match="needs 3, 2 are left and 1 are lost: rank 7 is gone"):
        worker_table.require(3)
