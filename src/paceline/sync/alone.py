"""Replicas that train alone for a while and then meet: the round, as all rules of this kind have it.

A round is a stretch of steps that a replica takes by itself, with all ranks that it is spread over. Rules
differ in where it ends, in what they do beside a step, and in how they meet: three functions that they hand
in.

Invariant: a round that an error has interrupted goes on with the step in which it was left. After a round all
ranks have the same tally, and buffers that have moved by the mean of what they moved on the ranks, weighted
by micro-batches as in every-step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from paceline.comm import Net, Tally
from paceline.data import Feed, Stream, Work
from paceline.layout import Placed
from paceline.mesh import Group
from paceline.observe import Phases, Stats
from paceline.observe.phases import OWN
from paceline.sync.dealing import Even, Taken
from paceline.sync.every_step import EveryStep
from paceline.sync.rule import step_stats
from paceline.sync.update import Update, UpdateStep

Take = Callable[[], Update]
"""Takes a step of this replica."""


@dataclass
class Stretch:
    """A round under way.

    Args:
        first: its first step.
        end: the step before which it ends.
        buffers: what it started from.
        taken: its steps so far.
        whole: about how many items each of them had on all replicas, whether they were applied or not.
        is_agreed: all ranks end it there, whatever they are asked from now on.
    """

    first: int
    end: int
    buffers: list[Tensor]
    taken: list[tuple[Tally, Update]] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    is_agreed: bool = False

    @property
    def step(self) -> int:
        """The one that comes next."""
        return self.first + len(self.taken)

    @property
    def count(self) -> float:
        """Items that its updates were made of."""
        return sum(tally.count for tally, _ in self.taken)

    @property
    def skipped(self) -> float:
        """Steps that were not applied."""
        return float(sum(not update.applied for _, update in self.taken))

    def end_with(self, steps: Iterable[int]) -> None:
        """End it where the rank is that has come farthest, of all ranks; one step is taken at least."""
        self.end, self.is_agreed = max(self.first + 1, *steps), True


class Alone:
    """What the rules share.

    Args:
        inner: the step of one replica.
        replicas: the ranks that hold what this one holds, of every replica one.
        shares: which part of a batch this rank runs.
    """

    def __init__(
        self,
        inner: EveryStep,
        *,
        replicas: Group,
        net: Net,
        phases: Phases,
        shares: Even | None = None,
    ) -> None:
        self.inner, self._replicas, self._net, self._phases = inner, replicas, net, phases
        self.shares = shares or Even()
        self._stretch: Stretch | None = None

    def rounds(
        self,
        feed: Feed,
        placed: Placed,
        update_step: UpdateStep,
        *,
        begin: Callable[[Feed, int], int],
        step: Callable[[Stretch, Take], None],
        meet: Callable[[Stretch, Placed], tuple[Tally, Mapping[str, float]]],
    ) -> Iterator[Stats]:
        """See `Rule`.

        Args:
            begin: begins a round with a step; says before which it ends.
            step: takes the next one, or finds that the round ends.
            meet: ends a round on all ranks; returns what they have done, and what is told beside the metrics.
        """
        state, update_step = update_step.state, self.shares.weighted(update_step)
        with Reading(feed) as reading:
            while state.step < feed.num_steps:
                self._phases.take()
                if self._stretch is None:
                    self._stretch = Stretch(state.step, begin(feed, state.step), placed.buffers.values())
                stretch = self._stretch
                take = self._taking(stretch, reading, placed, update_step)
                while state.step < stretch.end:
                    step(stretch, take)
                self._phases.begin("communication")
                tally, told = meet(stretch, placed)
                self._stretch = None
                steps, update = range(stretch.first, stretch.end), stretch.taken[-1][1]
                stats = step_stats(steps, feed.work, state, tally, update, self._phases, self._net)
                yield replace(stats, metrics={**stats.metrics, **told})

    def agree(self, stretch: Stretch, placed: Placed, **own: float) -> tuple[Tally, Mapping[str, float]]:
        """The sums over all replicas, and buffers that are equal; collective.

        Args:
            own: sums of the rule.
        Returns:
            Those of the task, and those of the rule.
        """
        mine = add_tallies([tally for tally, _ in stretch.taken])
        own |= self.shares.sums()
        change = placed.buffers.moved_since(stretch.buffers, mine.micro_batches)
        both = {**mine.metrics, **{f"{_OWN}{name}": value for name, value in own.items()}}
        told = replace(mine, buffers=change, metrics=both)
        tally = told.agree(self._net, self._replicas, placed.holding.device).wait()
        placed.buffers.reset(stretch.buffers)
        placed.buffers.end_step(tally.buffers, tally.micro_batches)
        if (owed := self.inner.owed) is not None:
            owed.settle(placed.holding.updates, is_paid=tally.count > 0)
        metrics = {name: tally.metrics[name] for name in mine.metrics}
        sums = {name: tally.metrics[f"{_OWN}{name}"] for name in own}
        self.shares.settle(stretch.end, sums)
        return replace(tally, metrics=metrics), sums

    def forget(self) -> None:
        """Another state is loaded: a round that was under way is over."""
        self._stretch = None

    def _taking(self, stretch: Stretch, reading: Reading, placed: Placed, update_step: UpdateStep) -> Take:
        state = update_step.state

        def take() -> Update:
            work = self.shares.deal(reading.feed.work, state.step)
            taken, before = Taken(reading.stream(work, state.step)), self._phases.spent(*OWN)
            tally, update = self.inner.step(work, taken, placed, update_step)
            stretch.taken.append((_counted(tally, update), update))
            stretch.whole.append(float(work.num_samples(state.step) * self.inner.items_per_sample))
            seconds = self._phases.spent(*OWN) - before
            self.shares.ran(seconds, taken.samples, applied=update.applied)
            state.step += 1
            return update

        return take


class Reading:
    """The stream of what this rank has to do, opened anew where that changes."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self._work: Work | None = None
        self._stream: Stream | None = None

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *error: object) -> None:
        if self._stream is not None:
            self._stream.close()

    def stream(self, work: Work, step: int) -> Stream:
        """From a step on, which is the next one."""
        if self._stream is None or work is not self._work:
            self.__exit__()
            self._work, self._stream = work, replace(self.feed, work=work).from_step(step)
        return self._stream


_OWN = "rule/"


def _counted(tally: Tally, update: Update) -> Tally:
    """A step that was not applied moved nothing: its items have no weight."""
    if update.applied:
        return tally
    return replace(tally, total=0.0, count=0.0, metrics=dict.fromkeys(tally.metrics, 0.0))


def add_tallies(tallies: Sequence[Tally]) -> Tally:
    """The sum over steps; the change of the buffers is left to the caller."""
    first = tallies[0]
    return Tally(
        micro_batches=sum(t.micro_batches for t in tallies),
        total=sum(t.total for t in tallies),
        count=sum(t.count for t in tallies),
        metrics={name: sum(t.metrics[name] for t in tallies) for name in first.metrics},
        stops=max(t.stops for t in tallies),
        used=[sum(column) for column in zip(*(t.used for t in tallies), strict=True)],
        buffers=first.buffers,
    )
