"""Agreement on the members of a job: the first membership, the next one, and processes that join.

The first member whose proposal reaches the store decides for all; a process that is not in it gets an error.
`choose_members` is pure.
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

from paceline.errors import CommunicationError, DeadlineError, format_count
from paceline.job.membership import (
    JobMembership,
    MembershipGroups,
    SetupDeadline,
    members_gone_error,
    wait_for_members,
)
from paceline.job.standby_store import move_to_standby_store
from paceline.job.store_client import KeyTimeoutError, MemberLostError, StoreLostError

if TYPE_CHECKING:
    import torch

    from paceline.job.torch_store import Store

_JOIN_REQUESTS_KEY = "joining"
_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class MemberCandidate:
    """A process that wants to be a member.

    Args:
        number: its number, which no other process of the job has had.
        note: what it tells the others about itself.
        device: on "cuda", groups have NCCL in addition to Gloo.
        seconds: the deadline of every wait, except that for the other processes when a job begins.
        life: tells this process from an earlier one with the same number, which a launcher has restarted.
    """

    number: int
    note: str
    store: Store
    device: torch.device
    seconds: float
    life: str = ""


@dataclass(frozen=True)
class InitialRendezvous:
    """The parameters of the first meeting of all processes of a job.

    Args:
        size: number of processes.
        attempt: number of restarts by an agent; keeps the keys of each attempt apart.
        job: description of the job, for errors.
        setup: how long to wait for the others: starting Python and PyTorch can take minutes.
    """

    size: int
    attempt: int
    job: str
    setup: SetupDeadline


def form_first_membership(candidate: MemberCandidate, meeting: InitialRendezvous) -> JobMembership:
    """Return the first membership of a job, of the processes 0 to `size` - 1, without any groups yet.

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
        raise members_gone_error(
            everyone, lost.members, f"before all processes of {job} had connected"
        ) from lost
    return _build_membership(candidate, f"{start}.{lives}", 0, tuple(everyone), tuple(notes))


def _wait_for_same_processes(
    candidate: MemberCandidate, meeting: InitialRendezvous, start: str
) -> tuple[str, list[str]]:
    """Wait until all processes see the same processes; returns a hash of their lives, and their notes."""
    store, everyone, deadline = candidate.store, range(meeting.size), meeting.setup
    expires = time.monotonic() + deadline.seconds
    while True:
        keys = [f"{start}/here/{number}" for number in everyone]
        entries = [
            value.decode().partition(" ")
            for value in wait_for_members(store, keys, everyone, "joined", deadline)
        ]
        # a launcher can restart a process after others have read the entry of the one before it
        lives = hashlib.sha256(" ".join(life for life, _, _ in entries).encode()).hexdigest()[:16]
        seen = [f"{start}/seen/{lives}/{number}" for number in everyone]
        store.set(seen[candidate.number], "1")
        deadline = replace(deadline, seconds=max(0.0, expires - time.monotonic()))
        try:
            store.wait_for_keys(seen, min(_POLL_SECONDS, deadline.seconds), everyone)
            return lives, [note for _, _, note in entries]
        except KeyTimeoutError:
            if deadline.seconds < _POLL_SECONDS:
                wait_for_members(store, seen, everyone, "joined", deadline)


def _check_world_size(candidate: MemberCandidate, meeting: InitialRendezvous, key: str) -> None:
    """Raise an error, and log it where the store is served, if rank 0 expects another number of processes."""
    store, job = candidate.store, meeting.job
    if candidate.number == 0:
        store.set(key, str(meeting.size))
        return
    size = int(wait_for_members(store, [key], (0,), f"started {job}", meeting.setup)[0])
    if size != meeting.size:
        what = (
            f"rank {candidate.number} expects {format_count(meeting.size, 'process')}, but {job} has {size}"
        )
        store.log_text(what)
        raise CommunicationError(
            what, next_step="use the same --nodes and the same number of processes on all nodes"
        )


def form_next_membership(membership: JobMembership, seconds: float, *, admits: bool = True) -> JobMembership:
    """Return the next membership; every member that continues calls this, between steps or after an error.

    Members that are gone, or that do not call until the deadline, are left out; processes that have asked to
    join are admitted. The groups of the present membership end here. If the store is lost with the launcher
    that served it, the other members meet in that of another node.

    Args:
        seconds: how long to wait for members that are alive and do not call.
        admits: whether processes that have asked to join are admitted; equal on all members.
    Raises:
        CommunicationError: the others have continued without this process, or cannot be reached.
    """
    gone: frozenset[int] = frozenset()
    while True:
        try:
            membership = _agree_on_next(membership, seconds, gone, admits=admits)
            membership.groups.begin()
            return membership
        except StoreLostError as error:
            membership, gone = move_to_standby_store(membership, error)


