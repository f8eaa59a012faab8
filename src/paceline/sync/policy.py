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

    def come_back(self, *, late: bool) -> None:
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


class Policy(Protocol):
    """Which work there is, and what is done with it, between two quiescent points.

    Attributes:
        drops: work may come too late.
    """

    drops: bool

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

    def is_late(self, ticket: Ticket) -> bool:
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


class ApplyEach:
    """Asynchronous: every push is an update, at once.

    Source: Dean et al. 2012, Large Scale Distributed Deep Networks, section 4.1 (Downpour SGD).
    """

    drops = False

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

    def is_late(self, ticket: Ticket) -> bool:
        """Nothing is."""
        return False

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
