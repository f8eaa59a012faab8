"""Waiting for other members, and the words for those who do not come or are gone.

Invariant: every wait has a deadline and names the ranks that it is for.

Process groups that are of use for a while, such as those of one session.

A process may train more than once, and a group has threads that also wake when nothing is sent. So who has
done with a mesh gives its groups back.

Invariant: a member ends none that another may still use, and waits for nobody to be allowed to: it looks
whether all have given theirs back when the next lease begins, and when groups of that are made.

Who works together between two changes of a job, and the process groups that hang on it.

A membership is a value: it does not change. When a process leaves or joins, those that go on agree on the
next one through the job's store, and make their groups anew, in the same processes (docs/adr/0012).

Invariant: every wait has a deadline, and a member that does not come, or goes while groups are made, is
named. Groups of one membership are made in the same order on all of their members.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.errors import CommunicationError, DeadlineError
from paceline.job.process_group import (
    OwnedProcessGroup,
    end_world,
    make_subgroup,
    make_world,
    release_in_background,
)
from paceline.job.store_client import KeyTimeoutError, MemberLostError

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store as TorchStore

    from paceline.job.torch_store import Store

LOG_INTERVAL_SECONDS = 10.0


@dataclass(frozen=True)
class SetupDeadline:
    """How long to wait in the set-up, and who is told now and then which ranks are missing."""

    seconds: float
    say: Callable[[str], object] = lambda text: None


def wait_for_members(
    store: Store, keys: Sequence[str], members: Sequence[int], what: str, patience: SetupDeadline
) -> list[bytes]:
    """The values of `keys`, one for each rank, when all are there.

    Args:
        what: the rank has done that has set its key, as in "built the task".
    Raises:
        DeadlineError: some ranks have not set theirs in time; names them.
        Lost: some of `members` are gone.
    """
    began = time.monotonic()
    while True:
        left = began + patience.seconds - time.monotonic()
        try:
            return store.wait_for_keys(keys, max(0.0, min(left, LOG_INTERVAL_SECONDS)), members)
        except KeyTimeoutError as late:
            ranks = [rank for rank, key in enumerate(keys) if key in late.keys]
            missing, has = format_ranks(ranks), "have" if len(ranks) > 1 else "has"
            if left <= LOG_INTERVAL_SECONDS:
                raise DeadlineError(
                    f"{missing} {has} not {what} within {patience.seconds:g} s",
                    next_step="look at what that rank does, or raise runtime.setup_deadline_seconds",
                ) from late
            passed = time.monotonic() - began
            patience.say(f"waiting until {missing} {has} {what}: {passed:.0f} s of {patience.seconds:g} s")


def members_gone_error(members: Sequence[int], lost: Sequence[int], when: str) -> CommunicationError:
    """What to raise when members have left."""
    ranks = [rank for rank, number in enumerate(members) if number in lost]
    return CommunicationError(
        f"{format_ranks(ranks)} left {when}", next_step="look at the first rank that ended: it is the cause"
    )


def format_ranks(ranks: Sequence[int]) -> str:
    """As in "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class GroupLease:
    """Makes groups of a membership, and knows which.

    Args:
        key: of the store, where members say that they have given it back.
    """

    def __init__(self, groups: MembershipGroups, key: str) -> None:
        self._groups, self._key = groups, key
        self.made: list[OwnedProcessGroup] = []
        self._ranks: set[int] = set()
        self._is_given_back = False

    @property
    def world(self) -> OwnedProcessGroup | None:
        """The group of all members, which outlives every lease."""
        return self._groups.world

    @property
    def device(self) -> torch.device:
        """Where its tensors may lie."""
        return self._groups.device

    def make(self, name: str, ranks: tuple[int, ...]) -> OwnedProcessGroup:
        """See `MembershipGroups.make`."""
        self.made.append(self._groups.make(name, ranks))
        self._ranks.update(ranks)
        return self.made[-1]

    def give_back(self) -> None:
        """Use the groups no more; a second time does nothing."""
        if self.made and not self._is_given_back:
            self._is_given_back = True
            self._groups.take_back(self)

    def returns(self, members: Sequence[int]) -> list[str]:
        """Keys that are there when those have given theirs back who share a group of this lease.

        Args:
            members: the numbers of all processes, by rank.
        """
        return [self.returned(members[rank]) for rank in sorted(self._ranks)]

    def returned(self, member: int) -> str:
        """The key of one of them."""
        return f"{self._key}/{member}"


