"""The choice of a sync rule by measurement: `sync=auto:every-step,diloco:8` picks the rule that the link
makes fastest.

A run begins with every-step. Its first steps are timed, then an exchange by itself: the sum of all gradients
and a tally while no rank computes, as replicas that train alone do it; and, where gossip is allowed, which
waits for no sum, a message with all parameters from each rank to the next. From these times a pure function
predicts the
time of a step under each rule: every-step hides sums behind backward, replicas that train alone wait for
theirs, and gossip waits for messages only. The run continues with the first allowed rule that is nearly as
fast as the fastest one.

Invariant: all ranks decide by the same numbers, after the same step. No step is lost: the timed steps are
steps of the run.
Not done here: switching the rule, which the session does after the event "sync".
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm.net import Net, group_device
from paceline.comm.reduction.gradients import GradientReduction
from paceline.data.work import TrainingFeed
from paceline.job.mesh import RankGroup
from paceline.observe.sinks import EventCallback
from paceline.observe.step_stats import StepStats
from paceline.parallel.model_runner import ModelRunner
from paceline.recipe.registry import SyncSpec, parse_word
from paceline.state.slot import TensorSlot
from paceline.sync.straggler_detection import ring_receive_seconds
from paceline.sync.sync_rule import SyncRule, observe_rounds
from paceline.sync.update import UpdateStep

MIN_SPEEDUP = 1.1
"""A rule is chosen if it makes a step this many times as fast as the rules that are listed before it."""
_HIDDEN_SHARE = 0.05  # a step that waits for less than this share of an exchange has hidden all of it


class StepTimings(NamedTuple):
    """Measured times, each of the slowest rank, so that they are equal on every rank.

    Args:
        step_seconds: a step of every-step.
        compute_seconds: a step without waiting.
        backward_seconds: the part of it in which sums can run.
        exchange_seconds: the sum of all gradients while no rank computes.
        exchange_bytes: bytes that a rank sends in it.
        message_seconds: a message with all parameters from each rank to the next; 0: no rule sends one.
        latency_seconds: a message of one byte.
        round_steps: steps of a round that ends where the feed pauses.
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
        """Return the predicted seconds of a step under a rule, averaged over a whole round."""
        spec, argument = parse_word(SyncSpec, rule)
        if spec.sends:
            return _gossip_step_seconds(self, float(argument))
        return self.step_seconds if spec.agrees == "world" else _local_step_seconds(self, float(argument))

    @property
    def hidden_seconds(self) -> float:
        """Return the part of an exchange that every-step hides behind backward, or could hide if it hid all
        of it.
        """
        waited = max(0.0, self.step_seconds - self.compute_seconds)
        if waited <= _HIDDEN_SHARE * self.exchange_seconds:
            return max(self.exchange_seconds, self.backward_seconds)
        return max(0.0, self.exchange_seconds - waited)

    def break_even(self, rule: str) -> float:
        """Return the seconds of an exchange above which a rule beats every-step; infinite: it never does."""
        # The predicted times have kinks, so the limit is searched: in steps of 10 % from 1e-5 to 1e5, then of
        # 0.5 %.
        coarse = self._first_profitable_factor(rule, 1e-5, 1.1, 242)
        if coarse == math.inf:
            return coarse
        return self._first_profitable_factor(rule, coarse / 1.1, 1.005, 21) * self.exchange_seconds

    def _first_profitable_factor(self, rule: str, begin: float, ratio: float, count: int) -> float:
        """Return the first slowdown of the link at which a rule beats every-step, or infinity.

        It tries `count` slowdowns: `begin`, `begin * ratio`, `begin * ratio**2` and so on.
        """
        factors = (begin * ratio**number for number in range(count))
        slower = ((factor, self._over_slower_link(factor)) for factor in factors)
        return next((f for f, at in slower if at.step_seconds >= MIN_SPEEDUP * at.seconds(rule)), math.inf)

    def _over_slower_link(self, factor: float) -> StepTimings:
        """Return the predicted times if everything sent took `factor` times as long."""
        exchange = factor * self.exchange_seconds
        return self._replace(
            step_seconds=self.compute_seconds + max(0.0, exchange - self.hidden_seconds),
            exchange_seconds=exchange,
            message_seconds=factor * self.message_seconds,
            latency_seconds=factor * self.latency_seconds,
        )

    def bits_per_second(self, exchange_seconds: float) -> float:
        """Return the rate of a link over which an exchange takes so long."""
        return 8 * self.exchange_bytes / exchange_seconds


def _local_step_seconds(timings: StepTimings, steps: float) -> float:
    """Return the seconds of a step of replicas that train alone for `steps` steps."""
    return timings.compute_seconds + timings.exchange_seconds / steps


def _gossip_step_seconds(timings: StepTimings, bound: float) -> float:
    """Return the seconds of a step of gossip, where a message can be in flight while `bound` more steps
    begin.

    Messages follow each other on the link, where only their bytes get in each other's way. At the end of a
    round all ranks agree on its end, wait for the messages, sum as replicas do, and compare how late halves
    were.
    """
    compute, message = timings.compute_seconds, timings.message_seconds
    clock = max(compute, message - timings.latency_seconds, (compute + message) / (bound + 1))
    meeting = timings.exchange_seconds + message + 2 * timings.latency_seconds
    return clock + meeting / timings.round_steps


WARMUP_STEPS, TIMED_STEPS = 2, 6  # the first steps allocate memory and open connections
_NUM_EXCHANGES = 2


class SyncChoice(NamedTuple):
    """A rule, and the reason for it."""

    rule: str
    reason: str

    def __str__(self) -> str:
        return f"sync: {self.rule} ({self.reason}). Set sync=RULE in the strategy to choose another rule."


