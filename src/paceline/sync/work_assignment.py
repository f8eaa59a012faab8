"""Shares that follow speed: a replica that is slow runs fewer shards of every batch, and nobody waits for it.

Every few steps all ranks say how long a shard takes them, and the shards are dealt so that the slowest ends
as early as it can. Who runs a shard changes nothing in it, neither its samples nor its keys, and sums are
divided once by what the whole batch counts: so the gradient is that of the whole batch, whatever the shares.

Invariant: all ranks plan from the same numbers, and change their shares before the same step.

How replicas that train alone tell each other what a shard takes them: in memory, or with their messages.

Invariant: nobody waits. What a rank says of a window all read as the same number.
Not done here: who has heard of a window by when follows from the rule (`lag` of `dealing.Dealt`).

What each of the replicas that train alone runs of a batch: a part that stays, or one that follows speed.

A rank that is slow runs fewer shards, and nobody waits for another to learn that. Every few steps (a window)
a rank tells how long a shard takes it, through what its rule has anyway: memory in common, or the next
message to a peer. The rule bounds how far ranks are apart; so `lag` steps after a window all have heard of
all, and each plans by itself, from the same numbers and for the same step.

A rank with n of the N samples of a batch makes an update of weight n P / N, where P ranks make one each. So
the weighted gradients of a batch add up to P times that of the whole batch, as with equal parts, whatever the
shares. SGD, also with momentum, is linear in the gradient, so its gradients are multiplied. Other optimizers
divide their gradient by its own size, and would not notice: they multiply the rate of that step instead.

Invariant: all ranks change their shares before the same step; at the end of a round every sample of its
batches was taken once, by one rank, and applied or dropped.
Not done here: samples that count different numbers of items weigh alike in sum, not one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from statistics import median
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from paceline.comm.net import Net
from paceline.data.work import LoadedBatch, LockstepWork, MicroBatchWork, TrainingFeed, split_evenly
from paceline.job.mesh import RankGroup
from paceline.observe.sinks import EventCallback
from paceline.observe.step_stats import StepStats
from paceline.parallel.model_runner import ModelRunner
from paceline.parallel.session_context import SessionContext
from paceline.sync.sync_rule import SyncRule, internal_rule_error
from paceline.sync.update import PendingUpdate, UpdateStep, insert_part_before

BALANCE_WINDOW_STEPS = 8  # steps between two looks
MIN_GAIN = 0.05  # of a step, for which shares change
MIN_SECONDS = 1e-6
_BUSY_PHASES = ("data", "forward", "backward")


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


def slowest_rank_seconds(shares: Sequence[int], seconds: Sequence[float]) -> float:
    """Seconds until the last rank has run its shards."""
    return max(share * one for share, one in zip(shares, seconds, strict=True))


class SpeedBalancedRule:
    """A rule whose shares follow speed.

    Args:
        inner: takes the steps.
        deal: the same work, of which every rank has so many shards.
        shares: to begin with, by rank of `group`.
        group: the ranks that share the shards of a step.
        note: is told of new shares, and a window later of what they have gained.
    Wire: every `BALANCE_WINDOW_STEPS` steps one all_gather of 8 bytes a rank.
    """

    def __init__(
        self,
        inner: SyncRule,
        deal: Callable[[MicroBatchWork, Sequence[int]], MicroBatchWork],
        shares: Sequence[int],
        *,
        group: RankGroup,
        net: Net,
        note: EventCallback,
    ) -> None:
        self.inner, self.shares = inner, tuple(shares)
        self._deal, self._group, self._net, self._note = deal, group, net, note
        self._found: list[float] = []
        self._steps: list[float] = []
        self._before: float | None = None  # seconds of a step under the last shares, until the gain is told
        self._work: MicroBatchWork | None = None

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        """See `SyncRule`: a round is one of the inner rule."""
        state = update_step.state
        while state.step < feed.num_steps:
            mine = replace(feed, work=self._deal(feed.work, self.shares))
            self._work = mine.work
            rounds = cast("Generator[StepStats, None, None]", self.inner.rounds(mine, runner, update_step))
            with closing(rounds):  # and with them the stream, which may read ahead
                for stats in rounds:
                    shares = self._look(stats, mine.work, runner.sharded_model.device)
                    yield stats
                    if shares != self.shares:
                        self.shares = shares
                        break

    def ran(self, step: int) -> int:
        """How many micro-batches this rank ran in a step under its present shares."""
        return 0 if self._work is None else self._work.num_micro_batches(step)

    def abort(self) -> None:
        """See `SyncRule`."""
        self.inner.abort()

    def _look(self, stats: StepStats, work: MicroBatchWork, device: torch.device) -> tuple[int, ...]:
        """The shares of the next step; collective where a window ends."""
        busy = sum(stats.phases[phase] for phase in _BUSY_PHASES)
        self._found.append(busy / max(1, work.num_micro_batches(stats.step)))
        self._steps.append(stats.seconds)
        if (stats.step + 1) % BALANCE_WINDOW_STEPS:
            return self.shares
        mine = torch.tensor([max(median(self._found), MIN_SECONDS)], dtype=torch.float64, device=device)
        taken = median(self._steps)
        self._found, self._steps = [], []
        if self._before is not None:
            told = {"before": self._before, "after": taken, "times": self._before / taken}
            self._note("gain", {"step": stats.step + 1, **told})
            self._before = None
        parts = self._net.all_gather(mine, self._group, equal=True).wait()
        seconds = [float(part) for part in parts]
        shares = plan_shares(seconds, sum(self.shares))
        gains = slowest_rank_seconds(shares, seconds) < (1 - MIN_GAIN) * slowest_rank_seconds(
            self.shares, seconds
        )
        if not gains:
            return self.shares
        self._before = taken
        self._note("shares", {"step": stats.step + 1, "shares": [*shares], "seconds": seconds})
        return shares


_BITS = 40
_UNIT_SECONDS = 1e-8


def num_window_rows(bound: int, window: int) -> int:
    """Windows that may be written before the slowest rank has read the first of them."""
    return (2 * bound + 1) // window + 2


class SharedMemorySpeeds:
    """In memory that ranks of a host have mapped. Each word is written by one rank, whole.

    Args:
        words: by window, in a ring, and rank: the window and its seconds; int64 [rows, P].
        rank: this one.
    """

    def __init__(self, words: Tensor, rank: int) -> None:
        self._words, self._rank = words, rank

    def tell(self, window: int, seconds: float) -> None:
        """See `SpeedExchange`."""
        units = min(round(seconds / _UNIT_SECONDS), (1 << _BITS) - 1)
        self._words[window % len(self._words), self._rank] = (window + 1) << _BITS | units

    def told(self, window: int) -> Sequence[float] | None:
        """See `SpeedExchange`."""
        words: list[int] = self._words[window % len(self._words)].tolist()
        if any(word >> _BITS != window + 1 for word in words):
            return None
        return [(word & (1 << _BITS) - 1) * _UNIT_SECONDS for word in words]


class MessageSpeeds:
    """With messages that ranks send each other anyway: each carries the last window of its sender.

    Args:
        rank, size: this one, of so many.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._known: dict[int, dict[int, float]] = {}  # seconds, by window and rank
        self._last: Mapping[str, Any] = {}

    def tell(self, window: int, seconds: float) -> None:
        """See `SpeedExchange`."""
        self._last = {"window": window, "seconds": seconds}
        self.hear(self._rank, self._last)

    def told(self, window: int) -> Sequence[float] | None:
        """See `SpeedExchange`; what is older is forgotten."""
        self._known = {key: found for key, found in self._known.items() if key >= window}
        found = self._known.get(window, {})
        return [found[rank] for rank in range(self._size)] if len(found) == self._size else None

    def say(self) -> Mapping[str, Any]:
        """Fields of this rank's next message."""
        return self._last

    def hear(self, rank: int, fields: Mapping[str, Any]) -> None:
        """Those of a message of another."""
        if "window" in fields:
            self._known.setdefault(int(fields["window"]), {})[rank] = float(fields["seconds"])


