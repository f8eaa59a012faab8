"""Work assignment: which shards of a batch each rank runs, equally many or as many as its speed allows.

`SpeedBalancedRule` serves rules that agree in every step: every few steps the ranks exchange how long a shard
takes them, and the shards are assigned so that the slowest rank ends as early as possible. A shard has the
same samples and random keys on every rank, and sums are divided once by the items of the whole batch, so the
gradient is that of the whole batch.

`SpeedAssignment` serves replicas that train alone, and no rank waits for another. Once per window a rank
publishes how long a shard takes it, through what its rule has anyway: shared memory, or its next message to a
peer. The rule bounds how far ranks are apart, so `lag` steps after a window all ranks know all times; each of
them plans by itself, from the same numbers and for the same step. A rank with n of the N samples of a batch
makes an update of weight n P / N, where each of P ranks makes one. So the weighted gradients of a batch add
up to P times that of the whole batch, as with equal parts. SGD, also with momentum, is linear in the
gradient, so its gradients are multiplied. Other optimizers divide the gradient by its own size and would not
notice, so their rate is multiplied for that step.

Invariant: all ranks change their shares before the same step. At the end of a round every sample of its
batches was run once, by one rank, and was applied or dropped.
Not done here: samples with different numbers of items have equal weights; only their sum is right.
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
from paceline.errors import format_count
from paceline.job.mesh import RankGroup
from paceline.observe.sinks import EventCallback
from paceline.observe.step_stats import StepStats
from paceline.parallel.model_runner import ModelRunner
from paceline.parallel.session_context import SessionContext
from paceline.sync.sync_rule import SyncRule, internal_rule_error
from paceline.sync.update import PendingUpdate, UpdateStep, insert_part_before

BALANCE_WINDOW_STEPS = 8
MIN_GAIN = 0.05  # share of a step that new shares have to save, so that noise does not move shards
MIN_SECONDS = 1e-6  # keeps a shard without measurable time from attracting all others
_BUSY_PHASES = ("data", "forward", "backward")


def plan_shares(seconds: Sequence[float], shards: int) -> tuple[int, ...]:
    """Return how many shards each rank runs, so that the last rank ends first; at least one each; pure.

    Args:
        seconds: time of one shard, by rank.
        shards: shards of a batch, at least as many as there are ranks.
    """
    shares = [1] * len(seconds)
    for _ in range(shards - len(seconds)):
        # Greedy is optimal here: the next shard goes to the rank that would end it first.
        ends = [(share + 1) * shard_seconds for share, shard_seconds in zip(shares, seconds, strict=True)]
        shares[ends.index(min(ends))] += 1
    return tuple(shares)


def slowest_rank_seconds(shares: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the seconds until the last rank has run its shards."""
    return max(share * shard_seconds for share, shard_seconds in zip(shares, seconds, strict=True))


