"""How the members of a job agree on who goes on: the first membership, the next one, and who joins.

The first whose answer reaches the store decides for all; who was left out is told so. `decide` is pure.
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
from paceline.membership import Groups, Membership
from paceline.missing import Patience, await_members, gone
from paceline.store import Late, Lost

if TYPE_CHECKING:
    import torch

    from paceline.store.torch_store import Store

_ASKED_TO_JOIN = "joining"
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Candidate:
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
class Meeting:
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
    patience: Patience


def meet(candidate: Candidate, meeting: Meeting) -> Membership:
    """The first membership of a job, of the processes 0 to `size` - 1; it has no groups until they begin.

    Raises:
        CommunicationError: the sizes differ, or a process is gone.
        DeadlineError: some processes did not come in time; names them.
    """
    store, number, job = candidate.store, candidate.number, meeting.job
    start = f"{meeting.attempt}.{store.add(f'{meeting.attempt}/starts/{number}/{candidate.life}', 1)}"
    everyone = range(meeting.size)
    try:
        _require_size(candidate, meeting, f"{start}/size")
        store.set(f"{start}/here/{number}", f"{candidate.life} {candidate.note}")
        lives, notes = _those_that_met(candidate, meeting, start)
    except Lost as lost:
        raise gone(everyone, lost.members, f"before {job} had met") from lost
    return _place(candidate, f"{start}.{lives}", 0, tuple(everyone), tuple(notes))


def _those_that_met(candidate: Candidate, meeting: Meeting, start: str) -> tuple[str, list[str]]:
    """A name for the processes that are here, by their lives, and their notes, when all of them see the same.

    One that has been started anew has another life than the one whose words others may have read.
    """
    store, everyone, left = candidate.store, range(meeting.size), meeting.patience
    expires = time.monotonic() + left.seconds
    while True:
        keys = [f"{start}/here/{one}" for one in everyone]
        said = [one.decode() for one in await_members(store, keys, everyone, "joined", left)]
        lives = hashlib.sha256(" ".join(one.partition(" ")[0] for one in said).encode()).hexdigest()[:16]
        seen = [f"{start}/seen/{lives}/{one}" for one in everyone]
        store.set(seen[candidate.number], "1")
        left = replace(left, seconds=max(0.0, expires - time.monotonic()))
        try:
            store.await_keys(seen, min(_LOOK_SECONDS, left.seconds), everyone)
            return lives, [one.partition(" ")[2] for one in said]
        except Late:
            if left.seconds < _LOOK_SECONDS:
                await_members(store, seen, everyone, "joined", left)


def _require_size(candidate: Candidate, meeting: Meeting, key: str) -> None:
    """Leave if the others expect another number of processes, and tell the user of rank 0."""
    store, job = candidate.store, meeting.job
    if candidate.number == 0:
        store.set(key, str(meeting.size))
        return
    done = f"started {job}"
    found = int(await_members(store, [key], (0,), done, meeting.patience)[0])
    if found != meeting.size:
        what = f"Rank {candidate.number} expects {meeting.size} processes, {job} has {found}."
        store.tell(what)
        raise CommunicationError(
            what, next_step="give all nodes the same --nodes and the same number of processes"
        )


def follow(membership: Membership, seconds: float) -> Membership:
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
    store.set(f"{membership.ballot}/{number}", membership.notes[membership.rank])
    present = _who_goes_on(membership, seconds)
    joining = _asked_to_join(store)
    members = decide(membership.members, present, joining, store.lost())
    notes = [_note(membership, one) for one in members]
    proposal = json.dumps({"members": members, "notes": notes})
    agreed = store.compare_set(f"{membership.place}/next/agreed", "", proposal).decode()
    found = json.loads(agreed)
    start, epoch = membership.place.rpartition("/")[0], membership.epoch + 1
    for one in found["members"]:
        if one not in membership.members:
            store.set(
                f"{_ASKED_TO_JOIN}/{one}/invited", json.dumps({**found, "start": start, "epoch": epoch})
            )
    membership.groups.end()
    device = membership.groups.device
    candidate = Candidate(number, "", store, device, membership.groups.seconds)
    return _enter(candidate, start, epoch, tuple(found["members"]), tuple(found["notes"]))


def join(candidate: Candidate) -> Membership:
    """Wait until the members of a job take this process in, at their next change.

    Raises:
        DeadlineError: they did not.
    """
    store, number = candidate.store, candidate.number
    store.set(f"{_ASKED_TO_JOIN}/{number}", candidate.note)
    store.append(_ASKED_TO_JOIN, f"{number},")
    try:
        invitation = store.await_keys([f"{_ASKED_TO_JOIN}/{number}/invited"], candidate.seconds)[0]
    except Late as late:
        raise _late("the members of the job did not let this process join") from late
    found = json.loads(invitation)
    return _enter(candidate, found["start"], found["epoch"], tuple(found["members"]), tuple(found["notes"]))


def decide(
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


def _who_goes_on(membership: Membership, seconds: float) -> set[int]:
    """The members that want to: all that are alive, unless they leave, or are silent."""
    expected = set(membership.members)
    expires = time.monotonic() + seconds
    while True:
        keys = {f"{membership.ballot}/{one}": one for one in sorted(expected)}
        try:
            left = max(0.0, expires - time.monotonic())
            notes = membership.store.await_keys(list(keys), left, sorted(expected))
            return {one for one, note in zip(keys.values(), notes, strict=True) if note}
        except Lost as lost:
            expected -= set(lost.members)
        except Late as late:
            expected -= {keys[key] for key in late.keys}


def _asked_to_join(store: Store) -> list[int]:
    if not store.check([_ASKED_TO_JOIN]):
        return []
    return [int(one) for one in store.get(_ASKED_TO_JOIN).decode().split(",") if one]


def _note(membership: Membership, number: int) -> str:
    place = membership.ballot if number in membership.members else _ASKED_TO_JOIN
    return membership.store.get(f"{place}/{number}").decode()


def _enter(
    candidate: Candidate, start: str, epoch: int, members: tuple[int, ...], notes: tuple[str, ...]
) -> Membership:
    """Take this process's place, and make the group of all members; collective."""
    membership = _place(candidate, start, epoch, members, notes)
    membership.groups.begin()
    return membership


def _place(
    candidate: Candidate, start: str, epoch: int, members: tuple[int, ...], notes: tuple[str, ...]
) -> Membership:
    """This process's place among the members, before there is a group."""
    if candidate.number not in members:
        raise CommunicationError(
            f"the other ranks have gone on without this one: it was silent until their deadline"
            f" (process {candidate.number}, membership {epoch})",
            next_step="look at what this rank did meanwhile, or raise runtime.deadline_seconds",
        )
    rank, place, store = members.index(candidate.number), f"{start}/{epoch}", candidate.store
    groups = Groups(store, place, members, rank, candidate.device, candidate.seconds)
    return Membership(epoch, members, rank, notes, place, store, groups)


def _late(what: str) -> DeadlineError:
    return DeadlineError(
        f"At the deadline {what}.",
        next_step="look at the logs of those ranks, or raise runtime.deadline_seconds",
    )
