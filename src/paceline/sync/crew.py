"""The workers of a server: which remain, what each works on, and whose answer is due.

Pure: the clock is an argument. Invariant: a worker has one ticket at most, and is idle, awaited or lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.errors import CommunicationError
from paceline.sync.policy import Ticket


class Crew:
    """The workers by rank; worker k of the policy is the k-th of them, also when others are lost."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._tickets: dict[int, tuple[Ticket, int]] = {}
        self._awaited = dict.fromkeys(ranks, 0.0)  # since when
        self._idle: set[int] = set()
        self._recalled: set[int] = set()
        self.lost: dict[int, str] = {}

    @property
    def left(self) -> list[int]:
        """Those that are not lost."""
        return [rank for rank in self._ranks if rank not in self.lost]

    @property
    def idle(self) -> list[int]:
        """Those that wait for work."""
        return sorted(self._idle)

    @property
    def is_at_rest(self) -> bool:
        """Whether all that are left are idle."""
        return not self._awaited

    def number(self, rank: int) -> int:
        """Which worker this is for the policy."""
        return self._ranks.index(rank)

    def begin(self, now: float) -> None:
        """A round begins: all that are left are to say that they are ready."""
        self._idle.clear()
        self._awaited = dict.fromkeys(self.left, now)

    def give(self, rank: int, ticket: Ticket, version: int, now: float) -> None:
        """An idle worker gets work, and the parameters after `version` updates."""
        self._idle.remove(rank)
        self._tickets[rank] = ticket, version
        self._recalled.discard(rank)
        self._awaited[rank] = now

    def answered(self, rank: int) -> tuple[Ticket, int] | None:
        """A worker has said something, and is idle. Returns what it worked on, and the version it read."""
        self._idle.add(rank)
        self._awaited.pop(rank, None)
        return self._tickets.pop(rank, None)

    def recall(self, is_late: Callable[[Ticket], bool]) -> list[int]:
        """Those who work on what comes too late, and do not know it yet."""
        working = {rank: ticket for rank, (ticket, _) in self._tickets.items()}
        late = [rank for rank, ticket in working.items() if is_late(ticket) and rank not in self._recalled]
        self._recalled.update(late)
        return late

    def lose(self, rank: int, why: str) -> Ticket | None:
        """Mark a worker as lost. Returns the ticket that it worked on."""
        self.lost[rank] = why
        self._idle.discard(rank)
        self._awaited.pop(rank, None)
        ticket, _ = self._tickets.pop(rank, (None, 0))
        return ticket

    def require(self, num_needed: int) -> None:
        """See that enough are left.

        Raises:
            CommunicationError: too few; names those that are lost.
        """
        left, lost = len(self.left), len(self.lost)
        if left >= num_needed:
            return
        why = "; ".join(self.lost[rank] for rank in sorted(self.lost))
        raise CommunicationError(
            f"too few workers: a step needs {num_needed}, {left} are left and {lost} are lost: {why}",
            next_step="look at what these ranks printed, then resume from the newest checkpoint",
        )

    def due(self, last_sign: Callable[[int], float], deadline_seconds: float) -> dict[int, float]:
        """The deadline of each worker that has to answer.

        Args:
            last_sign: when a rank last took or sent a byte.
        """
        return {rank: max(since, last_sign(rank)) + deadline_seconds for rank, since in self._awaited.items()}
