"""The members of a job between two changes, their process groups, and waits for each other.

A membership is a value: it does not change. When a process leaves or joins, the remaining ones agree on the
next membership through the store and create their groups again, in the same processes (docs/adr/0012). A
process can train more than once, and the threads of a group wake up even if nothing is sent; so each session
leases its groups and gives them back.

Invariants: every wait has a deadline and names the ranks that it waits for. Groups of one membership are
created in the same order on all of their members. A member ends no group that another can still use, and
never waits for permission: it checks whether all have given a lease back when the next lease begins or
creates groups.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.errors import CommunicationError, DeadlineError
from paceline.job.process_group import (
    OwnedProcessGroup,
    end_world,
    make_subgroup,
    make_world,
    mark_abandoned,
    release_in_background,
)
from paceline.job.store_client import KeyTimeoutError, MemberLostError, StoreLostError

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store as TorchStore

    from paceline.job.torch_store import Store

LOG_INTERVAL_SECONDS = 10.0


@dataclass(frozen=True)
class SetupDeadline:
    """Deadline of the set-up, and the function that logs now and then which ranks are missing."""

    seconds: float
    log: Callable[[str], object] = lambda text: None


def wait_for_members(
    store: Store, keys: Sequence[str], members: Sequence[int], what: str, deadline: SetupDeadline
) -> list[bytes]:
    """Wait until all `keys` exist, one for each rank; returns their values.

    Args:
        what: what a rank has done that has set its key, as in "built the task".
    Raises:
        DeadlineError: some ranks have not set theirs in time; names them.
        MemberLostError: some of `members` are gone.
    """
    began = time.monotonic()
    while True:
        remaining = began + deadline.seconds - time.monotonic()
        try:
            return store.wait_for_keys(keys, max(0.0, min(remaining, LOG_INTERVAL_SECONDS)), members)
        except KeyTimeoutError as late:
            ranks = [rank for rank, key in enumerate(keys) if key in late.keys]
            missing, has = format_ranks(ranks), "have" if len(ranks) > 1 else "has"
            if remaining <= LOG_INTERVAL_SECONDS:
                raise DeadlineError(
                    f"{missing} {has} not {what} within {deadline.seconds:g} s",
                    next_step="look at what that rank does, or raise runtime.setup_deadline_seconds",
                ) from late
            passed = time.monotonic() - began
            deadline.log(f"waiting until {missing} {has} {what}: {passed:.0f} s of {deadline.seconds:g} s")


def members_gone_error(members: Sequence[int], lost_members: Sequence[int], when: str) -> CommunicationError:
    """Return the error to raise when members are gone.

    Args:
        members: the numbers of all processes, by rank.
        lost_members: the numbers of those that are gone.
    """
    ranks = [rank for rank, number in enumerate(members) if number in lost_members]
    return CommunicationError(
        f"{format_ranks(ranks)} left {when}", next_step="look at the first rank that ended: it is the cause"
    )


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as in "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class GroupLease:
    """The process groups that one user of a membership creates, such as a session.

    Args:
        key: prefix of the keys in the store that tell which members have given the lease back.
    """

    def __init__(self, groups: MembershipGroups, key: str) -> None:
        self._groups, self._key = groups, key
        self.created: list[OwnedProcessGroup] = []
        self._ranks: set[int] = set()
        self._is_given_back = False

    @property
    def world(self) -> OwnedProcessGroup | None:
        """The group of all members, which outlives every lease."""
        return self._groups.world

    @property
    def device(self) -> torch.device:
        """The device of the tensors that the groups communicate."""
        return self._groups.device

    def make(self, name: str, ranks: tuple[int, ...]) -> OwnedProcessGroup:
        """Create a process group; collective over `ranks`, as `MembershipGroups.make`."""
        self.created.append(self._groups.make(name, ranks))
        self._ranks.update(ranks)
        return self.created[-1]

    def give_back(self) -> None:
        """Stop using the groups; a second call does nothing."""
        if self.created and not self._is_given_back:
            self._is_given_back = True
            self._groups.take_back(self)

    def return_keys(self, members: Sequence[int]) -> list[str]:
        """Return the keys that exist once all ranks that share a group of this lease have given it back.

        Args:
            members: the numbers of all processes, by rank.
        """
        return [self.return_key(members[rank]) for rank in sorted(self._ranks)]

    def return_key(self, member: int) -> str:
        """Return the key with which one member gives the lease back."""
        return f"{self._key}/{member}"


@dataclass(frozen=True)
class JobMembership:
    """One epoch of a job, seen by one of its members.

    Args:
        epoch: number of changes of the members so far.
        members: the numbers of the processes, by rank; a process keeps its number when its rank changes.
        rank: of this process.
        notes: what every member has told the others about itself, by rank; can be empty.
        prefix: prefix of the keys of this epoch in the store.
        groups: creates and ends the process groups of this epoch.
    """

    epoch: int
    members: tuple[int, ...]
    rank: int
    notes: tuple[str, ...]
    prefix: str
    store: Store = field(compare=False)
    groups: MembershipGroups = field(compare=False)

    @property
    def number(self) -> int:
        """The number of this process."""
        return self.members[self.rank]

    @property
    def continuation_key(self) -> str:
        """The prefix of the keys with which members say that they continue (their note) or leave (empty)."""
        return f"{self.prefix}/next/asked"

    def leave(self) -> None:
        """Release all groups and the store; the remaining members do not wait for this process."""
        if not self.groups.has_ended:
            # Without a store the others see this process end.
            with suppress(StoreLostError):
                self.store.set(f"{self.continuation_key}/{self.number}", "")
        self.groups.end(at_once=True)
        self.store.close()

    def abort(self) -> None:
        """Make every running collective of this epoch fail now, on all ranks that take part in it."""
        self.groups.abort()

    def wait_for_all_members(
        self, what: str, seconds: float, log: Callable[[str], object] = lambda text: None
    ) -> None:
        """Wait until every member has done `what`, without a collective.

        Args:
            what: as in "built the task"; all members do it equally often.
            log: prints every few seconds which ranks are missing.
        Raises:
            DeadlineError: some did not; names them.
            CommunicationError: some are gone; names them.
        """
        turn = self.groups.turn(what)
        keys = [f"{self.prefix}/did/{what}/{turn}/{number}" for number in self.members]
        self.store.set(keys[self.rank], "1")
        try:
            wait_for_members(self.store, keys, self.members, what, SetupDeadline(seconds, log))
        except MemberLostError as lost:
            raise members_gone_error(self.members, lost.members, f"before it had {what}") from lost


class MembershipGroups:
    """The process groups of one epoch.

    Args:
        store, prefix, members, rank: as for `JobMembership`.
        device: on "cuda", groups have NCCL in addition to Gloo.
        seconds: the deadline for creating a group, and of our waits for its collectives.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        members: tuple[int, ...],
        rank: int,
        device: torch.device,
        seconds: float,
    ) -> None:
        self._store, self._prefix, self._members, self._rank = store, prefix, members, rank
        self.device, self.seconds = device, seconds
        self._turns: Counter[str] = Counter()
        self._world: OwnedProcessGroup | None = None
        self._subgroups: list[OwnedProcessGroup] = []
        self._unannounced: list[GroupLease] = []
        self._returned: list[GroupLease] = []
        self.has_ended = False

    @property
    def world(self) -> OwnedProcessGroup | None:
        """The process group of all members; None for a single process, or if the groups have ended."""
        return self._world

    def turn(self, what: str) -> int:
        """Count a call for `what` and return its number; equal calls of all members get the same number."""
        self._turns[what] += 1
        return self._turns[what]

    def begin(self) -> None:
        """Create the group of all members, which becomes torch's default group; collective."""
        if len(self._members) > 1:
            ranks = tuple(range(len(self._members)))
            self._world = self._connected("world", ranks, self._make_world)

    def lease(self) -> GroupLease:
        """Return a lease for groups of limited use; all members call this equally often."""
        self._announce_returned()
        self._end_returned_leases()
        return GroupLease(self, f"{self._prefix}/returned/{self.turn('lease')}")

    def take_back(self, lease: GroupLease) -> None:
        """Note that this member no longer uses the groups of a lease."""
        # announced only when the next lease begins: a member that stops because of a failure may not reach
        # the store, and must not wait for it
        if not self.has_ended:
            self._unannounced.append(lease)

    def _announce_returned(self) -> None:
        for lease in self._unannounced:
            self._store.set(lease.return_key(self._members[self._rank]), "1")
        self._returned += self._unannounced
        self._unannounced = []

    def _end_returned_leases(self) -> None:
        """End the groups of leases that all members have given back."""
        over = [lease for lease in self._returned if self._store.check(lease.return_keys(self._members))]
        self._returned = [lease for lease in self._returned if lease not in over]
        ended = [group for lease in over for group in lease.created]
        self._subgroups = [group for group in self._subgroups if group not in ended]
        if ended:
            release_in_background([group.detach() for group in ended])

    def make(self, name: str, ranks: tuple[int, ...]) -> OwnedProcessGroup:
        """Create a process group of some ranks; collective over these, and over no others.

        Args:
            ranks: two or more, ascending; this process is one of them.
        Raises:
            DeadlineError, CommunicationError: some ranks did not come, or are gone; names them.
        """
        key = f"{name}/{'-'.join(map(str, ranks))}"
        group_rank = ranks.index(self._rank)
        group = self._connected(
            f"{key}/{self.turn(key)}",
            ranks,
            lambda store: make_subgroup(store, key, group_rank, len(ranks), self.device, self.seconds),
        )
        self._subgroups.append(group)
        self._end_returned_leases()  # by now these ranks have begun their next lease, too
        return group

    def _make_world(self, store: TorchStore) -> OwnedProcessGroup:
        return make_world(store, self._rank, len(self._members), self.device, self.seconds)

    def _connected(
        self, key: str, ranks: tuple[int, ...], make: Callable[[TorchStore], OwnedProcessGroup]
    ) -> OwnedProcessGroup:
        """Wait for the others, then let torch connect; an error names the ranks that are missing or gone."""
        from torch.distributed.distributed_c10d import PrefixStore

        prefix = f"{self._prefix}/{key}"
        members = tuple(self._members[rank] for rank in ranks)
        doing = f"while the group '{key.partition('/')[0]}' of ranks {ranks} was created"
        self._meet(f"{prefix}/here", members, doing)
        try:
            with self._store.watching(members):
                group = make(PrefixStore(prefix, self._store.torch))
        except MemberLostError as lost:
            raise members_gone_error(self._members, lost.members, doing) from lost
        except (RuntimeError, KeyTimeoutError) as error:
            # torch's error names no rank; if a member is gone, that is the cause
            lost_members = sorted(self._store.lost() & set(members))
            if lost_members:
                raise members_gone_error(self._members, lost_members, doing) from error
            raise CommunicationError(
                f"rank {self._rank} cannot connect to the other ranks {doing}: {error}",
                next_step="check that the nodes reach each other on all ports, or set GLOO_SOCKET_IFNAME",
            ) from error
        # without this second meeting, a rank that ends the group early would look like one that is gone
        self._meet(f"{prefix}/made", members, doing)
        return group

    def _meet(self, prefix: str, members: tuple[int, ...], doing: str) -> None:
        """Wait until all of these members have come here."""
        keys = [f"{prefix}/{number}" for number in members]
        self._store.set(f"{prefix}/{self._members[self._rank]}", "1")
        try:
            self._store.wait_for_keys(keys, self.seconds, members)
        except KeyTimeoutError as late:
            ranks = {f"{prefix}/{number}": rank for rank, number in enumerate(self._members)}
            missing = [ranks[key] for key in late.keys]
            raise DeadlineError(
                f"{format_ranks(missing)} did not come in time {doing}",
                next_step="look at the logs of those ranks, or raise runtime.deadline_seconds",
            ) from late
        except MemberLostError as lost:
            raise members_gone_error(self._members, lost.members, doing) from lost

    def abort(self) -> None:
        """Make all running calls fail at once; the groups cannot be used afterwards."""
        for group in self._all():
            group.abort()

    def abandon(self) -> None:
        """Let the next membership of this process end the default group of this one; sends nothing."""
        if self._world is not None:
            mark_abandoned(self._world)

    def end(self, *, at_once: bool = False) -> None:
        """Release all groups, in a background thread unless `at_once`: torch takes about 20 ms for each."""
        # first collect garbage: a group that outlives its last user aborts the process at one exit in ten
        gc.collect()
        groups, self.has_ended = self._all(), True
        end_world(self._world)
        self._world, self._subgroups, self._unannounced, self._returned = None, [], [], []
        handles = [group.detach() for group in groups]
        if at_once:
            handles.clear()
        else:
            release_in_background(handles)

    def _all(self) -> list[OwnedProcessGroup]:
        return [*([] if self._world is None else [self._world]), *self._subgroups]
