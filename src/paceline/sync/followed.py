"""Replicas that train alone follow the slow one where they meet, until it keeps up again.

All say how long a micro-batch took them, or, where a link was slow, send some bytes around a ring, as when it
was named; so all judge from the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import cast

import torch

from paceline.comm import Net
from paceline.data import Feed
from paceline.layout import Placed
from paceline.mesh import Group
from paceline.observe import Stats
from paceline.sync.health import Note
from paceline.sync.recovery import RECOVERED, WINDOW
from paceline.sync.rule import Rule
from paceline.sync.straggler import of_both_links, probe
from paceline.sync.update import UpdateStep

Look = Callable[[Stats, range, torch.device], Sequence[float]]
"""Seconds of each replica, by its place, after a round of so many steps; collective."""


class Followed:
    """A rule of replicas that train alone, under which one of them is followed until it keeps up again.

    A round is as many answers as it has steps, and a window at most.

    Args:
        inner: takes the steps; replicas meet where a round ends.
        hear: of a `Recovery`; a worker is a place in the group.
        rank: the slow one.
        look: what of a round is heard.
        note: is told once it keeps up, which ends the phase.
    """

    def __init__(
        self,
        inner: Rule,
        hear: Callable[[int, float], Mapping[str, float] | None],
        rank: int,
        look: Look,
        note: Note,
    ) -> None:
        self.inner, self._hear, self._rank, self._look, self._note = inner, hear, rank, look, note
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
                    self._follow(stats, steps, placed.holding.device)
                yield stats

    def abort(self) -> None:
        """See `Rule`."""
        self.inner.abort()

    def _follow(self, stats: Stats, steps: range, device: torch.device) -> None:
        """Hear what the round took each replica; collective."""
        parts = self._look(stats, steps, device)
        for _ in range(min(WINDOW, len(steps))):
            for place, part in enumerate(parts):
                found = self._hear(place, part)
                if found is not None and not self._has_recovered:
                    self._has_recovered = True
                    self._note(RECOVERED, {"step": stats.step + 1, "rank": self._rank, **found})


def by_compute(ran: Callable[[int], int], group: Group, net: Net) -> Look:
    """How long a micro-batch of the round took each replica.

    Args:
        ran: how many micro-batches this rank ran in a step.
        group: the replicas.
    Wire: one all_gather of 8 bytes a rank for each round.
    """

    def look(stats: Stats, steps: range, device: torch.device) -> list[float]:
        phases, num = stats.phases, max(1, sum(map(ran, steps)))
        mine = (phases["data"] + phases["forward"] + phases["backward"]) / num
        seconds = torch.tensor([mine], dtype=torch.float64, device=device)
        return [float(part) for part in net.all_gather(seconds, group, equal=True).wait()]

    return look


def by_links(group: Group, net: Net) -> Look:
    """How long a probe takes on the faster link of each replica.

    Args:
        group: the replicas, at least three.
    Wire: that of a probe for each round; see `straggler`.
    """

    def look(stats: Stats, steps: range, device: torch.device) -> list[float]:
        return of_both_links(probe(net, group, device))

    return look
