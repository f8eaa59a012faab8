"""What a step takes under a rule, from what was measured of one, of an exchange and of a message. Pure.

Sums under every-step go on beside backward; replicas that train alone wait for theirs; who gossips waits for
messages only.

`sync=auto:every-step,diloco:8`: a rule that was allowed, where the link is so slow that it pays.

A run begins with every-step. Its first steps are timed as they are, then an exchange by itself: all that a
gradient is, and a tally, summed while nobody computes, as replicas that train alone do it; and, where gossip
is allowed, which waits for no sum, a message of all parameters from each rank to the next. From that follows
what a step takes under every rule; the run goes on under the first of those allowed that is nearly as fast as
the best.

Invariant: all ranks decide from the same numbers, by a pure function, after the same step. No step is lost:
those that were timed are steps of the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from statistics import median
from typing import NamedTuple, cast

import torch
from torch import Tensor

from paceline.comm.net import Net, group_device
from paceline.comm.reduction.gradients import GradientReduction
from paceline.data.work import TrainingFeed
from paceline.job.mesh import RankGroup
from paceline.observe.sinks import EventCallback
from paceline.observe.step_stats import StepStats
from paceline.parallel.model_runner import ModelRunner
from paceline.state.slot import TensorSlot
from paceline.sync.straggler_detection import ring_receive_seconds
from paceline.sync.sync_rule import SyncRule
from paceline.sync.update import UpdateStep

MIN_SPEEDUP = 1.1
"""A rule is chosen where it makes a step this many times as fast as those that were named before it."""
_HIDDEN_SHARE = 0.05  # of an exchange: where a step is longer than its compute by less, all of it was hidden


class StepTimings(NamedTuple):
    """What was measured, equal on every rank; each on the slowest.

    Args:
        step_seconds: of every-step.
        compute_seconds: of a step, without what it waits for.
        backward_seconds: of these, those in which sums can go on.
        exchange_seconds: of all gradients, while nobody computes.
        exchange_bytes: that a rank sends in it.
        message_seconds: of all parameters from each rank to the next; 0: nobody would send them.
        latency_seconds: of these, what one byte takes as well.
        round_steps: steps of a round that ends where the feed wants a pause.
    """

    step_seconds: float
    compute_seconds: float
    backward_seconds: float
    exchange_seconds: float
    exchange_bytes: float
    message_seconds: float = 0.0
    latency_seconds: float = 0.0
    round_steps: float = 1.0

    def seconds(self, rule: str) -> float:
        """A step under a rule, over a whole round of it."""
        word, _, number = rule.partition(":")
        return _STEP_SECONDS_BY_RULE.get(word, _local_step_seconds)(self, float(number or 0))

    @property
    def hidden_seconds(self) -> float:
        """Of an exchange, what every-step hides behind backward; where all of it is hidden, what it could."""
        waited = max(0.0, self.step_seconds - self.compute_seconds)
        if waited <= _HIDDEN_SHARE * self.exchange_seconds:
            return max(self.exchange_seconds, self.backward_seconds)
        return max(0.0, self.exchange_seconds - waited)

    def break_even(self, rule: str) -> float:
        """Seconds of an exchange above which a rule is chosen over every-step; infinite: it never is."""
        coarse = self._first_profitable_factor(rule, 1e-5, 1.1, 242)
        if coarse == math.inf:
            return coarse
        return self._first_profitable_factor(rule, coarse / 1.1, 1.005, 21) * self.exchange_seconds

    def _first_profitable_factor(self, rule: str, begin: float, ratio: float, count: int) -> float:
        """The first of some factors, of links that are slower by them, at which a rule pays; or infinite."""
        factors = (begin * ratio**number for number in range(count))
        slower = ((factor, self._over_slower_link(factor)) for factor in factors)
        return next((f for f, at in slower if at.step_seconds >= MIN_SPEEDUP * at.seconds(rule)), math.inf)

    def _over_slower_link(self, factor: float) -> StepTimings:
        """What would be found where all that travels takes so many times as long."""
        exchange = factor * self.exchange_seconds
        return self._replace(
            step_seconds=self.compute_seconds + max(0.0, exchange - self.hidden_seconds),
            exchange_seconds=exchange,
            message_seconds=factor * self.message_seconds,
            latency_seconds=factor * self.latency_seconds,
        )

    def bits_per_second(self, exchange_seconds: float) -> float:
        """What a link carries over which an exchange takes so long."""
        return 8 * self.exchange_bytes / exchange_seconds


def _local_step_seconds(found: StepTimings, steps: float) -> float:
    """Replicas that train alone for so many steps."""
    return found.compute_seconds + found.exchange_seconds / steps


def _gossip_step_seconds(found: StepTimings, bound: float) -> float:
    """Gossip: a message may be on its way while `bound` more steps begin; and all meet where a round ends.

    Messages follow each other on the link, where only their bytes are in each other's way. Where a round ends
    all say so, wait until it was heard, sum as replicas do, and compare how late halves were.
    """
    compute, message = found.compute_seconds, found.message_seconds
    clock = max(compute, message - found.latency_seconds, (compute + message) / (bound + 1))
    meeting = found.exchange_seconds + message + 2 * found.latency_seconds
    return clock + meeting / found.round_steps


GOSSIP = "gossip"
_STEP_SECONDS_BY_RULE: Mapping[str, Callable[[StepTimings, float], float]] = {
    "every-step": lambda found, _: found.step_seconds,
    GOSSIP: _gossip_step_seconds,
}
"""By word; of every other rule, whose replicas sum where they meet, `_local_step_seconds`."""

WARMUP_STEPS, TIMED_STEPS = 2, 6  # steps: the first ones allocate and connect
_NUM_EXCHANGES = 2


class SyncChoice(NamedTuple):
    """A rule, and why."""

    rule: str
    reason: str

    def __str__(self) -> str:
        return f"sync: {self.rule}, as {self.reason}; sync=RULE in the strategy chooses another"


def choose_sync(allowed: Sequence[str], found: StepTimings) -> SyncChoice:
    """The first rule that is nearly as fast as the fastest; pure."""
    best = min(found.seconds(rule) for rule in allowed)
    chosen = next(rule for rule in allowed if found.seconds(rule) <= MIN_SPEEDUP * best)
    times = ", ".join(f"{rule} {_format_milliseconds(found.seconds(rule))}" for rule in allowed)
    pays = ", ".join(_format_break_even(found, rule) for rule in allowed[1:])
    message = f", a message {_format_milliseconds(found.message_seconds)}" if found.message_seconds else ""
    return SyncChoice(
        chosen,
        f"a step takes {times} (compute {_format_milliseconds(found.compute_seconds)}, an exchange"
        f" {_format_milliseconds(found.exchange_seconds)}{message}); a rule pays below about {pays}",
    )


class SyncChooser:
    """Every-step, until it is known which rule pays.

    Args:
        inner: takes the steps; a round is one.
        allowed: the rules, every-step first.
        reducer: of the inner rule.
        tensors: what it sums, by slot.
        group: the ranks that sum.
        note: is told what was chosen, which ends the phase.
        warn: is told the same, in words.
    Wire: once, after some steps: two sums of all gradients and of a tally, and 64 bytes a rank; where gossip
        is allowed two messages of all parameters to the next rank as well.
    """

    def __init__(
        self,
        inner: SyncRule,
        allowed: Sequence[str],
        reducer: GradientReduction,
        tensors: Mapping[TensorSlot, Tensor],
        *,
        group: RankGroup,
        net: Net,
        note: EventCallback,
        warn: Callable[[str], None],
    ) -> None:
        self.inner, self._allowed = inner, tuple(allowed)
        self._reducer, self._tensors = reducer, tensors
        self._group, self._net, self._note, self._warn = group, net, note, warn
        self._taken: list[tuple[float, float, float]] = []
        self._decided = False

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        """See `SyncRule`: a round is one of the inner rule."""
        rounds = cast("Generator[StepStats, None, None]", self.inner.rounds(feed, runner, update_step))
        with closing(rounds):
            for stats in rounds:
                if not self._decided:
                    self._look(stats, feed.next_pause(0), runner.sharded_model.device)
                yield stats

    def abort(self) -> None:
        """See `SyncRule`."""
        self.inner.abort()

    def _look(self, stats: StepStats, round_steps: int, device: torch.device) -> None:
        """Take the times of a step; collective once there are enough."""
        phases = stats.phases
        self._taken.append((stats.seconds, stats.seconds - phases["communication"], phases["backward"]))
        if len(self._taken) < WARMUP_STEPS + TIMED_STEPS:
            return
        mine = [median(column) for column in zip(*self._taken[WARMUP_STEPS:], strict=True)]
        before = self._net.ledger.sent_bytes
        mine.append(min(self._exchange() for _ in range(_NUM_EXCHANGES)))
        mine.append((self._net.ledger.sent_bytes - before) / _NUM_EXCHANGES)
        mine += [*self._messages(device), float(round_steps)]
        numbers = torch.tensor(mine, dtype=torch.float64, device=device)
        found = StepTimings(*self._net.all_reduce(numbers, self._group, "max").wait().tolist())
        choice, self._decided = choose_sync(self._allowed, found), True
        self._warn(str(choice))
        self._note("sync", {"step": stats.step + 1, **render_choice(self._allowed, choice, found)})

    def _messages(self, device: torch.device) -> tuple[float, float]:
        """Seconds of a message of all parameters, and of a byte, to the next rank; where one may be sent."""
        if all(rule.partition(":")[0] != GOSSIP for rule in self._allowed):
            return 0.0, 0.0
        sizes = sum(x.nbytes for x in self._tensors.values()), 1
        whole, one = (
            min(ring_receive_seconds(self._net, self._group, size, device) for _ in range(_NUM_EXCHANGES))
            for size in sizes
        )
        return whole, min(one, whole)

    def _exchange(self) -> float:
        """Seconds until all is summed, and a tally with it, from when all are ready; nothing is used."""
        counts = torch.zeros(4 + len(self._tensors), dtype=torch.float64, device=group_device(self._group))
        self._net.barrier(self._group)
        began = time.perf_counter()
        self._reducer.begin()
        for slot in reversed([*self._tensors]):
            self._reducer.ready(slot, self._tensors[slot].detach())
        self._reducer.close()
        tally = self._net.all_reduce(counts, self._group)
        self._reducer.finish()
        tally.wait()
        seconds = time.perf_counter() - began
        self._reducer.abort()
        return seconds


def render_choice(allowed: Sequence[str], choice: SyncChoice, found: StepTimings) -> dict[str, object]:
    """What the run folder keeps of a choice."""
    limits = {rule: found.break_even(rule) for rule in allowed[1:]}
    return {
        "sync": choice.rule,
        "reason": choice.reason,
        "compute_seconds": found.compute_seconds,
        "exchange_seconds": found.exchange_seconds,
        "message_seconds": found.message_seconds,
        "bits_per_second": found.bits_per_second(found.exchange_seconds),
        "step_seconds": {rule: found.seconds(rule) for rule in allowed},
        "break_even": {rule: found.bits_per_second(limit) for rule, limit in limits.items()},
    }


def _format_milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _format_break_even(found: StepTimings, rule: str) -> str:
    limit = found.bits_per_second(found.break_even(rule))
    return f"{limit / 1e6:.3g} Mbit/s ({rule})" if limit else f"no rate ({rule})"
