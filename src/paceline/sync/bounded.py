"""Bounded staleness: a server applies gradients as they come, and no worker gets more than S clocks ahead.

A clock is one global batch. Its parts are dealt in order, to whichever worker asks; a part of clock c is
handed out once all parts of the clocks before c - S have been applied. So a gradient of clock c misses the
updates of at most S clocks before its own, and when it is applied none of a clock after c + S has been.
With W workers at most W (2 S + 1) - 1 updates are made between its reading and its application.

S = 0: all parts of a clock are read from the same parameters, so they make one update, by their mean. Each
worker has the part of its number, and what falls to one that is lost goes to whoever asks: with a codec a
worker adds what it has not sent to the part that it runs, so another dealing would be another run.
S = inf: every part is dealt as soon as somebody asks, as in `ApplyEach`.

Pure, as every policy. Not as in the paper: there each worker has a share of the data of its own and sums are
not divided; here a slow worker takes fewer parts, so that only the part that it works on can be waited for.
Source: Ho et al. 2013, More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from paceline.sync.policy import Push, Ticket


class Bounded:
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
        self._returned: deque[Ticket] = deque()
        self._found: list[Push] = []
        self._dealt: set[int] = set()  # with a bound of 0: parts of the clock that is open
        self._lost: set[int] = set()

    def begin(self, first: int, end: int) -> None:
        """See `Policy`."""
        self._first = self.step = first
        self._next, self._end = first * self._num_workers, end * self._num_workers
        self._missing, self._found = {}, []
        self._returned.clear()
        self._dealt.clear()

    def ticket(self, worker: int) -> Ticket | None:
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
        return Ticket(clock, part)

    def _own_part(self, worker: int) -> int | None:
        """The worker's own part of the open clock, or one of a worker that is lost; None: these are dealt."""
        free = [part for part in (worker, *sorted(self._lost)) if part not in self._dealt]
        self._dealt.update(free[:1])
        return free[0] if free else None

    def push(self, worker: int, push: Push) -> Sequence[Push] | None:
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

    def give_back(self, worker: int, ticket: Ticket) -> None:
        """See `Policy`."""
        self._returned.append(ticket)

    def lose(self, worker: int, ticket: Ticket | None) -> None:
        """Somebody else does what it had, and with a bound of 0 what would fall to it."""
        self._lost.add(worker)
        if ticket is not None:
            self._returned.append(ticket)

    def is_late(self, ticket: Ticket) -> bool:
        """Nothing is."""
        return False

    def stop(self) -> None:
        """Finish the clock that is open, and at least one."""
        opened = max(self._next, self._first * self._num_workers + 1)
        self._end = min(self._end, -(-opened // self._num_workers) * self._num_workers)

    @property
    def is_complete(self) -> bool:
        """See `Policy`."""
        return self.step * self._num_workers >= self._end

    @property
    def num_needed(self) -> int:
        """One worker can do all."""
        return 1
