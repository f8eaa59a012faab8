"""All that are left hear one verdict: it is done on all of them, or they do it again without the lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from paceline.errors import CommunicationError, DeadlineError
from paceline.job.commit import CommitProtocol, CommitVerdict
from paceline.job.membership import JobMembership, MembershipGroups
from paceline.job.store_client import StoreClient
from paceline.job.store_server import StoreServer
from paceline.job.torch_store import JobStore

pytestmark = pytest.mark.capability("N5", clause="a server and its launcher outlive workers")
LONG = 600.0  # nobody waits for it
RANKS = (0, 2, 3)


@contextmanager
def commits(seconds: float = LONG) -> Iterator[dict[int, tuple[CommitProtocol, JobStore]]]:
    """Of four members, whose numbers are not their ranks."""
    with StoreServer() as server:
        found, members = {}, (10, 11, 12, 13)
        for rank, number in enumerate(members):
            store = JobStore(StoreClient(server.connection_for(number)), seconds)
            groups = MembershipGroups(store, "epoch", members, rank, torch.device("cpu"), seconds)
            member = JobMembership(0, members, rank, ("",) * 4, "epoch", store, groups)
            found[rank] = CommitProtocol(member, seconds), store
        yield found
        for _, store in found.values():
            store.close()


def vote(found: dict[int, tuple[CommitProtocol, JobStore]], **done: bool) -> dict[int, Any]:
    """What members hear who vote at the same time; an error in its place."""

    def one(rank: int, mine: bool) -> Any:
        try:
            return found[rank][0].vote(RANKS, done=mine)
        except CommunicationError as error:
            return error

    with ThreadPoolExecutor(4) as pool:
        said = {int(name[1:]): pool.submit(one, int(name[1:]), mine) for name, mine in done.items()}
        return {rank: future.result() for rank, future in said.items()}


def test_what_all_have_done_is_done_again_and_again() -> None:
    with commits() as found:
        for _ in range(3):
            assert vote(found, r0=True, r2=True, r3=True) == dict.fromkeys(RANKS, CommitVerdict(True, RANKS))
        assert found[0][1].num_keys() == 1, "old votes stay in the store"


@pytest.mark.parametrize("votes", [(True, False), (False, True), (False, False)])
def test_what_one_has_not_done_is_done_for_nobody(votes: Sequence[bool]) -> None:
    """Rank 2 is gone before it has voted; one of the others may have got through."""
    with commits() as found:
        found[2][1].close()
        verdict = CommitVerdict(False, (0, 3))
        assert vote(found, r0=votes[0], r3=votes[1]) == {0: verdict, 3: verdict}


def test_one_that_is_lost_after_all_others_were_through_holds_up_nobody() -> None:
    with commits() as found:
        found[2][1].close()
        assert vote(found, r0=True, r3=True) == dict.fromkeys((0, 3), CommitVerdict(True, (0, 3)))


def test_one_that_ends_after_its_vote_is_known_to_be_lost() -> None:
    """Its connections end before rank 3 has heard all; the store may learn of it a moment later."""
    with commits() as found, ThreadPoolExecutor(1) as pool:
        others = pool.submit(vote, found, r0=True, r3=False)
        found[2][1].set("epoch/commit/0/2", "1")
        found[2][1].close()
        assert others.result() == dict.fromkeys((0, 3), CommitVerdict(False, (0, 3)))


def test_a_failure_without_a_loss_ends_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.job.commit._LOSS_DETECTION_SECONDS", 0.1)
    with commits() as found:
        assert vote(found, r0=True, r2=True, r3=False) == dict.fromkeys(RANKS, CommitVerdict(False, RANKS))


def test_one_that_is_silent_is_left_behind_and_told_so() -> None:
    with commits(0.3) as found:
        assert vote(found, r0=False, r3=False) == dict.fromkeys((0, 3), CommitVerdict(False, (0, 3)))
        late = vote(found, r2=True)[2]
        assert "have continued without rank 2" in str(late)


def test_without_the_first_one_nobody_goes_on() -> None:
    with commits() as found:
        found[0][1].close()
        said = vote(found, r2=True, r3=True)
        assert all("rank 0 left before it had counted" in str(said[rank]) for rank in (2, 3))
        assert not any(isinstance(error, DeadlineError) for error in said.values())
