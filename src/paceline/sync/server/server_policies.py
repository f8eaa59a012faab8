"""Policies of a parameter server: which work it hands out, and which pushes make an update.

A ticket is one part of one step. A policy decides when a worker gets a ticket and when pushes are applied:

- `AsynchronousUpdates`: every push is an update at once (Downpour SGD).
- `BackupWorkers`: a step uses the first pushes that arrive, and drops the others. Workers that run late work
  are recalled and drop it between two micro-batches, so a slow worker delays the end of a round by one of
  them.
- `BoundedStaleness`: a push is applied as it arrives, and no worker gets more than S clocks ahead.

In `BoundedStaleness` a clock is one global batch. Its parts are handed out in order, to whichever worker
asks; a part of clock c is handed out once all parts of the clocks before c - S have been applied. So a
gradient of clock c misses the updates of at most S clocks before its own, and no update of a clock after c +
S was made before it. With W workers at most W (2 S + 1) - 1 updates are made between reading and applying.
With S = 0 all parts of a clock are read from the same parameters, so their mean makes one update; each worker
has the part of its number, because with a codec it adds its pending error to the part that it runs. With S =
inf every part is handed out at once, as in `AsynchronousUpdates`. Not as in the paper: there each worker has
its own share of the data and sums are not divided; here a slow worker runs fewer parts, so that only its
present part can be waited for.

Pure: no messages, no tensors. Invariant: one worker at a time has a ticket, its push is applied at most once,
and a dropped push is never applied later.
Source: Dean et al. 2012, Large Scale Distributed Deep Networks, section 4.1; Chen et al. 2016, Revisiting
Distributed Synchronous SGD, arXiv:1604.00981, section 3; Ho et al. 2013, More Effective Distributed ML via a
Stale Synchronous Parallel Parameter Server, NIPS.
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
    """A worker's result for a ticket.

    Args:
        ticket: the work that it did.
        version: number of updates in the parameters that it read.
        message: gradients and sums.
    """

    ticket: WorkTicket
    version: int
    message: ChannelMessage


@dataclass
class WorkLedger:
    """Counts of the work that was handed out, applied and dropped, and of its staleness.

    Args:
        staleness: number of applied pushes, by the number of updates since their parameters were read.
    """

    taken: int = 0
    applied: int = 0
    dropped: int = 0
    staleness: Counter[int] = field(default_factory=Counter)

    def require_balance(self) -> None:
        """Check that all work is accounted for; call it between two rounds, when nothing is in progress.

        Raises:
            CommunicationError: some work was neither applied nor dropped, or applied twice.
        """
        if self.taken != self.applied + self.dropped:
            raise internal_rule_error(
                f"{self.taken} parts of batches were handed out, but {self.applied} were applied and"
                f" {self.dropped} dropped"
            )

    def count_returned(self, *, late: bool) -> None:
        """Count a ticket without a push: `late` work is dropped, other work is handed out again."""
        self.dropped += late
        self.taken -= not late

    def metrics(self) -> dict[str, float]:
        """Return the mean and the largest staleness of the applied pushes."""
        stale = sum(age * count for age, count in self.staleness.items()) / max(1, self.applied)
        return {"staleness": stale, "staleness_max": float(max(self.staleness, default=0))}

    def record(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        histogram = {str(age): count for age, count in sorted(self.staleness.items())}
        return {
            "taken": self.taken,
            "applied": self.applied,
            "dropped": self.dropped,
            "staleness": histogram,
        }

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> WorkLedger:
        """Build a ledger from the result of `record`."""
        ages = Counter({int(age): int(count) for age, count in record["staleness"].items()})
        return cls(int(record["taken"]), int(record["applied"]), int(record["dropped"]), ages)


class ServerPolicy(Protocol):
    """The decisions of a server between two quiescent points.

    Attributes:
        drops: whether late work is dropped, so that workers check for a recall.
    """

    drops: bool

    def begin(self, first: int, end: int) -> None:
        """Start a round with steps `first` to `end` - 1."""

    def ticket(self, worker: int) -> WorkTicket | None:
        """Return the next work of an idle worker; None: there is none for now."""

    def push(self, worker: int, push: WorkerPush) -> Sequence[WorkerPush] | None:
        """Receive a push. Return the pushes of an update to make now, an empty list, or None if it is
        dropped.
        """

    def reissue(self, worker: int, ticket: WorkTicket) -> None:
        """Take back a ticket whose worker has lost its result and is still alive: hand it out again."""

    def drop_worker(self, worker: int, ticket: WorkTicket | None) -> None:
        """Remove a worker that is lost; `ticket` is what it was working on, if anything."""

    def is_late(self, ticket: WorkTicket) -> bool:
        """Return whether the result of a ticket would be dropped."""

    def stop(self) -> None:
        """Open no further step."""

    @property
    def is_complete(self) -> bool:
        """Return whether every step is complete that is open or will open before the next quiescent point."""

    @property
    def num_needed(self) -> int:
        """Return the number of workers without which no step can be completed."""

    @property
    def step(self) -> int:
        """Return the first step that is not complete."""


class AsynchronousUpdates:
    """The asynchronous policy: every push makes an update immediately.

    Source: Dean et al. 2012, Large Scale Distributed Deep Networks, section 4.1 (Downpour SGD).
    """

    drops = False

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._next = self._end = self._applied = self._first = 0
        self._returned: deque[WorkTicket] = deque()

    def begin(self, first: int, end: int) -> None:
        self._next, self._end = first * self._num_workers, end * self._num_workers
        self._first, self._applied = first, 0
        self._returned.clear()

    def ticket(self, worker: int) -> WorkTicket | None:
        """Return the next part in order, whichever worker asks."""
        # Returned work comes first, because it is older than any work still to come.
        if self._returned:
            return self._returned.popleft()
        if self._next >= self._end:
            return None
        number = self._next
        self._next += 1
        return WorkTicket(number // self._num_workers, number % self._num_workers)

    def push(self, worker: int, push: WorkerPush) -> Sequence[WorkerPush] | None:
        self._applied += 1
        return [push]

    def reissue(self, worker: int, ticket: WorkTicket) -> None:
        self._returned.append(ticket)

    def drop_worker(self, worker: int, ticket: WorkTicket | None) -> None:
        """Remove a lost worker; another one gets its ticket."""
        if ticket is not None:
            self._returned.append(ticket)

    def is_late(self, ticket: WorkTicket) -> bool:
        return False

    def stop(self) -> None:
        """Complete the step that is open, and at least one."""
        opened = max(self._next, self._first * self._num_workers + 1)
        self._end = min(self._end, -(-opened // self._num_workers) * self._num_workers)

    @property
    def is_complete(self) -> bool:
        return self._first * self._num_workers + self._applied >= self._end

    @property
    def num_needed(self) -> int:
        return 1

    @property
    def step(self) -> int:
        return self._first + self._applied // self._num_workers


class BackupWorkers:
    """The policy with backup workers: the first N pushes of a step make its update, later ones are dropped.

    Source: Chen et al. 2016, Revisiting Distributed Synchronous SGD, arXiv:1604.00981, section 3.
    """

    drops = True

    def __init__(self, num_workers: int, num_backups: int) -> None:
        self.num_needed = num_workers - num_backups
        self._step = self._end = 0
        self._handed_out: set[int] = set()
        self._collected: list[WorkerPush] = []

    def begin(self, first: int, end: int) -> None:
        self._step, self._end = first, end
        self._handed_out, self._collected = set(), []

    def ticket(self, worker: int) -> WorkTicket | None:
        """Return the worker's own part of the open step, once."""
        if self._step >= self._end or worker in self._handed_out:
            return None
        self._handed_out.add(worker)
        return WorkTicket(self._step, worker)

    def push(self, worker: int, push: WorkerPush) -> Sequence[WorkerPush] | None:
        # The step has had its update; this gradient belongs to older parameters.
        if push.ticket.step != self._step:
            return None
        self._collected.append(push)
        if len(self._collected) < self.num_needed:
            return []
        pushes = sorted(self._collected, key=lambda p: p.ticket.part)  # arrival must not change a sum
        self._step, self._handed_out, self._collected = self._step + 1, set(), []
        return pushes

    def reissue(self, worker: int, ticket: WorkTicket) -> None:
        """Let the worker take its own part again; no other worker does it."""
        if ticket.step == self._step:
            self._handed_out.discard(worker)

    def drop_worker(self, worker: int, ticket: WorkTicket | None) -> None:
        """Remove a lost worker. Its part is not handed out again: enough workers remain, or the server ends
        the run.
        """

    def is_late(self, ticket: WorkTicket) -> bool:
        """Return whether the step of a ticket is complete."""
        return ticket.step < self._step

    def stop(self) -> None:
        """Complete the step that is open."""
        self._end = min(self._end, self._step + 1)

    @property
    def is_complete(self) -> bool:
        return self._step >= self._end

    @property
    def step(self) -> int:
        return self._step


