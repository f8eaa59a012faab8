"""What a server does with the work of its workers: hand out tickets, and decide which pushes make an update.

Pure: no wire, no tensor. Invariant: a ticket is taken by one worker at a time, and what it brought is
applied at most once; what is dropped is never applied later.

Backup workers: a step goes on with the first that come, and nobody waits for the last.

Pure. Invariant: what comes for a step that is complete is never applied. Whoever works on that is told, and
leaves it between two micro-batches, so that a slow worker holds up the end of a round by one of them at most.

Bounded staleness: a server applies gradients as they come, and no worker gets more than S clocks ahead.

A clock is one global batch. Its parts are dealt in order, to whichever worker asks; a part of clock c is
handed out once all parts of the clocks before c - S have been applied. So a gradient of clock c misses the
updates of at most S clocks before its own, and when it is applied none of a clock after c + S has been.
With W workers at most W (2 S + 1) - 1 updates are made between its reading and its application.

S = 0: all parts of a clock are read from the same parameters, so they make one update, by their mean. Each
worker has the part of its number, and what falls to one that is lost goes to whoever asks: with a codec a
worker adds what it has not sent to the part that it runs, so another dealing would be another run.
S = inf: every part is dealt as soon as somebody asks, as in `AsynchronousUpdates`.

Pure, as every policy. Not as in the paper: there each worker has a share of the data of its own and sums are
not divided; here a slow worker takes fewer parts, so that only the part that it works on can be waited for.
Source: Ho et al. 2013, More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.comm.channel.message_channel import ChannelMessage
from paceline.sync.sync_rule import internal_rule_error


@dataclass(frozen=True)
class WorkTicket:
    """A worker's share of a step: part `part` of as many as there are workers."""

    step: int
    part: int


@dataclass(frozen=True)
class WorkerPush:
    """What a worker brought.

    Args:
        version: number of updates in the parameters that it read.
        message: gradients and sums.
    """

    ticket: WorkTicket
    version: int
    message: ChannelMessage


@dataclass
class WorkLedger:
    """How often work was taken, applied and dropped, and how old what was applied was.

    Args:
        staleness: how many applied pushes had read parameters so many updates old.
    """

    taken: int = 0
    applied: int = 0
    dropped: int = 0
    staleness: Counter[int] = field(default_factory=Counter)

    def require_balance(self) -> None:
        """See that all work that was taken is accounted for; between two rounds, when nothing is under way.

        Raises:
            CommunicationError: some was neither applied nor dropped, or some was applied twice.
        """
        if self.taken != self.applied + self.dropped:
            raise internal_rule_error(
                f"{self.taken} parts of batches were handed out, and {self.applied} were applied and"
                f" {self.dropped} dropped"
            )

    def count_returned(self, *, late: bool) -> None:
        """A ticket has come back without a push: it came too late, or is to be handed out again."""
        self.dropped += late
        self.taken -= not late

    def metrics(self) -> dict[str, float]:
        """How old what was applied was: on average, and at most."""
        stale = sum(age * count for age, count in self.staleness.items()) / max(1, self.applied)
        return {"staleness": stale, "staleness_max": float(max(self.staleness, default=0))}

    def record(self) -> dict[str, Any]:
        """As JSON values."""
        histogram = {str(age): count for age, count in sorted(self.staleness.items())}
        return {
            "taken": self.taken,
            "applied": self.applied,
            "dropped": self.dropped,
            "staleness": histogram,
        }

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> WorkLedger:
        """The inverse of `record`."""
        ages = Counter({int(age): int(count) for age, count in record["staleness"].items()})
        return cls(int(record["taken"]), int(record["applied"]), int(record["dropped"]), ages)