@dataclass(frozen=True)
class JobMembership:
    """One epoch of a job, seen by one of its members.

    Args:
        epoch: how often the members have changed.
        members: the numbers of the processes, by rank; a process keeps its number when its rank changes.
        rank: of this process.
        notes: what every member has told the others about itself, by rank; may be empty.
        place: the part of the store's keys that is this epoch's.
        groups: makes and ends the process groups of this epoch.
    """

    epoch: int
    members: tuple[int, ...]
    rank: int
    notes: tuple[str, ...]
    place: str
    store: Store = field(compare=False)
    groups: MembershipGroups = field(compare=False)

    @property
    def number(self) -> int:
        """Of this process."""
        return self.members[self.rank]

    @property
    def continuation_key(self) -> str:
        """Where members say whether they go on after this epoch: their notes, or nothing."""
        return f"{self.place}/next/asked"

    def leave(self) -> None:
        """Let go of all groups and of the store; those that go on do not wait for this process."""
        if not self.groups.has_ended:
            self.store.set(f"{self.continuation_key}/{self.number}", "")
        self.groups.end(at_once=True)
        self.store.close()

    def abort(self) -> None:
        """Let every collective of this epoch that is under way fail now, on all ranks that it connects."""
        self.groups.abort()

    def wait_for_all_members(
        self, what: str, seconds: float, say: Callable[[str], object] = lambda text: None
    ) -> None:
        """Wait until every member has done `what`, without a collective.

        Args:
            what: as in "built the task"; all members do it equally often.
            say: is told every few seconds who is missing.
        Raises:
            DeadlineError: some did not; names them.
            CommunicationError: some are gone; names them.
        """
        turn = self.groups.turn(what)
        keys = [f"{self.place}/did/{what}/{turn}/{number}" for number in self.members]
        self.store.set(keys[self.rank], "1")
        try:
            wait_for_members(self.store, keys, self.members, what, SetupDeadline(seconds, say))
        except MemberLostError as lost:
            raise members_gone_error(self.members, lost.members, f"before it had {what}") from lost