SPEED_WINDOW_STEPS = 4  # steps that one measurement is of, at least


class SampleCountingStream(Iterator[LoadedBatch]):
    """A stream, and how many samples were taken from it."""

    def __init__(self, stream: Iterator[LoadedBatch]) -> None:
        self._stream, self.samples = stream, 0

    def __next__(self) -> LoadedBatch:
        loaded = next(self._stream)
        self.samples += len(loaded.micro_batch.indices)
        return loaded


class EvenAssignment:
    """Every rank has the part of every batch that its work gives it."""

    def weighted(self, update_step: UpdateStep) -> UpdateStep:
        """How this rank makes its updates."""
        return update_step

    def is_ready(self, step: int) -> bool:
        """Whether it is known here who does what in a step."""
        return True

    def deal(self, work: MicroBatchWork, step: int) -> MicroBatchWork:
        """What this rank does from a step on, the next one or the same again."""
        return work

    def ran(self, seconds: float, samples: int, *, applied: bool) -> None:
        """This rank has run its part of that step, in so many seconds."""

    def sums(self) -> Mapping[str, float]:
        """Of this round, to be added up over ranks."""
        return {}

    def settle(self, step: int, sums: Mapping[str, float]) -> None:
        """A round has ended before a step: these are the sums of all ranks."""


