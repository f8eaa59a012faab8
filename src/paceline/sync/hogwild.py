"""Hogwild!: replicas of one host update the same parameters in memory, when each is ready, and no lock.

The parameters lie once, in memory that all ranks have mapped. Every rank runs its own part of each batch and
updates all parameters where they lie, with an optimizer of its own, while others read and write them. A
gradient may be of parameters that others change meanwhile; an update may be lost where two ranks read a value
before either has written it. Which are lost cannot be told afterwards, so a tally of ones is kept beside
the parameters, in the same way: every update adds one to each of its values, and what is missing at the end
of a round is the share that was lost.

A round is a stretch of steps, in which no rank waits for another. Invariant: every sample is used once, and
between two rounds nobody writes, all ranks have taken the same number of steps, and all hold equal parameters
(the same memory) and equal buffers (moved by the mean of what they moved on each rank, as in local SGD).
Two runs do not compute the same bits.

With a bound S no rank begins a step while another has not taken all before the last S: so a gradient misses
at most S steps of any rank before its own, and when it is applied nobody has applied one of more than S
steps later (`bounded` without a server).
Source: Recht, Re, Wright and Niu 2011, Hogwild!, NIPS, arXiv:1106.5730, Algorithm 1; Ho et al. 2013, A Stale
Synchronous Parallel Parameter Server, NIPS, section 3.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from paceline.comm import Net, Tally
from paceline.data import Feed, Stream
from paceline.errors import DeadlineError
from paceline.layout import Placed
from paceline.mesh import Group
from paceline.observe import Phases, Stats
from paceline.state import TrainState
from paceline.sync.every_step import EveryStep
from paceline.sync.local import add_tallies, counted
from paceline.sync.rule import step_stats
from paceline.sync.update import Update, UpdateStep

_LOOK_SECONDS = 5e-4


class Board:
    """What ranks tell each other through memory, without a signal.

    Each value of `taken` and `stops` is written by one rank only, so none is lost.

    Args:
        taken: by rank, updates that it has made since the run began, int64 [P].
        stops: by rank, whether it was asked to stop, int64 [P].
        clocks: by rank, steps before this one are taken, int64 [P].
        ones: every update adds one to each value, as updates change parameters, float32 [N].
        rank: this one.
    """

    def __init__(self, taken: Tensor, stops: Tensor, clocks: Tensor, ones: Tensor, rank: int) -> None:
        self.taken, self.stops, self.clocks, self.ones, self._rank = taken, stops, clocks, ones, rank
        self._before, self._ones_before = 0, 0.0

    @property
    def updates(self) -> int:
        """Of all ranks, as far as this one sees."""
        return int(self.taken.sum())

    @property
    def stopping(self) -> bool:
        """Whether any rank was asked to stop."""
        return bool(self.stops.any())

    def ask_to_stop(self, asked: bool) -> None:
        """Tell the others whether this rank was asked."""
        self.stops[self._rank] = int(asked)

    def reach(self, step: int) -> None:
        """This rank has taken all steps before this one."""
        self.clocks[self._rank] = step

    def behind(self, step: int, bound: float) -> int | None:
        """A rank that has not taken all steps before the last `bound` ones before `step`; None: all have."""
        slowest = int(self.clocks.argmin())
        return slowest if int(self.clocks[slowest]) < step - bound else None

    def count(self) -> None:
        """This rank has made an update."""
        self.ones.add_(1.0)
        self.taken[self._rank] += 1

    def begin(self) -> None:
        """A round begins; nobody writes."""
        self._before, self._ones_before = self.updates, float(self.ones.double().mean())

    def lost_share(self) -> float:
        """Of the updates of this round, the share that was lost in a value; nobody writes."""
        made = self.updates - self._before
        arrived = float(self.ones.double().mean()) - self._ones_before
        return 1.0 - arrived / made if made else 0.0


@dataclass
class _Half:
    """A round under way.

    Args:
        first: its first step; negative: none is under way.
        end: the step before which it ends.
        is_agreed: all ranks end it there, whatever they are asked from now on.
        buffers: what it started from.
        taken: its steps so far.
        ages: of each, how many updates others made while it was computed and applied.
    """

    first: int = -1
    end: int = -1
    is_agreed: bool = False
    buffers: list[Tensor] = field(default_factory=list)
    taken: list[tuple[Tally, Update]] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)


class Hogwild:
    """The rule.

    Args:
        inner: the step of one rank, on parameters that lie in common.
        board: in memory of the same ranks.
        bound: S; `math.inf`: none.
        world: all ranks.
        stop_requested: see `EveryStep`.
    Wire: at the end of a round one all_gather of 8 bytes a rank, one all_reduce of the tally, and a barrier.
    """

    def __init__(
        self,
        inner: EveryStep,
        board: Board,
        bound: float = math.inf,
        *,
        world: Group,
        net: Net,
        phases: Phases,
        stop_requested: Callable[[], bool],
    ) -> None:
        self.inner, self.board, self._bound = inner, board, bound
        self._world, self._net, self._phases, self._stop_requested = world, net, phases, stop_requested
        self._half = _Half()

    def rounds(self, feed: Feed, placed: Placed, update_step: UpdateStep) -> Iterator[Stats]:
        """See `Rule`: a round ends where the feed wants a pause, or a rank was asked to stop."""
        state = update_step.state
        with feed.from_step(state.step) as stream:
            while state.step < feed.num_steps:
                self._phases.take()
                half = self._begin(feed, placed, state)
                while state.step < half.end:
                    if self._may_begin(state.step):
                        self._step(feed, stream, placed, update_step)
                    if not half.is_agreed and (self.board.stopping or state.step == half.end):
                        half.end, half.is_agreed = self._farthest(state.step), True
                tally, lost = self._meet(placed), self.board.lost_share()
                self._half = _Half()
                steps, update = range(half.first, half.end), half.taken[-1][1]
                stats = step_stats(steps, feed.work, state, tally, update, self._phases, self._net)
                yield _told(stats, tally, lost)

    def abort(self) -> None:
        """See `Rule`."""
        self.inner.abort()

    def _begin(self, feed: Feed, placed: Placed, state: TrainState) -> _Half:
        """A new round, once nobody reads what it will change; one that an abort has interrupted goes on."""
        if self._half.first < 0:
            self.board.begin()
            self.board.reach(state.step)
            with self._phases.during("communication"):
                self._net.barrier(self._world)
            end, buffers = feed.pause_after(state.step), placed.buffers.values()
            self._half = _Half(state.step, end, buffers=buffers)
        return self._half

    def _may_begin(self, step: int) -> bool:
        """Wait for those who are too far behind; false: the round is about to end instead.

        Raises:
            DeadlineError: one stays behind for a deadline.
        """
        if self.board.behind(step, self._bound) is None:
            return True
        expires = time.monotonic() + self._net.deadline_seconds
        with self._phases.during("communication"):
            while (rank := self.board.behind(step, self._bound)) is not None:
                self.board.ask_to_stop(self._stop_requested())
                if self.board.stopping and not self._half.is_agreed:
                    return False
                if time.monotonic() > expires:
                    raise DeadlineError(
                        f"rank {rank} is more than {self._bound:g} steps behind step {step} for"
                        f" {self._net.deadline_seconds:g} s",
                        next_step="look at what that rank does, or raise runtime.deadline_seconds",
                    )
                time.sleep(_LOOK_SECONDS)
        return True

    def _step(self, feed: Feed, stream: Stream, placed: Placed, update_step: UpdateStep) -> None:
        """One step of this rank; what others do meanwhile is its staleness."""
        self.board.ask_to_stop(self._stop_requested())
        read = self.board.updates
        tally, update = self.inner.step(feed.work, stream, placed, update_step)
        self._half.ages.append(self.board.updates - read)
        if update.applied:
            self.board.count()
        self._half.taken.append(counted(tally, update))
        update_step.state.step += 1
        self.board.reach(update_step.state.step)

    def _farthest(self, step: int) -> int:
        """Where the round ends: as far as the rank that has come farthest; collective."""
        with self._phases.during("communication"):
            steps = self._net.all_gather(torch.tensor([step]), self._world, equal=True).wait()
        return max(int(found) for found in steps)

    def _meet(self, placed: Placed) -> Tally:
        """The sums over all ranks, and buffers that are equal; afterwards nobody writes."""
        half = self._half
        mine = add_tallies([tally for tally, _ in half.taken])
        change = placed.buffers.moved_since(half.buffers, mine.micro_batches)
        metrics = {**mine.metrics, _AGES: float(sum(half.ages)), _STEPS: float(len(half.ages))}
        mine = replace(mine, buffers=change, metrics=metrics)
        with self._phases.during("communication"):
            tally = mine.agree(self._net, self._world, placed.holding.device).wait()
        placed.buffers.reset(half.buffers)
        placed.buffers.end_step(tally.buffers, tally.micro_batches)
        return tally


_AGES, _STEPS = "ages", "steps"


def _told(stats: Stats, tally: Tally, lost: float) -> Stats:
    """With how old gradients were, and how many updates were lost, beside the metrics of the task."""
    metrics = {name: value for name, value in stats.metrics.items() if name not in (_AGES, _STEPS)}
    staleness = tally.metrics[_AGES] / tally.metrics[_STEPS]
    return replace(stats, metrics={**metrics, "staleness": staleness, "lost_updates": lost})