class MembershipGroups:
    """The process groups of one epoch.

    Args:
        store, place, members, rank: see `JobMembership`.
        device: NCCL beside Gloo on "cuda".
        seconds: the deadline for making a group, and of our waits for its collectives.
    """

    def __init__(
        self,
        store: Store,
        place: str,
        members: tuple[int, ...],
        rank: int,
        device: torch.device,
        seconds: float,
    ) -> None:
        self._store, self._place, self._members, self._rank = store, place, members, rank
        self.device, self.seconds = device, seconds
        self._turns: Counter[str] = Counter()
        self._world: OwnedProcessGroup | None = None
        self._parts: list[OwnedProcessGroup] = []
        self._untold: list[GroupLease] = []
        self._returned: list[GroupLease] = []
        self.has_ended = False

    @property
    def world(self) -> OwnedProcessGroup | None:
        """The process group of all members; None if this process is alone, or they are ended."""
        return self._world

    def turn(self, what: str) -> int:
        """How often this member has come to `what`."""
        self._turns[what] += 1
        return self._turns[what]

    def begin(self) -> None:
        """Make the group of all members, which is torch's default group as well; collective."""
        if len(self._members) > 1:
            ranks = tuple(range(len(self._members)))
            self._world = self._made("world", ranks, self._default)

    def lease(self) -> GroupLease:
        """For groups of one use, such as a session; all members come to it equally often."""
        self._announce_returned()
        self._end_returned_leases()
        return GroupLease(self, f"{self._place}/returned/{self.turn('lease')}")

    def take_back(self, lease: GroupLease) -> None:
        """Note that this member uses the groups of a lease no more.

        The others hear of it when the next lease begins: whoever stops because something failed may not
        reach them, and must not wait for that.
        """
        if not self.has_ended:
            self._untold.append(lease)

    def _announce_returned(self) -> None:
        for lease in self._untold:
            self._store.set(lease.returned(self._members[self._rank]), "1")
        self._returned += self._untold
        self._untold = []

    def _end_returned_leases(self) -> None:
        """End the groups of leases that all have given back."""
        over = [lease for lease in self._returned if self._store.check(lease.returns(self._members))]
        self._returned = [lease for lease in self._returned if lease not in over]
        made = [one for lease in over for one in lease.made]
        self._parts = [one for one in self._parts if one not in made]
        if made:
            release_in_background([one.let_go() for one in made])

    def make(self, name: str, ranks: tuple[int, ...]) -> OwnedProcessGroup:
        """A process group of some ranks; collective over these, and over no others.

        Args:
            ranks: two or more, ascending; this process is one of them.
        Raises:
            DeadlineError, CommunicationError: some did not come, or are gone; names them.
        """
        key = f"{name}/{'-'.join(map(str, ranks))}"
        place = ranks.index(self._rank)
        made = self._made(
            f"{key}/{self.turn(key)}",
            ranks,
            lambda store: make_subgroup(store, key, place, len(ranks), self.device, self.seconds),
        )
        self._parts.append(made)
        self._end_returned_leases()  # by now these ranks have begun their next lease, too
        return made

    def _default(self, store: TorchStore) -> OwnedProcessGroup:
        return make_world(store, self._rank, len(self._members), self.device, self.seconds)

    def _made(
        self, key: str, ranks: tuple[int, ...], make: Callable[[TorchStore], OwnedProcessGroup]
    ) -> OwnedProcessGroup:
        """Meet the others, then let torch connect; if that fails, say who is missing or gone."""
        from torch.distributed.distributed_c10d import PrefixStore

        place = f"{self._place}/{key}"
        members = tuple(self._members[rank] for rank in ranks)
        doing = f"while the group '{key.partition('/')[0]}' of ranks {ranks} was made"
        self.meet(f"{place}/here", members, doing)
        try:
            with self._store.watching(members):
                made = make(PrefixStore(place, self._store.torch))
        except MemberLostError as lost:
            raise members_gone_error(self._members, lost.members, doing) from lost
        except (RuntimeError, KeyTimeoutError) as error:
            lost_members = sorted(self._store.lost() & set(members))
            if lost_members:
                raise members_gone_error(self._members, lost_members, doing) from error
            raise CommunicationError(
                f"rank {self._rank} cannot connect to the other ranks {doing}: {error}",
                next_step="check that the nodes reach each other on all ports, or set GLOO_SOCKET_IFNAME",
            ) from error
        self.meet(f"{place}/made", members, doing)  # who ends it earlier would look like one that is gone
        return made

    def meet(self, place: str, members: tuple[int, ...], doing: str) -> None:
        """Wait until all of these members are here."""
        keys = [f"{place}/{number}" for number in members]
        self._store.set(f"{place}/{self._members[self._rank]}", "1")
        try:
            self._store.wait_for_keys(keys, self.seconds, members)
        except KeyTimeoutError as late:
            ranks = {f"{place}/{number}": rank for rank, number in enumerate(self._members)}
            missing = [ranks[key] for key in late.keys]
            raise DeadlineError(
                f"at the deadline {format_ranks(missing)} did not come {doing}",
                next_step="look at the logs of those ranks, or raise runtime.deadline_seconds",
            ) from late
        except MemberLostError as lost:
            raise members_gone_error(self._members, lost.members, doing) from lost

    def abort(self) -> None:
        """Let all calls under way fail at once; the groups are of no use afterwards."""
        for made in self._all():
            made.abort()

    def end(self, *, at_once: bool = False) -> None:
        """Let go of all groups.

        Garbage is collected first: a group that outlives its last user aborts about one exit in ten. Torch
        takes some 20 ms for each; they pass beside what comes next, unless it is `at_once`.
        """
        gc.collect()
        made, self.has_ended = self._all(), True
        end_world(self._world)
        self._world, self._parts, self._untold, self._returned = None, [], [], []
        handles = [one.let_go() for one in made]
        if at_once:
            handles.clear()
        else:
            release_in_background(handles)

    def _all(self) -> list[OwnedProcessGroup]:
        return [*([] if self._world is None else [self._world]), *self._parts]
