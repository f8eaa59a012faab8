"""Whether a rank that was slow keeps up again: by its answers, which a server hears, or by what it computes.

Replicas that train alone say how long a micro-batch takes them where they meet, and all judge from the same
numbers. Of a link that was slow these show nothing.

To be named a rank has to take `factor` times what others take, in two windows; to have recovered, half of
that excess at most, in three windows one after another, and in twice as many after every return. So a run
that goes back and forth does so ever more seldom.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from statistics import median
from typing import Any, NamedTuple, cast

import torch

from paceline.comm import Net
from paceline.data import Feed
from paceline.layout import Placed
from paceline.mesh import Group
from paceline.observe import Stats
from paceline.sync.health import Note
from paceline.sync.policy import Policy, Push, Ticket
from paceline.sync.rule import Rule
from paceline.sync.update import UpdateStep

RECOVERED = "recovered"
"""The event that ends the phase of a rule that took over."""
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


class UntilRecovered:
    """A policy that opens no further step once the slow worker has recovered; all others are the inner one's.

    Not once a worker is lost: every-step would need it.

    Args:
        hear: of a `Recovery`.
        rank: of the slow worker.
        clock: in seconds.
    """

    def __init__(
        self,
        inner: Policy,
        hear: Callable[[int, float], Mapping[str, float] | None],
        rank: int,
        clock: Callable[[], float],
    ) -> None:
        self._inner, self._hear, self._rank, self._clock = inner, hear, rank, clock
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

    def push(self, worker: int, push: Push) -> Sequence[Push] | None:
        """See `Policy`."""
        found = self._hear(worker, self._clock() - self._given[worker])
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


class Followed:
    """A rule of replicas that train alone, under which one of them is followed until it keeps up again.

    A round is as many answers as it has steps, and a window at most.

    Args:
        inner: takes the steps; replicas meet where a round ends.
        hear: of a `Recovery`; a worker is a place in the group.
        rank: the slow one.
        ran: how many micro-batches this rank ran in a step.
        group: the replicas.
        note: is told once it keeps up, which ends the phase.
    Wire: one all_gather of 8 bytes a rank for each round.
    """

    def __init__(
        self,
        inner: Rule,
        hear: Callable[[int, float], Mapping[str, float] | None],
        rank: int,
        ran: Callable[[int], int],
        *,
        group: Group,
        net: Net,
        note: Note,
    ) -> None:
        self.inner, self._hear, self._rank, self._ran = inner, hear, rank, ran
        self._group, self._net, self._note = group, net, note
        self._has_recovered = False

    def rounds(self, feed: Feed, placed: Placed, update_step: UpdateStep) -> Iterator[Stats]:
        """See `Rule`: a round is one of the inner rule."""
        before = update_step.state.step
        rounds = cast("Generator[Stats, None, None]", self.inner.rounds(feed, placed, update_step))
        with closing(rounds):
            for stats in rounds:
                steps = range(before, stats.step + 1)
                before = stats.step + 1
                if not self._has_recovered:
                    self._look(stats, steps, placed.holding.device)
                yield stats

    def abort(self) -> None:
        """See `Rule`."""
        self.inner.abort()

    def _look(self, stats: Stats, steps: range, device: torch.device) -> None:
        """Hear how long a micro-batch of the round took each replica; collective."""
        phases, ran = stats.phases, max(1, sum(map(self._ran, steps)))
        mine = (phases["data"] + phases["forward"] + phases["backward"]) / ran
        seconds = torch.tensor([mine], dtype=torch.float64, device=device)
        parts = self._net.all_gather(seconds, self._group, equal=True).wait()
        for _ in range(min(WINDOW, len(steps))):
            for place, part in enumerate(parts):
                found = self._hear(place, float(part))
                if found is not None and not self._has_recovered:
                    self._has_recovered = True
                    self._note(RECOVERED, {"step": stats.step + 1, "rank": self._rank, **found})
