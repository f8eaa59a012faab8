"""Whether all members that are left have done a thing together: each votes, and one of them counts.

Where a member is lost in a collective, some of the others may have got through it, and some not. After the
vote all know the same: it is done on all that are left, or they do it again without those that are lost.

Invariant: all members hear one verdict, that of the first of them; who is not in it leaves.
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

_LOSS_DETECTION_SECONDS = (
    10.0  # until it is known that a process has ended, whose connections others have seen end
)
_POLL_SECONDS = 0.02


class CommitVerdict(NamedTuple):
    """What the vote has shown.

    Args:
        done: all that are left have done it.
        left: the ranks that were not lost, ascending.
    """

    done: bool
    left: tuple[int, ...]


class CommitProtocol:
    """The votes of one member.

    Args:
        seconds: how much longer than the first member another one may take before it votes.
    Wire: for each vote two small messages a rank, to and from the store of the job.
    """

    def __init__(self, membership: JobMembership, seconds: float) -> None:
        self._membership, self._store, self._seconds = membership, membership.store, seconds
        self._turn, self._last = 0, ""

    def vote(self, ranks: Sequence[int], *, done: bool) -> CommitVerdict:
        """Say whether this member has done it; collective over these ranks, of which the first counts.

        Raises:
            CommunicationError: the first one is gone, or the others go on without this one.
            DeadlineError: the first one says nothing.
        """
        first, mine = ranks[0], self._membership.rank
        place = f"{self._membership.place}/commit/{self._turn}"
        if mine == first:
            verdict = self._count(ranks, place, done)
            self._store.set(f"{place}/verdict", json.dumps(verdict))
            self._forget(ranks, place)
        else:
            self._store.set(f"{place}/{mine}", str(int(done)))
            verdict = self._hear(first, place)
        self._turn += 1
        if mine not in verdict.left:
            raise CommunicationError(
                f"the other ranks have gone on without rank {mine}: it was silent until their deadline",
                next_step="look at what this rank did meanwhile, or raise runtime.deadline_seconds",
            )
        return verdict

    def _count(self, ranks: Sequence[int], place: str, mine: bool) -> CommitVerdict:
        """Wait for all votes, and for word of those that do not come."""
        first, *others = ranks
        votes = {first: mine} | self._collect_votes(others, place)
        if not all(votes.values()) and len(votes) == len(ranks):
            votes = {
                rank: vote for rank, vote in votes.items() if rank not in self._wait_for_lost_voters(ranks)
            }
        return CommitVerdict(all(votes.values()), tuple(sorted(votes)))

    def _collect_votes(self, ranks: Sequence[int], place: str) -> dict[int, bool]:
        """The votes by rank, without those that are lost, or silent."""
        members, expected = self._membership.members, set(ranks)
        expires = time.monotonic() + self._seconds
        found: dict[int, bool] = {}
        while expected - found.keys():
            keys = {f"{place}/{rank}": rank for rank in sorted(expected)}
            try:
                seconds = max(0.0, expires - time.monotonic())
                said = self._store.wait_for_keys([*keys], seconds, [members[rank] for rank in keys.values()])
                found = {rank: vote == b"1" for rank, vote in zip(keys.values(), said, strict=True)}
            except MemberLostError as lost:
                expected -= {rank for rank in expected if members[rank] in lost.members}
            except KeyTimeoutError as late:
                expected -= {keys[key] for key in late.keys}
        return found

    def _wait_for_lost_voters(self, ranks: Sequence[int]) -> set[int]:
        """Those that have ended after their vote, which the store hears a moment after the others."""
        members = self._membership.members
        expires = time.monotonic() + min(_LOSS_DETECTION_SECONDS, self._seconds)
        while True:
            lost = self._store.lost()
            found = {rank for rank in ranks if members[rank] in lost}
            if found or time.monotonic() >= expires:
                return found
            time.sleep(_POLL_SECONDS)

    def _forget(self, ranks: Sequence[int], place: str) -> None:
        """The votes, which are counted, and the last verdict, which all that have voted since have heard."""
        for rank in ranks[1:]:
            self._store.delete_key(f"{place}/{rank}")
        self._store.delete_key(self._last)
        self._last = f"{place}/verdict"

    def _hear(self, first: int, place: str) -> CommitVerdict:
        """What the first one says, which may wait for others."""
        members = self._membership.members
        try:
            seconds = 2 * self._seconds + _LOSS_DETECTION_SECONDS
            said = self._store.wait_for_keys([f"{place}/verdict"], seconds, [members[first]])[0]
        except MemberLostError as lost:
            raise members_gone_error(
                members, lost.members, "before it had counted the votes of the others"
            ) from lost
        except KeyTimeoutError as late:
            raise DeadlineError(
                f"rank {first} has not said who is left",
                next_step="look at what that rank does, or raise runtime.deadline_seconds",
            ) from late
        done, left = json.loads(said)
        return CommitVerdict(done, tuple(left))
