"""What a server does with the work of its workers: hand out tickets, and decide which pushes make an update.

Pure: no wire, no tensor. Invariant: a ticket is taken by one worker at a time, and what it brought is
applied at most once; what is dropped is never applied later.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.comm.channel import Message
from paceline.errors import CommunicationError


@dataclass(frozen=True)
class Ticket:
    """A worker's share of a step: part `part` of as many as there are workers."""

    step: int
    part: int


@dataclass(frozen=True)
class Push:
    """What a worker brought.

    Args:
        version: number of updates in the parameters that it read.
        message: gradients and sums.
    """

    ticket: Ticket
    version: int
    message: Message


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
            raise CommunicationError(
                f"{self.taken} parts of batches were handed out, and {self.applied} were applied and"
                f" {self.dropped} dropped",
                next_step="this is a mistake of the rule, not of the recipe: please report it",
            )

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


class Policy(Protocol):
    """Which work there is, and what is done with it, between two quiescent points."""

    def begin(self, first: int, end: int) -> None:
        """Open steps `first` to `end` - 1."""

    def ticket(self, worker: int) -> Ticket | None:
        """The next work of an idle worker; None: none for now."""

    def push(self, worker: int, push: Push) -> Sequence[Push] | None:
        """Take a push. Returns what makes an update now; empty: nothing yet; None: dropped for good."""

    def give_back(self, worker: int, ticket: Ticket) -> None:
        """The worker has lost what it did for this ticket, and goes on: hand it out again."""

    def lose(self, worker: int, ticket: Ticket | None) -> None:
        """The worker does not come back; it worked on this ticket, or (None) on nothing."""

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


class ApplyEach:
    """Asynchronous: every push is an update, at once.

    Source: Dean et al. 2012, Large Scale Distributed Deep Networks, section 4.1 (Downpour SGD).
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._next = self._end = self._applied = self._first = 0
        self._returned: deque[Ticket] = deque()

    def begin(self, first: int, end: int) -> None:
        """See `Policy`."""
        self._next, self._end = first * self._num_workers, end * self._num_workers
        self._first, self._applied = first, 0
        self._returned.clear()

    def ticket(self, worker: int) -> Ticket | None:
        """The next part in order, whoever asks."""
        if self._returned:
            return self._returned.popleft()
        if self._next >= self._end:
            return None
        number = self._next
        self._next += 1
        return Ticket(number // self._num_workers, number % self._num_workers)

    def push(self, worker: int, push: Push) -> Sequence[Push] | None:
        """Apply it."""
        self._applied += 1
        return [push]

    def give_back(self, worker: int, ticket: Ticket) -> None:
        """See `Policy`."""
        self._returned.append(ticket)

    def lose(self, worker: int, ticket: Ticket | None) -> None:
        """Somebody else does what it had."""
        if ticket is not None:
            self._returned.append(ticket)

    def stop(self) -> None:
        """Finish the step that is open, and at least one."""
        opened = max(self._next, self._first * self._num_workers + 1)
        self._end = min(self._end, -(-opened // self._num_workers) * self._num_workers)

    @property
    def is_complete(self) -> bool:
        """See `Policy`."""
        return self._first * self._num_workers + self._applied >= self._end

    @property
    def num_needed(self) -> int:
        """One worker can do all."""
        return 1

    @property
    def step(self) -> int:
        """See `Policy`."""
        return self._first + self._applied // self._num_workers


class FirstN:
    """Backup workers: the first N pushes of a step make its update, later ones are dropped.

    Source: Chen et al. 2016, Revisiting Distributed Synchronous SGD, arXiv:1604.00981, section 3.
    """

    def __init__(self, num_workers: int, num_backups: int) -> None:
        self.num_needed = num_workers - num_backups
        self._step = self._end = 0
        self._given: set[int] = set()
        self._found: list[Push] = []

    def begin(self, first: int, end: int) -> None:
        """See `Policy`."""
        self._step, self._end = first, end
        self._given, self._found = set(), []

    def ticket(self, worker: int) -> Ticket | None:
        """The worker's own part of the open step, once."""
        if self._step >= self._end or worker in self._given:
            return None
        self._given.add(worker)
        return Ticket(self._step, worker)

    def push(self, worker: int, push: Push) -> Sequence[Push] | None:
        """Collect what belongs to the open step."""
        if push.ticket.step != self._step:
            return None
        self._found.append(push)
        if len(self._found) < self.num_needed:
            return []
        found = sorted(self._found, key=lambda p: p.ticket.part)  # so that arrival does not change a sum
        self._step, self._given, self._found = self._step + 1, set(), []
        return found

    def give_back(self, worker: int, ticket: Ticket) -> None:
        """The worker may take its own part again; nobody else does it."""
        if ticket.step == self._step:
            self._given.discard(worker)

    def lose(self, worker: int, ticket: Ticket | None) -> None:
        """Nobody else does its part: as many as are needed are left, or the server ends."""

    def stop(self) -> None:
        """Finish the step that is open."""
        self._end = min(self._end, self._step + 1)

    @property
    def is_complete(self) -> bool:
        """See `Policy`."""
        return self._step >= self._end

    @property
    def step(self) -> int:
        """See `Policy`."""
        return self._step