class BoundedStaleness:
    """The policy with bounded staleness: no part is handed out more than `bound` clocks past the last
    complete one.

    Args:
        num_workers: the parts of a clock.
        bound: S, at least 0; `math.inf`: none.
    """

    drops = False

    def __init__(self, num_workers: int, bound: float) -> None:
        self._num_workers, self._bound = num_workers, bound
        self._first = self._next = self._end = self.step = 0
        self._missing: dict[int, int] = {}  # by clock: parts that have not been pushed
        self._returned: deque[WorkTicket] = deque()
        self._collected: list[WorkerPush] = []
        self._handed_out: set[int] = set()  # with a bound of 0: parts of the open clock that were handed out
        self._lost: set[int] = set()

    def begin(self, first: int, end: int) -> None:
        self._first = self.step = first
        self._next, self._end = first * self._num_workers, end * self._num_workers
        self._missing, self._collected = {}, []
        self._returned.clear()
        self._handed_out.clear()

    def ticket(self, worker: int) -> WorkTicket | None:
        """Return the next part in order, whichever worker asks; None if its clock is too far ahead.

        With a bound of 0 it is the part of the worker's number.
        """
        if self._returned:  # was not too far ahead when it was first handed out
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
        """Return the worker's part of the open clock, or one of a lost worker; None: they were handed out."""
        free = [part for part in (worker, *sorted(self._lost)) if part not in self._handed_out]
        self._handed_out.update(free[:1])
        return free[0] if free else None

    def push(self, worker: int, push: WorkerPush) -> Sequence[WorkerPush] | None:
        """Return the push as an update; with a bound of 0 wait for all pushes of its clock."""
        clock = push.ticket.step
        self._missing[clock] = self._missing.get(clock, self._num_workers) - 1
        # Clocks can complete out of order, so one push can move the first open clock by several.
        while self._missing.get(self.step) == 0:
            del self._missing[self.step]
            self.step += 1
            self._handed_out.clear()
        if self._bound:
            return [push]
        self._collected.append(push)
        if self.step == clock:
            return []
        pushes, self._collected = sorted(self._collected, key=lambda p: p.ticket.part), []
        return pushes

    def reissue(self, worker: int, ticket: WorkTicket) -> None:
        self._returned.append(ticket)

    def drop_worker(self, worker: int, ticket: WorkTicket | None) -> None:
        """Remove a lost worker; others get its ticket and, with a bound of 0, its later parts."""
        self._lost.add(worker)
        if ticket is not None:
            self._returned.append(ticket)

    def is_late(self, ticket: WorkTicket) -> bool:
        return False

    def stop(self) -> None:
        """Complete the clock that is open, and at least one."""
        opened = max(self._next, self._first * self._num_workers + 1)
        self._end = min(self._end, -(-opened // self._num_workers) * self._num_workers)

    @property
    def is_complete(self) -> bool:
        return self.step * self._num_workers >= self._end

    @property
    def num_needed(self) -> int:
        return 1