class ServerPolicy(Protocol):
    """Which work there is, and what is done with it, between two quiescent points.

    Attributes:
        drops: work may come too late.
    """

    drops: bool

    def begin(self, first: int, end: int) -> None:
        """Open steps `first` to `end` - 1."""

    def ticket(self, worker: int) -> WorkTicket | None:
        """The next work of an idle worker; None: none for now."""

    def push(self, worker: int, push: WorkerPush) -> Sequence[WorkerPush] | None:
        """Take a push. Returns what makes an update now; empty: nothing yet; None: dropped for good."""

    def give_back(self, worker: int, ticket: WorkTicket) -> None:
        """The worker has lost what it did for this ticket, and goes on: hand it out again."""

    def lose(self, worker: int, ticket: WorkTicket | None) -> None:
        """The worker does not come back; it worked on this ticket, or (None) on nothing."""

    def is_late(self, ticket: WorkTicket) -> bool:
        """Whether what it brings would be dropped."""

    def stop(self) -> None:
        """Open no further step."""

    @property
    def is_complete(self) -> bool:
        """Whether every step is complete that is open, or is to be opened before the next quiescent point."""

    @property
    def num_needed(self) -> int:
        """With fewer workers than these no step can be completed."""

    @property
    def step(self) -> int:
        """Steps before this one are complete."""


