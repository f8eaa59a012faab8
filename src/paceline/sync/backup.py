"""Backup workers: a step goes on with the first that come, and nobody waits for the last.

Pure. Invariant: what comes for a step that is complete is never applied. Whoever works on that is told, and
leaves it between two micro-batches, so that a slow worker holds up the end of a round by one of them at most.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.sync.policy import Push, Ticket


class FirstN:
    """Backup workers: the first N pushes of a step make its update, later ones are dropped.

    Source: Chen et al. 2016, Revisiting Distributed Synchronous SGD, arXiv:1604.00981, section 3.
    """

    drops = True

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

    def is_late(self, ticket: Ticket) -> bool:
        """That of a step that is complete."""
        return ticket.step < self._step

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