class SpeedExchange(Protocol):
    """How ranks tell each other, without waiting, what a shard takes them."""

    def tell(self, window: int, seconds: float) -> None:
        """Of this rank."""

    def told(self, window: int) -> Sequence[float] | None:
        """By rank; None: not all are known here."""


class SpeedAssignment(EvenAssignment):
    """Shares that follow speed.

    Args:
        shares: to begin with, by rank.
        rank: this one.
        notices: of the same ranks.
        lag: steps after which all know a window: what a rank tells where it ends has come when a rank begins
            a step that many later.
        window: steps that are measured at a time.
        divides: an update is of the mean of its samples; or else of their sum, which needs no weight.
        note: is told of new shares, and of samples where a round ends.
    Wire: nothing of its own.
    """

    def __init__(
        self,
        shares: Sequence[int],
        rank: int,
        notices: SpeedExchange,
        *,
        lag: int,
        window: int = SPEED_WINDOW_STEPS,
        divides: bool = True,
        note: EventCallback,
    ) -> None:
        self.shares, self._rank, self._notices, self._note = tuple(shares), rank, notices, note
        self._lag, self._window, self._divides = lag, window, divides
        self._step, self._first = -2, 0
        self._found: list[float] = []
        self._whole: MicroBatchWork | None = None
        self._mine: LockstepWork | None = None
        self._rates: list[Any] = []
        self._due = self._taken = self._dropped = 0
        self._totals = {"taken": 0, "applied": 0, "dropped": 0}

    @property
    def weight(self) -> float:
        """Of this rank's update in the present step."""
        assert self._mine is not None, "nothing was dealt"
        if not self._divides:
            return 1.0
        own, whole = self._mine.num_own_samples(self._step), self._mine.num_samples(self._step)
        return own * len(self.shares) / whole

    def weighted(self, update_step: UpdateStep) -> UpdateStep:
        """See `EvenAssignment`: two parts more, around that in which the optimizer steps."""
        parts = insert_part_before(update_step.parts, "step", "weigh", self._weigh)
        return replace(update_step, parts=insert_part_before(parts, "gather", "unweigh", self._restore_rates))

    def is_ready(self, step: int) -> bool:
        """See `EvenAssignment`; false only until what is there has become visible."""
        window = self._window_of(step)
        return window is None or self._notices.told(window) is not None

    def deal(self, work: MicroBatchWork, step: int) -> MicroBatchWork:
        """See `EvenAssignment`.

        Raises:
            CommunicationError: a rank should have told, and has not.
        """
        if step not in (self._step, self._step + 1):  # another state was loaded: what is measured begins anew
            self._first, self._found = step // self._window, []
        self._step = step
        window = self._window_of(step)
        shares = self.shares if window is None else self._plan(window, step)
        if self._mine is None or work is not self._whole or shares != self.shares:
            self.shares, self._whole = shares, work
            self._mine = cast("LockstepWork", work).dealt(shares)
        return self._mine

    def ran(self, seconds: float, samples: int, *, applied: bool) -> None:
        """See `EvenAssignment`."""
        assert self._mine is not None, "nothing was dealt"
        self._due += self._mine.num_samples(self._step)
        self._taken += samples
        self._dropped += 0 if applied else samples
        self._found.append(seconds / max(1, self._mine.num_micro_batches(self._step)))
        if (self._step + 1) % self._window == 0:
            self._notices.tell(self._step // self._window, max(median(self._found), MIN_SECONDS))
            self._found = []

    def sums(self) -> Mapping[str, float]:
        """See `EvenAssignment`: samples; whole numbers, which float64 adds exactly."""
        return {"taken": self._taken, "dropped": self._dropped}

    def settle(self, step: int, sums: Mapping[str, float]) -> None:
        """See `EvenAssignment`.

        Raises:
            CommunicationError: ranks have not taken every sample once.
        """
        taken, dropped = int(sums["taken"]), int(sums["dropped"])
        if taken != self._due:
            raise internal_rule_error(f"before step {step} ranks have taken {taken} samples of {self._due}")
        self._due = self._taken = self._dropped = 0
        for name, count in (("taken", taken), ("applied", taken - dropped), ("dropped", dropped)):
            self._totals[name] += count
        self._note("samples", {"step": step, **self._totals})

    def _window_of(self, step: int) -> int | None:
        """The window from which shares are planned before a step; None: they stay."""
        ended, rest = divmod(step - self._lag, self._window)
        return ended - 1 if rest == 0 and ended - 1 >= self._first else None

    def _plan(self, window: int, step: int) -> tuple[int, ...]:
        seconds = self._notices.told(window)
        if seconds is None:
            raise internal_rule_error(
                f"not all ranks have told by step {step} how fast they were in window {window}"
            )
        shares = plan_shares(seconds, sum(self.shares))
        if slowest_rank_seconds(shares, seconds) >= (1 - MIN_GAIN) * slowest_rank_seconds(
            self.shares, seconds
        ):
            return self.shares
        self._note("shares", {"step": step, "shares": [*shares], "seconds": [*seconds]})
        return shares

    def _weigh(self, record: PendingUpdate) -> None:
        optimizer = record.state.optimizer
        self._rates = [group.get("lr") for group in optimizer.param_groups]
        if isinstance(optimizer, torch.optim.SGD) or None in self._rates:
            record.multiplier *= self.weight
            return
        for group in optimizer.param_groups:
            group["lr"] *= self.weight

    def _restore_rates(self, record: PendingUpdate) -> None:
        for group, rate in zip(record.state.optimizer.param_groups, self._rates, strict=True):
            if rate is not None:
                group["lr"] = rate


def balances_by_speed(context: SessionContext) -> bool:
    """Return whether shares follow the speed of several ranks."""
    return context.recipe.strategy.balance == "speed" and context.mesh.world.size > 1


def even_share_micro_batches(num_shards: int, group: RankGroup, step: int) -> int:
    """Return the number of micro-batches of a rank that has an even share of a full batch in every step."""
    return len(split_evenly(num_shards, group.size, group.rank))


def build_balanced_rule(inner: SyncRule, context: SessionContext) -> SpeedBalancedRule:
    """Let the shares of a rule that agrees in every step follow the speed of the ranks."""
    replicas = context.mesh.data
    shares = [len(split_evenly(context.shards, replicas.size, rank)) for rank in range(replicas.size)]
    return SpeedBalancedRule(
        inner, _assign_shares, shares, group=replicas, net=context.net, note=context.note
    )


def _assign_shares(work: MicroBatchWork, shares: Sequence[int]) -> MicroBatchWork:
    return cast("LockstepWork", work).dealt(shares)


def build_speed_assignment(
    context: SessionContext, exchange: SpeedExchange, *, lag: int, min_window: int = SPEED_WINDOW_STEPS
) -> SpeedAssignment:
    """Build an assignment for replicas that train alone; it begins with even shares.

    Args:
        lag: steps after which every rank knows the speeds of a window, see `SpeedAssignment`.
        min_window: the least number of steps that one measurement covers.
    """
    world, num_shards = context.mesh.world, context.shards
    return SpeedAssignment(
        [len(split_evenly(num_shards, world.size, rank)) for rank in range(world.size)],
        world.rank,
        exchange,
        lag=lag,
        window=max(SPEED_WINDOW_STEPS, min_window),
        divides=context.recipe.batch.reduction == "mean",
        note=context.note,
    )