class AsynchronousUpdates:
    """Asynchronous: every push is an update, at once.

    Source: Dean et al. 2012, Large Scale Distributed Deep Networks, section 4.1 (Downpour SGD).
    """

    drops = False

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._next = self._end = self._applied = self._first = 0
        self._returned: deque[WorkTicket] = deque()

    def begin(self, first: int, end: int) -> None:
        """See `ServerPolicy`."""
        self._next, self._end = first * self._num_workers, end * self._num_workers
        self._first, self._applied = first, 0
        self._returned.clear()

    def ticket(self, worker: int) -> WorkTicket | None:
        """The next part in order, whoever asks."""
        if self._returned:
            return self._returned.popleft()
        if self._next >= self._end:
            return None
        number = self._next
        self._next += 1
        return WorkTicket(number // self._num_workers, number % self._num_workers)

    def push(self, worker: int, push: WorkerPush) -> Sequence[WorkerPush] | None:
        """Apply it."""
        self._applied += 1
        return [push]

    def give_back(self, worker: int, ticket: WorkTicket) -> None:
        """See `ServerPolicy`."""
        self._returned.append(ticket)

    def lose(self, worker: int, ticket: WorkTicket | None) -> None:
        """Somebody else does what it had."""
        if ticket is not None:
            self._returned.append(ticket)

    def is_late(self, ticket: WorkTicket) -> bool:
        """Nothing is."""
        return False

    def stop(self) -> None:
        """Finish the step that is open, and at least one."""
        opened = max(self._next, self._first * self._num_workers + 1)
        self._end = min(self._end, -(-opened // self._num_workers) * self._num_workers)

    @property
    def is_complete(self) -> bool:
        """See `ServerPolicy`."""
        return self._first * self._num_workers + self._applied >= self._end

    @property
    def num_needed(self) -> int:
        """One worker can do all."""
        return 1

    @property
    def step(self) -> int:
        """See `ServerPolicy`."""
        return self._first + self._applied // self._num_workers


class BackupWorkers:
    """Backup workers: the first N pushes of a step make its update, later ones are dropped.

    Source: Chen et al. 2016, Revisiting Distributed Synchronous SGD, arXiv:1604.00981, section 3.
    """

    drops = True

    def __init__(self, num_workers: int, num_backups: int) -> None:
        self.num_needed = num_workers - num_backups
        self._step = self._end = 0
        self._given: set[int] = set()
        self._found: list[WorkerPush] = []

    def begin(self, first: int, end: int) -> None:
        """See `ServerPolicy`."""
        self._step, self._end = first, end
        self._given, self._found = set(), []

    def ticket(self, worker: int) -> WorkTicket | None:
        """The worker's own part of the open step, once."""
        if self._step >= self._end or worker in self._given:
            return None
        self._given.add(worker)
        return WorkTicket(self._step, worker)

    def push(self, worker: int, push: WorkerPush) -> Sequence[WorkerPush] | None:
        """Collect what belongs to the open step."""
        if push.ticket.step != self._step:
            return None
        self._found.append(push)
        if len(self._found) < self.num_needed:
            return []
        found = sorted(self._found, key=lambda p: p.ticket.part)  # so that arrival does not change a sum
        self._step, self._given, self._found = self._step + 1, set(), []
        return found

    def give_back(self, worker: int, ticket: WorkTicket) -> None:
        """The worker may take its own part again; nobody else does it."""
        if ticket.step == self._step:
            self._given.discard(worker)

    def lose(self, worker: int, ticket: WorkTicket | None) -> None:
        """Nobody else does its part: as many as are needed are left, or the server ends."""

    def is_late(self, ticket: WorkTicket) -> bool:
        """That of a step that is complete."""
        return ticket.step < self._step

    def stop(self) -> None:
        """Finish the step that is open."""
        self._end = min(self._end, self._step + 1)

    @property
    def is_complete(self) -> bool:
        """See `ServerPolicy`."""
        return self._step >= self._end

    @property
    def step(self) -> int:
        """See `ServerPolicy`."""
        return self._step


class BoundedStaleness:
    """Hands out no part of a clock that is more than `bound` clocks past the last that is complete.

    Args:
        num_workers: the parts of a clock.
        bound: S, at least 0; `math.inf`: none.
    """

    drops = False

    def __init__(self, num_workers: int, bound: float) -> None:
        self._num_workers, self._bound = num_workers, bound
        self._first = self._next = self._end = self.step = 0
        self._missing: dict[int, int] = {}  # parts of a clock that have not come
        self._returned: deque[WorkTicket] = deque()
        self._found: list[WorkerPush] = []
        self._dealt: set[int] = set()  # with a bound of 0: parts of the clock that is open
        self._lost: set[int] = set()

    def begin(self, first: int, end: int) -> None:
        """See `ServerPolicy`."""
        self._first = self.step = first
        self._next, self._end = first * self._num_workers, end * self._num_workers
        self._missing, self._found = {}, []
        self._returned.clear()
        self._dealt.clear()

    def ticket(self, worker: int) -> WorkTicket | None:
        """The next part in order, whoever asks; None also while its clock is too far ahead.

        With a bound of 0 it is the part of the worker.
        """
        if self._returned:  # it was not too far ahead when it was first handed out
            return self._returned.popleft()
        clock, num_dealt = divmod(self._next, self._num_workers)
        if self._next >= self._end or clock > self.step + self._bound:
            return None
        part = num_dealt if self._bound else self._own_part(worker)
        if part is None:
            return None
        self._next += 1
        return WorkTicket(clock, part)

    def _own_part(self, worker: int) -> int | None:
        """The worker's own part of the open clock, or one of a worker that is lost; None: these are dealt."""
        free = [part for part in (worker, *sorted(self._lost)) if part not in self._dealt]
        self._dealt.update(free[:1])
        return free[0] if free else None

    def push(self, worker: int, push: WorkerPush) -> Sequence[WorkerPush] | None:
        """Apply it; with a bound of 0, together with all others of its clock."""
        clock = push.ticket.step
        self._missing[clock] = self._missing.get(clock, self._num_workers) - 1
        while self._missing.get(self.step) == 0:
            del self._missing[self.step]
            self.step += 1
            self._dealt.clear()
        if self._bound:
            return [push]
        self._found.append(push)
        if self.step == clock:
            return []
        found, self._found = sorted(self._found, key=lambda p: p.ticket.part), []
        return found

    def give_back(self, worker: int, ticket: WorkTicket) -> None:
        """See `ServerPolicy`."""
        self._returned.append(ticket)

    def lose(self, worker: int, ticket: WorkTicket | None) -> None:
        """Somebody else does what it had, and with a bound of 0 what would fall to it."""
        self._lost.add(worker)
        if ticket is not None:
            self._returned.append(ticket)

    def is_late(self, ticket: WorkTicket) -> bool:
        """Nothing is."""
        return False

    def stop(self) -> None:
        """Finish the clock that is open, and at least one."""
        opened = max(self._next, self._first * self._num_workers + 1)
        self._end = min(self._end, -(-opened // self._num_workers) * self._num_workers)

    @property
    def is_complete(self) -> bool:
        """See `ServerPolicy`."""
        return self.step * self._num_workers >= self._end

    @property
    def num_needed(self) -> int:
        """One worker can do all."""
        return 1
