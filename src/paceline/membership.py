"""Who works together between two changes of a job, and the process groups that hang on it.

A membership is a value: it does not change. When a process leaves or joins, those that go on agree on the
next one through the job's store, and make their groups anew, in the same processes (docs/adr/0012).

Invariant: every wait has a deadline, and a member that does not come, or goes while groups are made, is
named. Groups of one membership are made in the same order on all of their members.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.errors import CommunicationError, DeadlineError
from paceline.lease import Lease
from paceline.missing import Patience, await_members, gone, names
from paceline.process_group import Made, drop_beside, end_world, make_part, make_world
from paceline.store import Late, Lost

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store as TorchStore

    from paceline.store.torch_store import Store


@dataclass(frozen=True)
class Membership:
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
    groups: Groups = field(compare=False)

    @property
    def number(self) -> int:
        """Of this process."""
        return self.members[self.rank]

    @property
    def ballot(self) -> str:
        """Where members say whether they go on after this epoch: their notes, or nothing."""
        return f"{self.place}/next/asked"

    def leave(self) -> None:
        """Let go of all groups and of the store; those that go on do not wait for this process."""
        if not self.groups.has_ended:
            self.store.set(f"{self.ballot}/{self.number}", "")
        self.groups.end(at_once=True)
        self.store.close()

    def abort(self) -> None:
        """Let every collective of this epoch that is under way fail now, on all ranks that it connects."""
        self.groups.abort()

    def await_all(self, what: str, seconds: float, say: Callable[[str], object] = lambda text: None) -> None:
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
            await_members(self.store, keys, self.members, what, Patience(seconds, say))
        except Lost as lost:
            raise gone(self.members, lost.members, f"before it had {what}") from lost


class Groups:
    """The process groups of one epoch.

    Args:
        store, place, members, rank: see `Membership`.
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
        self._world: Made | None = None
        self._parts: list[Made] = []
        self._untold: list[Lease] = []
        self._returned: list[Lease] = []
        self.has_ended = False

    @property
    def world(self) -> Made | None:
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

    def lease(self) -> Lease:
        """For groups of one use, such as a session; all members come to it equally often."""
        self._say_returned()
        self._end_returned()
        return Lease(self, f"{self._place}/returned/{self.turn('lease')}")

    def take_back(self, lease: Lease) -> None:
        """Note that this member uses the groups of a lease no more.

        The others hear of it when the next lease begins: whoever stops because something failed may not
        reach them, and must not wait for that.
        """
        if not self.has_ended:
            self._untold.append(lease)

    def _say_returned(self) -> None:
        for lease in self._untold:
            self._store.set(lease.returned(self._members[self._rank]), "1")
        self._returned += self._untold
        self._untold = []

    def _end_returned(self) -> None:
        """End the groups of leases that all have given back."""
        over = [lease for lease in self._returned if self._store.check(lease.returns(self._members))]
        self._returned = [lease for lease in self._returned if lease not in over]
        made = [one for lease in over for one in lease.made]
        self._parts = [one for one in self._parts if one not in made]
        if made:
            drop_beside([one.let_go() for one in made])

    def make(self, name: str, ranks: tuple[int, ...]) -> Made:
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
            lambda store: make_part(store, key, place, len(ranks), self.device, self.seconds),
        )
        self._parts.append(made)
        self._end_returned()  # by now these ranks have begun their next lease, too
        return made

    def _default(self, store: TorchStore) -> Made:
        return make_world(store, self._rank, len(self._members), self.device, self.seconds)

    def _made(self, key: str, ranks: tuple[int, ...], make: Callable[[TorchStore], Made]) -> Made:
        """Meet the others, then let torch connect; if that fails, say who is missing or gone."""
        from torch.distributed.distributed_c10d import PrefixStore

        place = f"{self._place}/{key}"
        members = tuple(self._members[rank] for rank in ranks)
        doing = f"while the group '{key.partition('/')[0]}' of ranks {ranks} was made"
        self.meet(f"{place}/here", members, doing)
        try:
            with self._store.watching(members):
                made = make(PrefixStore(place, self._store.torch))
        except Lost as lost:
            raise gone(self._members, lost.members, doing) from lost
        except (RuntimeError, Late) as error:
            lost_members = sorted(self._store.lost() & set(members))
            if lost_members:
                raise gone(self._members, lost_members, doing) from error
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
            self._store.await_keys(keys, self.seconds, members)
        except Late as late:
            ranks = {f"{place}/{number}": rank for rank, number in enumerate(self._members)}
            missing = [ranks[key] for key in late.keys]
            raise DeadlineError(
                f"at the deadline {names(missing)} did not come {doing}",
                next_step="look at the logs of those ranks, or raise runtime.deadline_seconds",
            ) from late
        except Lost as lost:
            raise gone(self._members, lost.members, doing) from lost

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
            drop_beside(handles)

    def _all(self) -> list[Made]:
        return [*([] if self._world is None else [self._world]), *self._parts]