class SpeedBalancedRule:
    """A rule that agrees in every step, with shares that follow the speed of the ranks.

    Args:
        inner: takes the steps.
        assign_shares: returns the same work with the given number of shards for each rank.
        shares: shards of each rank of `group` at the start.
        group: the ranks that share the shards of a step.
        net: this rank's collectives.
        note: receives the event "shares", and a window later "gain".
    Wire: every `BALANCE_WINDOW_STEPS` steps one all_gather of 8 bytes per rank.
    """

    def __init__(
        self,
        inner: SyncRule,
        assign_shares: Callable[[MicroBatchWork, Sequence[int]], MicroBatchWork],
        shares: Sequence[int],
        *,
        group: RankGroup,
        net: Net,
        note: EventCallback,
    ) -> None:
        self.inner, self.shares = inner, tuple(shares)
        self._assign_shares, self._group, self._net, self._note = assign_shares, group, net, note
        self._measured: list[float] = []
        self._step_seconds: list[float] = []
        self._seconds_before: float | None = None  # of a step under the last shares, until the gain is known
        self._work: MicroBatchWork | None = None

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        state = update_step.state
        while state.step < feed.num_steps:
            own_feed = replace(feed, work=self._assign_shares(feed.work, self.shares))
            self._work = own_feed.work
            rounds = cast(
                "Generator[StepStats, None, None]", self.inner.rounds(own_feed, runner, update_step)
            )
            with closing(rounds):  # also closes the stream, which can read ahead
                for stats in rounds:
                    shares = self._observe(stats, own_feed.work, runner.sharded_model.device)
                    yield stats
                    # The open stream loads the micro-batches of the old shares, so the rounds start again
                    # with another feed.
                    if shares != self.shares:
                        self.shares = shares
                        break

    def num_micro_batches_run(self, step: int) -> int:
        """Return how many micro-batches this rank ran in a step under its present shares."""
        return 0 if self._work is None else self._work.num_micro_batches(step)

    def abort(self) -> None:
        self.inner.abort()

    def _observe(self, stats: StepStats, work: MicroBatchWork, device: torch.device) -> tuple[int, ...]:
        """Record the times of a step and return the shares of the next; collective at the end of a window."""
        busy = sum(stats.phases[phase] for phase in _BUSY_PHASES)
        self._measured.append(busy / max(1, work.num_micro_batches(stats.step)))
        self._step_seconds.append(stats.seconds)
        if (stats.step + 1) % BALANCE_WINDOW_STEPS:
            return self.shares
        own_seconds = torch.tensor(
            [max(median(self._measured), MIN_SECONDS)], dtype=torch.float64, device=device
        )
        step_seconds = median(self._step_seconds)
        self._measured, self._step_seconds = [], []
        # The gain is reported one window late, when it was measured.
        if self._seconds_before is not None:
            gain = {
                "before": self._seconds_before,
                "after": step_seconds,
                "times": self._seconds_before / step_seconds,
            }
            self._note("gain", {"step": stats.step + 1, **gain})
            self._seconds_before = None
        gathered = self._net.all_gather(own_seconds, self._group, equal=True).wait()
        seconds = [float(value) for value in gathered]
        shares = plan_shares(seconds, sum(self.shares))
        pays = slowest_rank_seconds(shares, seconds) < (1 - MIN_GAIN) * slowest_rank_seconds(
            self.shares, seconds
        )
        if not pays:
            return self.shares
        self._seconds_before = step_seconds
        self._note("shares", {"step": stats.step + 1, "shares": [*shares], "seconds": seconds})
        return shares


_BITS = 40  # of a word: the seconds; the other bits hold the window
_UNIT_SECONDS = 1e-8  # 40 bits hold three hours


def num_window_rows(bound: int, window: int) -> int:
    """Return how many windows can be written before the slowest rank has read the first of them.

    Args:
        bound: steps that ranks can be apart.
        window: steps of a window.
    """
    return (2 * bound + 1) // window + 2


class SharedMemorySpeeds:
    """A speed exchange through memory that the ranks of a host share. Each word is written by one rank,
    whole.

    Args:
        words: in row w % rows and column r the last window w of rank r and its seconds; int64 [rows, ranks].
        rank: this rank.
    """

    def __init__(self, words: Tensor, rank: int) -> None:
        self._words, self._rank = words, rank

    def publish_seconds(self, window: int, seconds: float) -> None:
        units = min(round(seconds / _UNIT_SECONDS), (1 << _BITS) - 1)
        # Window and seconds share one aligned word, so a reader never sees one without the other.
        self._words[window % len(self._words), self._rank] = (window + 1) << _BITS | units

    def seconds_by_rank(self, window: int) -> Sequence[float] | None:
        words: list[int] = self._words[window % len(self._words)].tolist()
        # Rows are reused and start as zeros: another number is an older window, and 0 is none.
        if any(word >> _BITS != window + 1 for word in words):
            return None
        return [(word & (1 << _BITS) - 1) * _UNIT_SECONDS for word in words]


class MessageSpeeds:
    """A speed exchange through messages that ranks send anyway: each carries the last window of its sender.

    Args:
        rank, size: this rank, and the number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._seconds: dict[int, dict[int, float]] = {}  # seconds, by window and rank
        self._last_fields: Mapping[str, Any] = {}

    def publish_seconds(self, window: int, seconds: float) -> None:
        self._last_fields = {"window": window, "seconds": seconds}
        self.receive_fields(self._rank, self._last_fields)

    def seconds_by_rank(self, window: int) -> Sequence[float] | None:
        """Return the seconds of a window by rank, or None, and forget older windows."""
        self._seconds = {key: values for key, values in self._seconds.items() if key >= window}
        seconds = self._seconds.get(window, {})
        return [seconds[rank] for rank in range(self._size)] if len(seconds) == self._size else None

    def message_fields(self) -> Mapping[str, Any]:
        """Return the fields to add to this rank's next message."""
        return self._last_fields

    def receive_fields(self, rank: int, fields: Mapping[str, Any]) -> None:
        """Record the fields of a message of another rank."""
        if "window" in fields:
            self._seconds.setdefault(int(fields["window"]), {})[rank] = float(fields["seconds"])


