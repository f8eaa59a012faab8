"""Lanes of a process: each goes its own way through a step, and all may have most at a time. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from paceline.plan.moments import Instant, Walk, Work
from paceline.plan.parts import Parts
from paceline.plan.sums import Sums


class SideBySide:
    """All lanes.

    Args:
        still: what stays during a step.
        sums: of the process; says what waits in each lane.
        work: of all its micro-batches, one after another.
    """

    def __init__(self, still: Parts, sums: Sums, work: Work) -> None:
        self._still = still
        self._lanes = [
            Walk(
                still,
                replace(sums, waiting=waiting),
                replace(work, order=work.order[: 2 * len(waiting)], is_lane=True),
            )
            for waiting in sums.lanes
        ]
        self._meeting = sum(waiting[-1] for waiting in sums.lanes) * sum(work.gradients)

    def instants(self) -> Iterator[Instant]:
        """Of the first lane, beside the most that others may have."""
        others = [one.most() for one in self._lanes[1:]]
        for instant in self._lanes[0].instants():
            yield replace(instant, parts=self._together([instant.parts, *others]))

    def most(self) -> Parts:
        """What is the largest: while lanes run, or where their sums meet."""
        meeting = replace(self._still, gradients=self._meeting)
        return max(
            self._together([one.most() for one in self._lanes]), meeting, key=lambda parts: parts.total
        )

    def _together(self, parts: Sequence[Parts]) -> Parts:
        return replace(
            parts[0],
            gradients=sum(one.gradients for one in parts),
            activations=sum(one.activations for one in parts),
        )
