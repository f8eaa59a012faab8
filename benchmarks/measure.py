"""Take turns and compare: blocks of steps of several sides, in one process, in alternating order.

Invariant: all sides live through the whole measurement and run equally many steps, and the order turns round
after each round; so a machine that is slow for a while is slow for all of them. Losses are kept beside the
times: a side that does other work than the rest shows.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

EQUAL_BAND = 0.03
"""Ratios within 1 +- this count as equal."""
COMPARED_STEPS = 5
FEWEST_BLOCKS = 3
"""Less says nothing of the spread, however slow the machine."""


@dataclass(frozen=True)
class Side:
    """One of those that are compared.

    Args:
        name: in the tables.
        step: does one step and returns its loss.
        begin: called before each block, outside the time.
        steps: how many make a block; 0: as many as the measurement says.
    """

    name: str
    step: Callable[[], float]
    begin: Callable[[], object] = lambda: None
    steps: int = 0


@dataclass(frozen=True)
class Series:
    """What was measured of one side.

    Args:
        seconds: wall seconds a step, one entry a block.
        cpu_seconds: seconds of all threads of this process a step, one entry a block.
        losses: one entry a step, with the warm-up.
        steps: of a block.
    """

    name: str
    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]
    losses: tuple[float, ...]
    steps: int = 0

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Spread:
    """A median, and the quartiles beside it."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one value or more."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(low, median, high)


def take_turns(
    sides: Sequence[Side],
    *,
    repeats: int,
    steps: int,
    warmup: int,
    ready: Callable[[], object] = lambda: None,
    budget_seconds: float = math.inf,
    slowest: Callable[[float], float] = lambda seconds: seconds,
) -> list[Series]:
    """Measure all sides; on a machine that is too slow for it, in shorter and fewer blocks.

    Args:
        repeats: blocks of each side.
        steps: steps of each block, where a side does not say.
        warmup: steps of each side before the first block; the last of them says how long a block takes.
        ready: called before each block, outside the time: a barrier, where several processes measure.
        budget_seconds: how long all blocks may take together.
        slowest: the largest of a number over the processes that measure.
    """
    clocks = [_Clock(side, side.steps or steps) for side in sides]
    for clock in clocks:
        ready()
        clock.warm_up(warmup)
    seconds = slowest(sum(clock.last_step * clock.steps for clock in clocks))
    share = budget_seconds / (seconds * repeats) if seconds else 1.0
    for clock in clocks:
        clock.steps = max(1, int(clock.steps * min(1.0, share)))
    seconds = slowest(sum(clock.last_step * clock.steps for clock in clocks))
    affordable = int(min(repeats, budget_seconds / seconds)) if seconds else repeats
    for i in range(max(min(repeats, FEWEST_BLOCKS), affordable)):
        for clock in clocks if i % 2 == 0 else reversed(clocks):
            ready()
            clock.time_block()
    return [clock.series() for clock in clocks]


class _Clock:
    """Runs the blocks of one side.

    Attributes:
        steps: of a block.
        last_step: seconds of the last step of the warm-up.
    """

    def __init__(self, side: Side, steps: int) -> None:
        self.side = side
        self.steps = steps
        self.last_step = 0.0
        self._wall: list[float] = []
        self._cpu: list[float] = []
        self._losses: list[float] = []

    def warm_up(self, steps: int) -> None:
        self.side.begin()
        for _ in range(steps):
            begin = time.perf_counter()
            self._losses.append(self.side.step())
            self.last_step = time.perf_counter() - begin

    def time_block(self) -> None:
        self.side.begin()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(self.steps):
            self._losses.append(self.side.step())
        self._wall.append((time.perf_counter() - wall) / self.steps)
        self._cpu.append((time.process_time() - cpu) / self.steps)

    def series(self) -> Series:
        return Series(self.side.name, tuple(self._wall), tuple(self._cpu), tuple(self._losses), self.steps)


@dataclass(frozen=True)
class Comparison:
    """One side against a reference.

    Args:
        ratio: of the medians; above 1: slower than the reference.
        paired: of the blocks of the same round.
        cpu_ratio: of the medians of processor time, which other jobs of the machine disturb less.
        loss_error: largest relative difference of the losses in the first `COMPARED_STEPS` steps; after them
            rounding grows into different paths.
    """

    ratio: float
    paired: Spread
    cpu_ratio: float
    loss_error: float

    @property
    def verdict(self) -> str:
        """In words, with the band."""
        if abs(self.ratio - 1) <= EQUAL_BAND:
            return "equal"
        return "slower" if self.ratio > 1 else "faster"


def compare(series: Series, reference: Series) -> Comparison:
    """Compare two series of one measurement."""
    pairs = list(zip(series.losses, reference.losses, strict=False))[:COMPARED_STEPS]
    errors = [abs(a - b) / max(abs(b), 1e-12) for a, b in pairs]
    return Comparison(
        ratio=series.median_seconds / reference.median_seconds,
        paired=Spread.of([a / b for a, b in zip(series.seconds, reference.seconds, strict=True)]),
        cpu_ratio=statistics.median(series.cpu_seconds) / statistics.median(reference.cpu_seconds),
        loss_error=max(errors),
    )


def merge_ranks(ranks: Sequence[Sequence[Series]]) -> list[Series]:
    """The series of all ranks as those of the job: the slowest rank's time, the mean of the losses.

    A rank whose losses are NaN had no part in that side.
    """
    return [_merge([series[i] for series in ranks]) for i in range(len(ranks[0]))]


def chain(rounds: Sequence[Sequence[Series]]) -> list[Series]:
    """The series of several measurements of the same sides as one; the losses are those of the first."""
    return [_chain([series[i] for series in rounds]) for i in range(len(rounds[0]))]


def _chain(parts: Sequence[Series]) -> Series:
    return Series(
        parts[0].name,
        tuple(block for part in parts for block in part.seconds),
        tuple(block for part in parts for block in part.cpu_seconds),
        parts[0].losses,
        parts[0].steps,
    )


def _merge(same: Sequence[Series]) -> Series:
    same = [s for s in same if not math.isnan(s.losses[0])]  # a rank without a part in it
    return Series(
        same[0].name,
        tuple(max(block) for block in zip(*(s.seconds for s in same), strict=True)),
        tuple(sum(block) for block in zip(*(s.cpu_seconds for s in same), strict=True)),
        tuple(statistics.fmean(step) for step in zip(*(s.losses for s in same), strict=True)),
        same[0].steps,
    )
