"""Lanes of a process: each goes its own way through a step, and all may have most at a time. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

from paceline.plan.memory_plan import MemoryByKind
from paceline.plan.step_peak import MemoryInstant, StepWalk, StepWork
from paceline.plan.zero_memory import GradientSumMemory


class SideBySide:
    """All lanes.

    Args:
        still: what stays during a step.
        sums: of the process; says what waits in each lane.
        work: of the process, with that of its lanes.
    """

    def __init__(self, still: MemoryByKind, sums: GradientSumMemory, work: StepWork) -> None:
        self._still = still = replace(still, gradients=sums.own)
        pairs = [*zip(sums.lanes, work.lanes, strict=True)]
        self._lanes = [
            StepWalk(still, GradientSumMemory(own=sums.own, waiting=waiting, at_end=True), lane)
            for waiting, lane in pairs
        ]
        gradients = sum(_at_the_end(waiting, lane) for waiting, lane in pairs)
        added = (1 + max(map(max, sums.lanes))) * work.shared
        self._meeting = replace(still, gradients=sums.own + gradients + added, wire=still.wire + sums.meeting)

    def instants(self) -> Iterator[MemoryInstant]:
        """Of each lane, beside the most that the others may have."""
        most = [one.largest() for one in self._lanes]
        for number, lane in enumerate(self._lanes):
            others = [*most[:number], *most[number + 1 :]]
            for instant in lane.instants():
                together = [instant, *others]
                flying = tuple(map(sum, zip(*(one.flying for one in together), strict=True)))
                parts = self._together([one.parts for one in together])
                yield replace(instant, parts=parts, flying=flying)

    def most(self) -> MemoryByKind:
        """What is the largest: while lanes run, or where their sums meet."""
        running = self._together([one.most() for one in self._lanes])
        return max(running, self._meeting, key=lambda parts: parts.total)

    def _together(self, lanes: Sequence[MemoryByKind]) -> MemoryByKind:
        """What stays, and what each lane has beside that."""
        found = asdict(self._still)
        for kind, stays in asdict(self._still).items():
            found[kind] += sum(getattr(one, kind) - stays for one in lanes)
        return MemoryByKind(**found)


def _at_the_end(waiting: Sequence[int], lane: StepWork) -> int:
    """Bytes of gradients that a lane has when it has ended."""
    return waiting[-1] * sum(lane.gradients) + len(waiting) * sum(lane.apart.values())