SPEED_WINDOW_STEPS = 4  # least number of steps of a measurement


class SampleCountingStream(Iterator[LoadedBatch]):
    """A stream of micro-batches that counts their samples."""

    def __init__(self, stream: Iterator[LoadedBatch]) -> None:
        self._stream, self.samples = stream, 0

    def __next__(self) -> LoadedBatch:
        loaded = next(self._stream)
        self.samples += len(loaded.micro_batch.indices)
        return loaded


class EvenAssignment:
    """The assignment in which every rank runs the part of each batch that its work gives it.

    Other assignments derive from it: a rule calls `assign` and `record_run` in each step, `round_sums` and
    `end_round` at the end of a round.
    """

    def weighted(self, update_step: UpdateStep) -> UpdateStep:
        """Return the update step with which this rank updates."""
        return update_step

    def is_ready(self, step: int) -> bool:
        """Return whether this rank knows the assignment of a step."""
        return True

    def assign(self, work: MicroBatchWork, step: int) -> MicroBatchWork:
        """Return this rank's work from a step on, which is the next step or the present one."""
        return work

    def record_run(self, seconds: float, samples: int, *, applied: bool) -> None:
        """Record that this rank ran its part of the present step."""

    def round_sums(self) -> Mapping[str, float]:
        """Return numbers of this round that the rule sums over the ranks."""
        return {}

    def end_round(self, step: int, sums: Mapping[str, float]) -> None:
        """Receive the sums of all ranks at the end of a round; `step` is the next step."""


class SpeedExchange(Protocol):
    """A way to exchange the time of a shard without waiting for other ranks."""

    def publish_seconds(self, window: int, seconds: float) -> None:
        """Publish the seconds of a shard on this rank in a window."""

    def seconds_by_rank(self, window: int) -> Sequence[float] | None:
        """Return the seconds of a window by rank; None: this rank does not know all of them yet."""


