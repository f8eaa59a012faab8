"""Bounded staleness, over random delays, lost workers and lost work: nothing too old is ever applied."""

import heapq
import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm.channel import ChannelMessage
from paceline.sync.server.server_policies import (
    AsynchronousUpdates,
    BoundedStaleness,
    ServerPolicy,
    WorkerPush,
    WorkTicket,
)

FIRST, END = 3, 11


@dataclass
class Played:
    """What happened.

    Args:
        given: every ticket that was handed out, with the clocks that were complete then.
        updates: the tickets of every update, with the clocks that were complete when each was read.
        late: the age of every applied gradient in updates.
        ahead: how many clocks after it the newest applied gradient was, of every applied gradient.
    """

    given: list[tuple[WorkTicket, int]] = field(default_factory=list)
    updates: list[list[WorkTicket]] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)


def play(policy: ServerPolicy, num_workers: int, seed: int, losses: int = 0) -> Played:
    """Workers that take random times; some are lost, and some lose what they did."""
    draw, found = random.Random(seed), Played()
    speeds = [draw.choice((1.0, 1.0, 3.0, 30.0)) for _ in range(num_workers)]
    mortal = set(draw.sample(range(num_workers), min(losses, num_workers - 1)))
    idle, newest, now = set(range(num_workers)), 0, 0.0
    arrivals: list[tuple[float, int, WorkTicket, int]] = []
    policy.begin(FIRST, END)
    while True:
        for worker in sorted(idle):
            ticket = policy.ticket(worker)
            if ticket is not None:
                idle.remove(worker)
                found.given.append((ticket, policy.step))
                due = now + draw.random() * speeds[worker]
                heapq.heappush(arrivals, (due, worker, ticket, len(found.updates)))
        if not arrivals:
            assert policy.is_complete
            return found
        now, worker, ticket, version = heapq.heappop(arrivals)
        fate = draw.random()
        if worker in mortal and fate < 0.2:
            mortal.remove(worker)
            policy.drop_worker(worker, ticket)
            continue
        idle.add(worker)
        if fate > 0.9:
            policy.reissue(worker, ticket)
            continue
        pushes = policy.push(worker, WorkerPush(ticket, version, ChannelMessage("push")))
        assert pushes is not None
        for one in pushes:
            newest = max(newest, one.ticket.step)
            found.late.append(len(found.updates) - one.version)
            found.ahead.append(newest - one.ticket.step)
        if pushes:
            found.updates.append([one.ticket for one in pushes])


schedules = {"num_workers": st.integers(1, 6), "seed": st.integers(0, 2**32), "losses": st.integers(0, 3)}


@pytest.mark.capability("I4", "Z6")
@given(bound=st.integers(0, 4), **schedules)
@settings(max_examples=300)
def test_no_gradient_older_than_the_bound_is_ever_applied(
    bound: int, num_workers: int, seed: int, losses: int
) -> None:
    found = play(BoundedStaleness(num_workers, bound), num_workers, seed, losses)
    assert all(ticket.step - complete <= bound for ticket, complete in found.given)
    assert all(0 <= ahead <= bound for ahead in found.ahead)
    assert max(found.late) <= (num_workers * (2 * bound + 1) - 1 if bound else 0)
    applied = sorted((t.step, t.part) for update in found.updates for t in update)
    assert applied == [(step, part) for step in range(FIRST, END) for part in range(num_workers)]


def test_without_its_bound_it_would_apply_older_ones() -> None:
    """The twin: the same schedules under an asynchronous server."""
    found = [play(AsynchronousUpdates(4), 4, seed) for seed in range(20)]
    assert max(max(one.ahead) for one in found) > 2
    assert max(max(one.late) for one in found) > 4 * 5 - 1


@pytest.mark.capability("I4")
@given(**schedules)
@settings(max_examples=50)
def test_with_a_bound_of_0_a_clock_is_one_update_by_part(num_workers: int, seed: int, losses: int) -> None:
    found = play(BoundedStaleness(num_workers, 0), num_workers, seed, losses)
    parts = [WorkTicket(step, part) for step in range(FIRST, END) for part in range(num_workers)]
    assert [t for update in found.updates for t in update] == parts
    assert all(len(update) == num_workers for update in found.updates)


@pytest.mark.capability("I4")
def test_with_a_bound_of_0_a_worker_has_its_own_part_and_those_of_the_lost_go_to_others() -> None:
    policy = BoundedStaleness(3, 0)
    policy.begin(0, 2)
    assert [policy.ticket(2), policy.ticket(2)] == [WorkTicket(0, 2), None]
    policy.drop_worker(0, None)
    assert [policy.ticket(2), policy.ticket(1), policy.ticket(1)] == [
        WorkTicket(0, 0),
        WorkTicket(0, 1),
        None,
    ]
    for worker, part in ((2, 0), (1, 1), (2, 2)):
        policy.push(worker, WorkerPush(WorkTicket(0, part), 0, ChannelMessage("push")))
    assert [policy.ticket(1), policy.ticket(1)] == [WorkTicket(1, 1), WorkTicket(1, 0)]


@pytest.mark.capability("I4")
@given(**schedules)
@settings(max_examples=50)
def test_without_a_bound_it_is_asynchronous(num_workers: int, seed: int, losses: int) -> None:
    found = play(BoundedStaleness(num_workers, math.inf), num_workers, seed, losses)
    free = play(AsynchronousUpdates(num_workers), num_workers, seed, losses)
    assert [ticket for ticket, _ in found.given] == [ticket for ticket, _ in free.given]
    assert (found.updates, found.late) == (free.updates, free.late)


@pytest.mark.parametrize("bound", [0, 1, math.inf])
def test_a_stop_ends_with_the_clock_that_is_open_and_after_at_least_one(bound: float) -> None:
    policy = BoundedStaleness(2, bound)
    policy.begin(5, 9)
    policy.stop()
    tickets = [policy.ticket(0), policy.ticket(1)]
    assert tickets == [WorkTicket(5, 0), WorkTicket(5, 1)]
    for worker, ticket in enumerate(tickets):
        assert not policy.is_complete
        policy.push(worker, WorkerPush(ticket, 0, ChannelMessage("push")))
    assert policy.is_complete and policy.step == 6
    assert policy.ticket(0) is None
