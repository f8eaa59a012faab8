"""Whether a rank that was slow keeps up again: by its answers, which a server hears, or by a trial.

A rank that serves computes nothing that shows it: it is tried with some micro-batches where a round ends
(`tried`), and workers say how long theirs took. Replicas that train alone are followed where they meet
(`followed`).

To be named a rank has to take `factor` times what others take, in two windows; to have recovered, half of
that excess at most, in three windows one after another, and in twice as many after every return. So a run
that goes back and forth does so ever more seldom.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from paceline.sync.policy import Policy, Push, Ticket

RECOVERED = "recovered"
"""The event that ends the phase of a rule that took over."""
TOOK = "took"
"""Of a push, where a worker says it: how long a micro-batch has taken it."""
WINDOW = 4  # answers of the slow worker
WINDOWS = 3


class Awaited(NamedTuple):
    """Whom a run waits for.

    Args:
        rank: that was named as slow.
        cause: see `Slow`.
        returns: how often the run has gone back already.
    """

    rank: int
    cause: str
    returns: int


class Recovery:
    """Judges one worker of a server, or one replica; pure.

    Args:
        slow: the worker.
        num_workers: at least two; of one nobody can tell.
        factor: see `Judge`.
        returns: see `Awaited`.
    """

    def __init__(self, slow: int, num_workers: int, factor: float, returns: int) -> None:
        self._slow, self._limit = slow, 1 + (factor - 1) / 2
        self._wanted, self._good = WINDOWS * 2**returns, 0
        self._found: dict[int, list[float]] = {worker: [] for worker in range(num_workers)}

    def hear(self, worker: int, seconds: float) -> Mapping[str, float] | None:
        """A worker has answered after so long. Returns what both take, once the slow one is so no more."""
        self._found[worker].append(seconds)
        if len(self._found[self._slow]) < WINDOW or not all(self._found.values()):
            return None
        mine = median(self._found[self._slow])
        usual = median(median(found) for other, found in self._found.items() if other != self._slow)
        self._good = self._good + 1 if mine <= self._limit * usual else 0
        self._found = {one: [] for one in self._found}
        return {"seconds": mine, "usual": usual} if self._good >= self._wanted else None


class Trial(NamedTuple):
    """Of a rank that is tried, for it answers nobody.

    Args:
        number: among those that are heard.
        seconds: runs some micro-batches, and says how long one took; None: nobody is tried.
    """

    number: int = 0
    seconds: Callable[[], float] | None = None

    def answers(self) -> list[float]:
        """As many as a window has."""
        return [] if self.seconds is None else [self.seconds()] * WINDOW


class UntilRecovered:
    """A policy that opens no further step once the slow worker has recovered; all others are the inner one's.

    Not once a worker is lost: every-step would need it.

    Args:
        hear: of a `Recovery`.
        rank: of the slow worker.
        clock: in seconds.
        took: of what a worker brought, and how long it was away, what is heard of it.
    """

    def __init__(
        self,
        inner: Policy,
        hear: Callable[[int, float], Mapping[str, float] | None],
        rank: int,
        clock: Callable[[], float],
        took: Callable[[Push, float], float] = lambda push, seconds: seconds,
    ) -> None:
        self._inner, self._hear, self._rank, self._clock = inner, hear, rank, clock
        self._took, self._trial = took, Trial()
        self.begin, self.stop, self.give_back = inner.begin, inner.stop, inner.give_back
        self.is_late, self.drops = inner.is_late, inner.drops
        self._given: dict[int, float] = {}
        self._found: Mapping[str, float] | None = None
        self._is_whole = True

    def ticket(self, worker: int) -> Ticket | None:
        """See `Policy`."""
        found = self._inner.ticket(worker)
        if found is not None:
            self._given[worker] = self._clock()
        return found

    def try_with(self, number: int, seconds: Callable[[], float]) -> None:
        """The slow rank is this one, which serves; see `Trial`."""
        self._trial = Trial(number, seconds)

    def push(self, worker: int, push: Push) -> Sequence[Push] | None:
        """See `Policy`."""
        found = self._hear(worker, self._took(push, self._clock() - self._given[worker]))
        if found is not None and self._is_whole:
            self._found = found
        applied = self._inner.push(worker, push)
        if self._found is not None:
            self._inner.stop()
        return applied

    def lose(self, worker: int, ticket: Ticket | None) -> None:
        """See `Policy`."""
        self._is_whole, self._found = False, None
        self._inner.lose(worker, ticket)

    def news(self) -> Mapping[str, Mapping[str, Any]]:
        """What all ranks are to be told at the end of a round, by the name of the event."""
        if self._is_whole and self._found is None:
            for seconds in self._trial.answers():
                self._found = self._hear(self._trial.number, seconds) or self._found
        if self._found is None:
            return {}
        return {RECOVERED: {"step": self._inner.step, "rank": self._rank, **self._found}}

    @property
    def is_complete(self) -> bool:
        """See `Policy`."""
        return self._inner.is_complete

    @property
    def num_needed(self) -> int:
        """See `Policy`."""
        return self._inner.num_needed

    @property
    def step(self) -> int:
        """See `Policy`."""
        return self._inner.step