class SpeedAssignment(EvenAssignment):
    """An assignment that follows the speed of the ranks.

    Args:
        shares: shards of each rank at the start.
        rank: this rank.
        exchange: of the same ranks.
        lag: steps after which all ranks know a window: what a rank publishes at the end of the window has
            arrived when another rank starts a step that is `lag` steps later.
        window: steps of a measurement.
        divides: an update uses the mean of its samples; otherwise their sum, which needs no weight.
        note: receives the event "shares", and "samples" at the end of a round.
    Wire: nothing of its own.
    """

    def __init__(
        self,
        shares: Sequence[int],
        rank: int,
        exchange: SpeedExchange,
        *,
        lag: int,
        window: int = SPEED_WINDOW_STEPS,
        divides: bool = True,
        note: EventCallback,
    ) -> None:
        self.shares, self._rank, self._exchange, self._note = tuple(shares), rank, exchange, note
        self._lag, self._window, self._divides = lag, window, divides
        self._step, self._first = -2, 0
        self._measured: list[float] = []
        self._full_work: MicroBatchWork | None = None
        self._own_work: LockstepWork | None = None
        self._rates: list[Any] = []
        self._num_due = self._num_taken = self._num_dropped = 0
        self._totals = {"taken": 0, "applied": 0, "dropped": 0}

    @property
    def weight(self) -> float:
        """Return the weight of this rank's update in the present step."""
        assert self._own_work is not None, "nothing was dealt"
        if not self._divides:
            return 1.0
        own_samples, all_samples = (
            self._own_work.num_own_samples(self._step),
            self._own_work.num_samples(self._step),
        )
        return own_samples * len(self.shares) / all_samples

    def weighted(self, update_step: UpdateStep) -> UpdateStep:
        """Add two parts around the one in which the optimizer steps: one weighs, one restores the rates."""
        parts = insert_part_before(update_step.parts, "step", "weigh", self._weigh)
        return replace(update_step, parts=insert_part_before(parts, "gather", "unweigh", self._restore_rates))

    def is_ready(self, step: int) -> bool:
        """Return whether all times are visible here; false only for the moment until memory or messages
        arrive.
        """
        window = self._window_of(step)
        return window is None or self._exchange.seconds_by_rank(window) is not None

    def assign(self, work: MicroBatchWork, step: int) -> MicroBatchWork:
        """Return this rank's work from a step on.

        Raises:
            CommunicationError: the time of a rank is missing.
        """
        if step not in (self._step, self._step + 1):  # another state was loaded: measure from here
            self._first, self._measured = step // self._window, []
        self._step = step
        window = self._window_of(step)
        shares = self.shares if window is None else self._plan_shares(window, step)
        if self._own_work is None or work is not self._full_work or shares != self.shares:
            self.shares, self._full_work = shares, work
            self._own_work = cast("LockstepWork", work).dealt(shares)
        return self._own_work

    def record_run(self, seconds: float, samples: int, *, applied: bool) -> None:
        assert self._own_work is not None, "nothing was dealt"
        self._num_due += self._own_work.num_samples(self._step)
        self._num_taken += samples
        self._num_dropped += 0 if applied else samples
        self._measured.append(seconds / max(1, self._own_work.num_micro_batches(self._step)))
        # Only the median counts, so one slow step, for example the first, moves no shard.
        if (self._step + 1) % self._window == 0:
            self._exchange.publish_seconds(
                self._step // self._window, max(median(self._measured), MIN_SECONDS)
            )
            self._measured = []

    def round_sums(self) -> Mapping[str, float]:
        """Return samples run and dropped: whole numbers, which float64 adds exactly."""
        return {"taken": self._num_taken, "dropped": self._num_dropped}

    def end_round(self, step: int, sums: Mapping[str, float]) -> None:
        """Record the samples of the round.

        Raises:
            CommunicationError: the ranks have not run every sample once.
        """
        taken, dropped = int(sums["taken"]), int(sums["dropped"])
        if taken != self._num_due:
            raise internal_rule_error(
                f"before step {step} the ranks ran {format_count(taken, 'sample')}, not {self._num_due}"
            )
        self._num_due = self._num_taken = self._num_dropped = 0
        for name, count in (("taken", taken), ("applied", taken - dropped), ("dropped", dropped)):
            self._totals[name] += count
        self._note("samples", {"step": step, **self._totals})

    def _window_of(self, step: int) -> int | None:
        """Return the window by which the shares of a step are planned; None: they stay."""
        num_ended, remainder = divmod(step - self._lag, self._window)
        return num_ended - 1 if remainder == 0 and num_ended - 1 >= self._first else None

    def _plan_shares(self, window: int, step: int) -> tuple[int, ...]:
        seconds = self._exchange.seconds_by_rank(window)
        if seconds is None:
            raise internal_rule_error(f"at step {step} the times of window {window} are not complete")
        shares = plan_shares(seconds, sum(self.shares))
        if slowest_rank_seconds(shares, seconds) >= (1 - MIN_GAIN) * slowest_rank_seconds(
            self.shares, seconds
        ):
            return self.shares
        self._note("shares", {"step": step, "shares": [*shares], "seconds": [*seconds]})
        return shares

    def _weigh(self, record: PendingUpdate) -> None:
        """Weigh the update: the gradient for SGD, the rate for other optimizers."""
        optimizer = record.state.optimizer
        self._rates = [group.get("lr") for group in optimizer.param_groups]
        # SGD is linear in the gradient; a rate that is missing cannot be multiplied.
        if isinstance(optimizer, torch.optim.SGD) or None in self._rates:
            record.multiplier *= self.weight
            return
        # Adam divides the gradient by its own size, so a factor of the gradient would have no effect.
        for group in optimizer.param_groups:
            group["lr"] *= self.weight

    def _restore_rates(self, record: PendingUpdate) -> None:
        for group, rate in zip(record.state.optimizer.param_groups, self._rates, strict=True):
            if rate is not None:
                group["lr"] = rate


def balances_by_speed(context: SessionContext) -> bool:
    """Return whether shares follow the speed of several ranks."""
    return context.recipe.strategy.balances_by_speed and context.mesh.world.size > 1


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
