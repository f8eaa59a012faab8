"""A vote on whether all remaining members have completed a collective, counted by one of them.

If a member is lost in a collective, some of the others can have completed it and some not. After the vote all
agree: it is done on all remaining members, or they repeat it without the lost ones.

Invariant: all members get one verdict, that of the first of them; a member that is not in it leaves.
Source: two-phase commit, Gray 1978, Notes on Data Base Operating Systems, section 5.8.3.3.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import NamedTuple

from paceline.errors import CommunicationError, DeadlineError
from paceline.job.membership import JobMembership, members_gone_error
from paceline.job.store_client import KeyTimeoutError, MemberLostError

_LOSS_DETECTION_SECONDS = 10.0  # peers can see a connection end before the store counts the process as gone
_POLL_SECONDS = 0.02


class CommitVerdict(NamedTuple):
    """The result of a vote.

    Args:
        done: all remaining members have completed the collective.
        remaining: the ranks that are not lost, ascending.
    """

    done: bool
    remaining: tuple[int, ...]


class CommitProtocol:
    """The votes of one member.

    Args:
        seconds: how much longer than the first member another one can take before it votes.
    Wire: two small messages per rank and vote, to and from the store of the job.
    """

    def __init__(self, membership: JobMembership, seconds: float) -> None:
        self._membership, self._store, self._seconds = membership, membership.store, seconds
        self._turn, self._last_verdict_key = 0, ""

    def vote(self, ranks: Sequence[int], *, done: bool) -> CommitVerdict:
        """Vote on whether this member has completed a collective; collective over `ranks`.

        Args:
            ranks: the ranks that vote; the first one counts the votes.
        Raises:
            CommunicationError: the first rank is gone, or the others continue without this one.
            DeadlineError: the first rank gives no verdict.
        """
        first, rank = ranks[0], self._membership.rank
        prefix = f"{self._membership.prefix}/commit/{self._turn}"
        if rank == first:
            verdict = self._count(ranks, prefix, done)
            self._store.set(f"{prefix}/verdict", json.dumps(verdict))
            self._delete_old_keys(ranks, prefix)
        else:
            self._store.set(f"{prefix}/{rank}", str(int(done)))
            verdict = self._receive_verdict(first, prefix)
        self._turn += 1
        if rank not in verdict.remaining:
            raise CommunicationError(
                f"the other ranks have continued without rank {rank}: it did not respond in time",
                next_step="look at what this rank did in that time, or raise runtime.deadline_seconds",
            )
        return verdict

    def _count(self, ranks: Sequence[int], prefix: str, first_done: bool) -> CommitVerdict:
        """Collect all votes, and leave out ranks that are lost."""
        first, *others = ranks
        votes = {first: first_done} | self._collect_votes(others, prefix)
        # all have voted, but for some a peer was lost in the collective: it has voted and ended since
        if not all(votes.values()) and len(votes) == len(ranks):
            lost_ranks = self._wait_for_lost_voters(ranks)
            votes = {rank: vote for rank, vote in votes.items() if rank not in lost_ranks}
        return CommitVerdict(all(votes.values()), tuple(sorted(votes)))

    def _collect_votes(self, ranks: Sequence[int], prefix: str) -> dict[int, bool]:
        """Return the votes by rank, without ranks that are lost or do not vote in time."""
        members, expected = self._membership.members, set(ranks)
        expires = time.monotonic() + self._seconds
        votes: dict[int, bool] = {}
        while expected - votes.keys():
            keys = {f"{prefix}/{rank}": rank for rank in sorted(expected)}
            try:
                seconds = max(0.0, expires - time.monotonic())
                values = self._store.wait_for_keys(
                    [*keys], seconds, [members[rank] for rank in keys.values()]
                )
                votes = {rank: vote == b"1" for rank, vote in zip(keys.values(), values, strict=True)}
            except MemberLostError as lost:
                expected -= {rank for rank in expected if members[rank] in lost.members}
            except KeyTimeoutError as late:
                expected -= {keys[key] for key in late.keys}
        return votes

    def _wait_for_lost_voters(self, ranks: Sequence[int]) -> set[int]:
        """Wait until the store counts ranks as gone that ended after their vote; returns them."""
        members = self._membership.members
        expires = time.monotonic() + min(_LOSS_DETECTION_SECONDS, self._seconds)
        while True:
            lost_members = self._store.lost()
            lost_ranks = {rank for rank in ranks if members[rank] in lost_members}
            if lost_ranks or time.monotonic() >= expires:
                return lost_ranks
            time.sleep(_POLL_SECONDS)

    def _delete_old_keys(self, ranks: Sequence[int], prefix: str) -> None:
        """Delete the counted votes and the previous verdict, which every rank that voted again has read."""
        for rank in ranks[1:]:
            self._store.delete_key(f"{prefix}/{rank}")
        self._store.delete_key(self._last_verdict_key)
        self._last_verdict_key = f"{prefix}/verdict"

    def _receive_verdict(self, first: int, prefix: str) -> CommitVerdict:
        members = self._membership.members
        try:
            # the first rank waits for votes itself, so it gets longer than a vote takes
            seconds = 2 * self._seconds + _LOSS_DETECTION_SECONDS
            verdict = self._store.wait_for_keys([f"{prefix}/verdict"], seconds, [members[first]])[0]
        except MemberLostError as lost:
            raise members_gone_error(
                members, lost.members, "before it had counted the votes of the others"
            ) from lost
        except KeyTimeoutError as late:
            raise DeadlineError(
                f"rank {first} has sent no verdict on the vote",
                next_step="look at what that rank does, or raise runtime.deadline_seconds",
            ) from late
        done, remaining = json.loads(verdict)
        return CommitVerdict(done, tuple(remaining))
