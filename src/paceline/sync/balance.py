"""Shares that follow speed: a replica that is slow runs fewer shards of every batch, and nobody waits for it.

Every few steps all ranks say how long a shard takes them, and the shards are dealt so that the slowest ends
as early as it can. Who runs a shard changes nothing in it, neither its samples nor its keys, and sums are
divided once by what the whole batch counts: so the gradient is that of the whole batch, whatever the shares.

Invariant: all ranks plan from the same numbers, and change their shares before the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from statistics import median
from typing import cast

import torch

from paceline.comm import Net
from paceline.data import Feed, Work
from paceline.layout import Placed
from paceline.mesh import Group
from paceline.observe import Stats
from paceline.sync.health import Note
from paceline.sync.rule import Rule
from paceline.sync.update import UpdateStep

WINDOW = 8  # steps between two looks
LEAST_GAIN = 0.05  # of a step, for which shares change
LEAST_SECONDS = 1e-6
_BUSY = ("data", "forward", "backward")


def plan_shares(seconds: Sequence[float], shards: int) -> tuple[int, ...]:
    """How many shards each rank runs, so that the last to end ends first; at least one each; pure.

    Args:
        seconds: that a shard takes, by rank.
        shards: of a batch, at least as many as there are ranks.
    """
    shares = [1] * len(seconds)
    for _ in range(shards - len(seconds)):
        ends = [(share + 1) * one for share, one in zip(shares, seconds, strict=True)]
        shares[ends.index(min(ends))] += 1
    return tuple(shares)


def slowest(shares: Sequence[int], seconds: Sequence[float]) -> float:
    """Seconds until the last rank has run its shards."""
    return max(share * one for share, one in zip(shares, seconds, strict=True))


class Balanced:
    """A rule whose shares follow speed.

    Args:
        inner: takes the steps.
        deal: the same work, of which every rank has so many shards.
        shares: to begin with, by rank of `group`.
        group: the ranks that share the shards of a step.
        note: is told of new shares, and a window later of what they have gained.
    Wire: every `WINDOW` steps one all_gather of 8 bytes a rank.
    """

    def __init__(
        self,
        inner: Rule,
        deal: Callable[[Work, Sequence[int]], Work],
        shares: Sequence[int],
        *,
        group: Group,
        net: Net,
        note: Note,
    ) -> None:
        self.inner, self.shares = inner, tuple(shares)
        self._deal, self._group, self._net, self._note = deal, group, net, note
        self._found: list[float] = []
        self._steps: list[float] = []
        self._before: float | None = None  # seconds of a step under the last shares, until the gain is told
        self._work: Work | None = None

    def rounds(self, feed: Feed, placed: Placed, update_step: UpdateStep) -> Iterator[Stats]:
        """See `Rule`: a round is one of the inner rule."""
        state = update_step.state
        while state.step < feed.num_steps:
            mine = replace(feed, work=self._deal(feed.work, self.shares))
            self._work = mine.work
            rounds = cast("Generator[Stats, None, None]", self.inner.rounds(mine, placed, update_step))
            with closing(rounds):  # and with them the stream, which may read ahead
                for stats in rounds:
                    shares = self._look(stats, mine.work, placed.holding.device)
                    yield stats
                    if shares != self.shares:
                        self.shares = shares
                        break

    def ran(self, step: int) -> int:
        """How many micro-batches this rank ran in a step under its present shares."""
        return 0 if self._work is None else self._work.num_micro_batches(step)

    def abort(self) -> None:
        """See `Rule`."""
        self.inner.abort()

    def _look(self, stats: Stats, work: Work, device: torch.device) -> tuple[int, ...]:
        """The shares of the next step; collective where a window ends."""
        busy = sum(stats.phases[phase] for phase in _BUSY)
        self._found.append(busy / max(1, work.num_micro_batches(stats.step)))
        self._steps.append(stats.seconds)
        if (stats.step + 1) % WINDOW:
            return self.shares
        mine = torch.tensor([max(median(self._found), LEAST_SECONDS)], dtype=torch.float64, device=device)
        taken = median(self._steps)
        self._found, self._steps = [], []
        if self._before is not None:
            told = {"before": self._before, "after": taken, "times": self._before / taken}
            self._note("gain", {"step": stats.step + 1, **told})
            self._before = None
        parts = self._net.all_gather(mine, self._group, equal=True).wait()
        seconds = [float(part) for part in parts]
        shares = plan_shares(seconds, sum(self.shares))
        gains = slowest(shares, seconds) < (1 - LEAST_GAIN) * slowest(self.shares, seconds)
        if not gains:
            return self.shares
        self._before = taken
        self._note("shares", {"step": stats.step + 1, "shares": [*shares], "seconds": seconds})
        return shares