def _agree_on_next(
    membership: JobMembership, seconds: float, gone: frozenset[int], *, admits: bool
) -> JobMembership:
    """Return the next membership as this process sees it, before there is a group.

    Args:
        gone: members that are known to be gone, which the store may not know.
    """
    store, number = membership.store, membership.number
    membership.abort()
    store.set(f"{membership.continuation_key}/{number}", membership.notes[membership.rank])
    present = _collect_continuing_members(membership, seconds, gone)
    joining = _join_requests(store) if admits else []
    members = choose_members(membership.members, present, joining, store.lost())
    notes = [_member_note(membership, member) for member in members]
    proposal = json.dumps({"members": members, "notes": notes})
    # the first proposal wins: compare_set returns it to all members, whatever they have proposed
    agreed = json.loads(store.compare_set(f"{membership.prefix}/next/agreed", "", proposal))
    start, epoch = membership.prefix.rpartition("/")[0], membership.epoch + 1
    invitation = json.dumps({**agreed, "start": start, "epoch": epoch})
    for member in agreed["members"]:
        if member not in membership.members:
            store.set(f"{_JOIN_REQUESTS_KEY}/{member}/invited", invitation)
    membership.groups.end()
    device = membership.groups.device
    candidate = MemberCandidate(number, "", store, device, membership.groups.seconds)
    return _build_membership(candidate, start, epoch, tuple(agreed["members"]), tuple(agreed["notes"]))


def join_running_job(candidate: MemberCandidate) -> JobMembership:
    """Wait until the members of a job admit this process, at their next change.

    Raises:
        DeadlineError: they did not.
    """
    store, number = candidate.store, candidate.number
    store.set(f"{_JOIN_REQUESTS_KEY}/{number}", candidate.note)
    store.append(_JOIN_REQUESTS_KEY, f"{number},")
    try:
        invitation = store.wait_for_keys([f"{_JOIN_REQUESTS_KEY}/{number}/invited"], candidate.seconds)[0]
    except KeyTimeoutError as late:
        raise DeadlineError(
            "the members of the job did not admit this process in time",
            next_step="look at the logs of those ranks, or raise runtime.deadline_seconds",
        ) from late
    agreed = json.loads(invitation)
    return _enter_membership(
        candidate, agreed["start"], agreed["epoch"], tuple(agreed["members"]), tuple(agreed["notes"])
    )


def waiting_processes(membership: JobMembership) -> list[int]:
    """Return the numbers of processes that have asked to join and can be admitted now."""
    store, members = membership.store, membership.members
    joining = _join_requests(store)
    new = set(joining).difference(members)
    return sorted(new - store.lost()) if new else []


def choose_members(
    members: Sequence[int], present: Collection[int], joining: Sequence[int], lost_members: Collection[int]
) -> list[int]:
    """Return the next members by rank: the remaining ones in their order, then the new ones; pure.

    Args:
        members: of the present membership.
        present: members that want to continue.
        joining: processes that have asked to join and were not admitted yet.
        lost_members: processes that are gone.
    """
    remaining = [number for number in members if number in present]
    new = sorted({number for number in joining if number not in members and number not in lost_members})
    return remaining + new


def _collect_continuing_members(membership: JobMembership, seconds: float, gone: frozenset[int]) -> set[int]:
    """Return the members that continue: all that are alive, unless they leave or do not call in time."""
    expected = set(membership.members) - gone
    expires = time.monotonic() + seconds
    while True:
        keys = {f"{membership.continuation_key}/{number}": number for number in sorted(expected)}
        try:
            remaining = max(0.0, expires - time.monotonic())
            notes = membership.store.wait_for_keys(list(keys), remaining, sorted(expected))
            return {number for number, note in zip(keys.values(), notes, strict=True) if note}
        except MemberLostError as lost:
            expected -= set(lost.members)
        except KeyTimeoutError as late:
            expected -= {keys[key] for key in late.keys}


def _join_requests(store: Store) -> list[int]:
    """Return the processes that have asked to join and were not admitted yet."""
    if not store.check([_JOIN_REQUESTS_KEY]):
        return []
    asked = [int(number) for number in store.get(_JOIN_REQUESTS_KEY).decode().split(",") if number]
    # A member that has joined and left again must not be waited for at the next change.
    return [number for number in asked if not store.check([f"{_JOIN_REQUESTS_KEY}/{number}/invited"])]


def _member_note(membership: JobMembership, number: int) -> str:
    prefix = membership.continuation_key if number in membership.members else _JOIN_REQUESTS_KEY
    return membership.store.get(f"{prefix}/{number}").decode()


def _enter_membership(
    candidate: MemberCandidate, start: str, epoch: int, members: tuple[int, ...], notes: tuple[str, ...]
) -> JobMembership:
    """Become a member and create the group of all members; collective."""
    membership = _build_membership(candidate, start, epoch, members, notes)
    membership.groups.begin()
    return membership


def _build_membership(
    candidate: MemberCandidate, start: str, epoch: int, members: tuple[int, ...], notes: tuple[str, ...]
) -> JobMembership:
    """Return the membership as this process sees it, before there is a group."""
    if candidate.number not in members:
        raise CommunicationError(
            f"the other ranks have continued without this one, which did not respond in time"
            f" (process {candidate.number}, membership {epoch})",
            next_step="look at what this rank did in that time, or raise runtime.deadline_seconds",
        )
    rank, prefix, store = members.index(candidate.number), f"{start}/{epoch}", candidate.store
    groups = MembershipGroups(store, prefix, members, rank, candidate.device, candidate.seconds)
    return JobMembership(epoch, members, rank, notes, prefix, store, groups)