def choose_sync(allowed: Sequence[str], timings: StepTimings) -> SyncChoice:
    """Return the first rule that is nearly as fast as the fastest; pure.

    Args:
        allowed: the rules, every-step first.
        timings: measured times.
    """
    best = min(timings.seconds(rule) for rule in allowed)
    chosen = next(rule for rule in allowed if timings.seconds(rule) <= MIN_SPEEDUP * best)
    times = ", ".join(f"{rule} {_format_milliseconds(timings.seconds(rule))}" for rule in allowed)
    pays = ", ".join(_format_break_even(timings, rule) for rule in allowed[1:])
    message = f", message {_format_milliseconds(timings.message_seconds)}" if timings.message_seconds else ""
    return SyncChoice(
        chosen,
        f"predicted step: {times}; compute {_format_milliseconds(timings.compute_seconds)}, exchange"
        f" {_format_milliseconds(timings.exchange_seconds)}{message}; pays below about {pays}",
    )


class SyncChooser:
    """Every-step, until the times of its first steps show which rule pays.

    Args:
        inner: takes the steps; its rounds have one step.
        allowed: the rules, every-step first.
        reducer: of the inner rule.
        tensors: what it sums, by slot.
        group: the ranks that sum.
        net: this rank's collectives.
        note: receives the event "sync" with the choice, which ends the phase.
        warn: receives the choice as a sentence.
    Wire: once, after some steps: two sums of all gradients and of a tally, and 64 bytes per rank; where
        gossip is allowed also two messages of all parameters to the next rank.
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
        self._step_times: list[tuple[float, float, float]] = []
        self._decided = False

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        device, round_steps = runner.sharded_model.device, feed.next_pause(0)
        return observe_rounds(
            self.inner, lambda stats: self._observe(stats, round_steps, device), feed, runner, update_step
        )

    def abort(self) -> None:
        self.inner.abort()

    def _observe(self, stats: StepStats, round_steps: int, device: torch.device) -> None:
        """Record the times of a step; collective once there are enough of them."""
        if self._decided:
            return
        phases = stats.phases
        self._step_times.append((stats.seconds, stats.seconds - phases["communication"], phases["backward"]))
        if len(self._step_times) < WARMUP_STEPS + TIMED_STEPS:
            return
        medians = [median(column) for column in zip(*self._step_times[WARMUP_STEPS:], strict=True)]
        sent_before = self._net.ledger.sent_bytes
        # The shortest, because noise only makes an exchange longer.
        medians.append(min(self._exchange() for _ in range(_NUM_EXCHANGES)))
        medians.append((self._net.ledger.sent_bytes - sent_before) / _NUM_EXCHANGES)
        medians += [*self._messages(device), float(round_steps)]
        numbers = torch.tensor(medians, dtype=torch.float64, device=device)
        # The maximum, because every rank waits for the slowest one, and all must choose by equal numbers.
        timings = StepTimings(*self._net.all_reduce(numbers, self._group, "max").wait().tolist())
        choice, self._decided = choose_sync(self._allowed, timings), True
        self._warn(str(choice))
        self._note("sync", {"step": stats.step + 1, **render_choice(self._allowed, choice, timings)})

    def _messages(self, device: torch.device) -> tuple[float, float]:
        """Return the seconds of a message of all parameters and of one byte to the next rank; 0 without
        gossip.
        """
        if not any(parse_word(SyncSpec, rule).spec.sends for rule in self._allowed):
            return 0.0, 0.0
        sizes = sum(x.nbytes for x in self._tensors.values()), 1
        parameter_seconds, byte_seconds = (
            min(ring_receive_seconds(self._net, self._group, size, device) for _ in range(_NUM_EXCHANGES))
            for size in sizes
        )
        return parameter_seconds, min(byte_seconds, parameter_seconds)

    def _exchange(self) -> float:
        """Return the seconds of a sum of all gradients and a tally; the result is dropped."""
        counts = torch.zeros(4 + len(self._tensors), dtype=torch.float64, device=group_device(self._group))
        # Without a barrier the first rank would also measure how long the last one still computes.
        self._net.barrier(self._group)
        began = time.perf_counter()
        self._reducer.begin()
        # In the order of backward, in which buckets are laid out.
        for slot in reversed([*self._tensors]):
            self._reducer.ready(slot, self._tensors[slot].detach())
        self._reducer.close()
        tally = self._net.all_reduce(counts, self._group)
        self._reducer.finish()
        tally.wait()
        seconds = time.perf_counter() - began
        # No step was taken: `abort` leaves the error of a codec as it was.
        self._reducer.abort()
        return seconds


def render_choice(allowed: Sequence[str], choice: SyncChoice, timings: StepTimings) -> dict[str, object]:
    """Return the record of a choice for the run folder."""
    limits = {rule: timings.break_even(rule) for rule in allowed[1:]}
    return {
        "sync": choice.rule,
        "reason": choice.reason,
        "compute_seconds": timings.compute_seconds,
        "exchange_seconds": timings.exchange_seconds,
        "message_seconds": timings.message_seconds,
        "bits_per_second": timings.bits_per_second(timings.exchange_seconds),
        "step_seconds": {rule: timings.seconds(rule) for rule in allowed},
        "break_even": {rule: timings.bits_per_second(limit) for rule, limit in limits.items()},
    }


def _format_milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _format_break_even(timings: StepTimings, rule: str) -> str:
    limit = timings.bits_per_second(timings.break_even(rule))
    return f"{limit / 1e6:.3g} Mbit/s ({rule})" if limit else f"no rate ({rule})"
