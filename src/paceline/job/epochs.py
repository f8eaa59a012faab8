"""How the members of a job agree on who goes on: the first membership, the next one, and who joins.

The first whose answer reaches the store decides for all; who was left out is told so. `choose_members` is pure.
Source: the write-once register of a consensus object, Herlihy 1991, Wait-Free Synchronization (the store's
compare-and-set is one).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.errors import CommunicationError, DeadlineError
from paceline.job.membership import (
    JobMembership,
    MembershipGroups,
    SetupDeadline,
    members_gone_error,
    wait_for_members,
)
from paceline.job.store_client import KeyTimeoutError, MemberLostError

if TYPE_CHECKING:
    import torch

    from paceline.job.torch_store import Store

_JOIN_REQUESTS_KEY = "joining"
_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class MemberCandidate:
    """A process that wants to be a member.

    Args:
        number: its own, and nobody else's.
        note: what it tells the others about itself.
        device: NCCL beside Gloo on "cuda".
        seconds: the deadline of every wait but that for the other processes of a job that begins.
        life: tells this process from one that had its number before, which a launcher has started anew.
    """

    number: int
    note: str
    store: Store
    device: torch.device
    seconds: float
    life: str = ""


@dataclass(frozen=True)
class InitialRendezvous:
    """Where and how long the processes of a job that begins wait for each other.

    Args:
        size: the number of processes.
        attempt: how often an agent has restarted the job; keeps the keys of each attempt apart.
        job: what is begun, for errors.
        patience: with the others: starting Python and PyTorch may take minutes.
    """

    size: int
    attempt: int
    job: str
    patience: SetupDeadline


def form_first_membership(candidate: MemberCandidate, meeting: InitialRendezvous) -> JobMembership:
    """The first membership of a job, of the processes 0 to `size` - 1; it has no groups until they begin.

    Raises:
        CommunicationError: the sizes differ, or a process is gone.
        DeadlineError: some processes did not come in time; names them.
    """
    store, number, job = candidate.store, candidate.number, meeting.job
    start = f"{meeting.attempt}.{store.add(f'{meeting.attempt}/starts/{number}/{candidate.life}', 1)}"
    everyone = range(meeting.size)
    try:
        _check_world_size(candidate, meeting, f"{start}/size")
        store.set(f"{start}/here/{number}", f"{candidate.life} {candidate.note}")
        lives, notes = _wait_for_same_processes(candidate, meeting, start)
    except MemberLostError as lost:
        raise members_gone_error(everyone, lost.members, f"before {job} had met") from lost
    return _build_membership(candidate, f"{start}.{lives}", 0, tuple(everyone), tuple(notes))


def _wait_for_same_processes(
    candidate: MemberCandidate, meeting: InitialRendezvous, start: str
) -> tuple[str, list[str]]:
    """A name for the processes that are here, by their lives, and their notes, when all of them see the same.

    One that has been started anew has another life than the one whose words others may have read.
    """
    store, everyone, left = candidate.store, range(meeting.size), meeting.patience
    expires = time.monotonic() + left.seconds
    while True:
        keys = [f"{start}/here/{one}" for one in everyone]
        said = [one.decode() for one in wait_for_members(store, keys, everyone, "joined", left)]
        lives = hashlib.sha256(" ".join(one.partition(" ")[0] for one in said).encode()).hexdigest()[:16]
        seen = [f"{start}/seen/{lives}/{one}" for one in everyone]
        store.set(seen[candidate.number], "1")
        left = replace(left, seconds=max(0.0, expires - time.monotonic()))
        try:
            store.wait_for_keys(seen, min(_POLL_SECONDS, left.seconds), everyone)
            return lives, [one.partition(" ")[2] for one in said]
        except KeyTimeoutError:
            if left.seconds < _POLL_SECONDS:
                wait_for_members(store, seen, everyone, "joined", left)


def _check_world_size(candidate: MemberCandidate, meeting: InitialRendezvous, key: str) -> None:
    """Leave if the others expect another number of processes, and tell the user of rank 0."""
    store, job = candidate.store, meeting.job
    if candidate.number == 0:
        store.set(key, str(meeting.size))
        return
    done = f"started {job}"
    found = int(wait_for_members(store, [key], (0,), done, meeting.patience)[0])
    if found != meeting.size:
        what = f"Rank {candidate.number} expects {meeting.size} processes, {job} has {found}."
        store.tell(what)
        raise CommunicationError(
            what, next_step="give all nodes the same --nodes and the same number of processes"
        )


def form_next_membership(membership: JobMembership, seconds: float) -> JobMembership:
    """The membership after this one; every member that goes on calls it, between two steps or after an error.

    Those that are gone are out, those that have asked to join are in, and those that are silent until the
    deadline are out as well. The groups of the old one end here.

    Args:
        seconds: how long to wait for members that are alive and do not call.
    Raises:
        CommunicationError: the others have gone on without this process, or cannot be reached.
    """
    store, number = membership.store, membership.number
    membership.abort()
    store.set(f"{membership.continuation_key}/{number}", membership.notes[membership.rank])
    present = _collect_continuing_members(membership, seconds)
    joining = _join_requests(store)
    members = choose_members(membership.members, present, joining, store.lost())
    notes = [_member_note(membership, one) for one in members]
    proposal = json.dumps({"members": members, "notes": notes})
    agreed = store.compare_set(f"{membership.place}/next/agreed", "", proposal).decode()
    found = json.loads(agreed)
    start, epoch = membership.place.rpartition("/")[0], membership.epoch + 1
    for one in found["members"]:
        if one not in membership.members:
            store.set(
                f"{_JOIN_REQUESTS_KEY}/{one}/invited", json.dumps({**found, "start": start, "epoch": epoch})
            )
    membership.groups.end()
    device = membership.groups.device
    candidate = MemberCandidate(number, "", store, device, membership.groups.seconds)
    return _enter_membership(candidate, start, epoch, tuple(found["members"]), tuple(found["notes"]))


def join_running_job(candidate: MemberCandidate) -> JobMembership:
    """Wait until the members of a job take this process in, at their next change.

    Raises:
        DeadlineError: they did not.
    """
    store, number = candidate.store, candidate.number
    store.set(f"{_JOIN_REQUESTS_KEY}/{number}", candidate.note)
    store.append(_JOIN_REQUESTS_KEY, f"{number},")
    try:
        invitation = store.wait_for_keys([f"{_JOIN_REQUESTS_KEY}/{number}/invited"], candidate.seconds)[0]
    except KeyTimeoutError as late:
        raise _deadline_error("the members of the job did not let this process join") from late
    found = json.loads(invitation)
    return _enter_membership(
        candidate, found["start"], found["epoch"], tuple(found["members"]), tuple(found["notes"])
    )


def choose_members(
    members: Sequence[int], present: Collection[int], joining: Sequence[int], lost: Collection[int]
) -> list[int]:
    """Who is in the next membership, by rank: those that go on in their order, then those that are new; pure.

    Args:
        members: of the present one.
        present: those of them that want to go on.
        joining: processes that have asked to join, perhaps long ago.
        lost: processes that are gone.
    """
    stay = [one for one in members if one in present]
    new = sorted({one for one in joining if one not in members and one not in lost})
    return stay + new


def _collect_continuing_members(membership: JobMembership, seconds: float) -> set[int]:
    """The members that want to: all that are alive, unless they leave, or are silent."""
    expected = set(membership.members)
    expires = time.monotonic() + seconds
    while True:
        keys = {f"{membership.continuation_key}/{one}": one for one in sorted(expected)}
        try:
            left = max(0.0, expires - time.monotonic())
            notes = membership.store.wait_for_keys(list(keys), left, sorted(expected))
            return {one for one, note in zip(keys.values(), notes, strict=True) if note}
        except MemberLostError as lost:
            expected -= set(lost.members)
        except KeyTimeoutError as late:
            expected -= {keys[key] for key in late.keys}


def _join_requests(store: Store) -> list[int]:
    if not store.check([_JOIN_REQUESTS_KEY]):
        return []
    return [int(one) for one in store.get(_JOIN_REQUESTS_KEY).decode().split(",") if one]


def _member_note(membership: JobMembership, number: int) -> str:
    place = membership.continuation_key if number in membership.members else _JOIN_REQUESTS_KEY
    return membership.store.get(f"{place}/{number}").decode()


def _enter_membership(
    candidate: MemberCandidate, start: str, epoch: int, members: tuple[int, ...], notes: tuple[str, ...]
) -> JobMembership:
    """Take this process's place, and make the group of all members; collective."""
    membership = _build_membership(candidate, start, epoch, members, notes)
    membership.groups.begin()
    return membership


def _build_membership(
    candidate: MemberCandidate, start: str, epoch: int, members: tuple[int, ...], notes: tuple[str, ...]
) -> JobMembership:
    """This process's place among the members, before there is a group."""
    if candidate.number not in members:
        raise CommunicationError(
            f"the other ranks have gone on without this one: it was silent until their deadline"
            f" (process {candidate.number}, membership {epoch})",
            next_step="look at what this rank did meanwhile, or raise runtime.deadline_seconds",
        )
    rank, place, store = members.index(candidate.number), f"{start}/{epoch}", candidate.store
    groups = MembershipGroups(store, place, members, rank, candidate.device, candidate.seconds)
    return JobMembership(epoch, members, rank, notes, place, store, groups)


def _deadline_error(what: str) -> DeadlineError:
    return DeadlineError(
        f"At the deadline {what}.",
        next_step="look at the logs of those ranks, or raise runtime.deadline_seconds",
    )
