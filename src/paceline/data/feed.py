"""The feed: which micro-batches there are, and how a rule reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from paceline.data.work import LoadedBatch, MicroBatch, Work

_FEWEST_PAUSES = 20


class Stream(Iterator[LoadedBatch], AbstractContextManager["Stream"], Protocol):
    """Micro-batches with their batches, as somebody takes them; whoever opens a stream closes it."""

    def close(self) -> None:
        """Let go of what makes the batches; may be called twice."""


class Reader(Protocol):
    """Makes batches of micro-batches: a `Loader` reads samples, `Produced` asks whoever acts.

    Attributes:
        cache_hits, cache_lookups: samples that were taken from memory, and that were looked for there.
    """

    cache_hits: int
    cache_lookups: int

    def open(self, micro_batches: Iterable[MicroBatch]) -> Stream:
        """Start, finitely or endlessly; micro-batches are taken as they are needed."""


def longest_stretch(num_steps: int, intervals: Sequence[int]) -> int:
    """The most steps between two pauses, see `Feed.pause_after`."""
    return min(num_steps, *_wanted(num_steps, intervals))


def _wanted(num_steps: int, intervals: Sequence[int]) -> Sequence[int]:
    """Every so many steps a pause."""
    seen = max(1, num_steps // _FEWEST_PAUSES)  # so that progress shows and a run can be stopped
    return [n for n in (*intervals, seen) if n > 0]


@dataclass(frozen=True, eq=False)
class Feed:
    """What a rule trains on.

    Args:
        work: this replica's micro-batches of any step.
        loader: makes batches of them.
        num_steps: the length of the run.
        intervals: every so many steps the state is wanted, to be saved or evaluated.
    """

    work: Work
    loader: Reader
    num_steps: int
    intervals: Sequence[int] = ()

    def pause_after(self, step: int) -> int:
        """The next step, after `step`, before which a rule must come to rest if it does not at every step."""
        wanted = _wanted(self.num_steps, self.intervals)
        return min(self.num_steps, *((step // n + 1) * n for n in wanted))

    def open(self, micro_batches: Iterable[MicroBatch]) -> Stream:
        """Start reading some micro-batches; whoever opens a stream closes it."""
        return self.loader.open(micro_batches)

    def from_step(self, step: int) -> Stream:
        """This replica's micro-batches from a step to the end of the run."""
        return self.open(self._micro_batches(step))

    def _micro_batches(self, step: int) -> Iterator[MicroBatch]:
        for k in range(step, self.num_steps):
            yield from self.work.micro_batches(k)
