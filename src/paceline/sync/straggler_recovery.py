"""Whether a rank that was slow keeps up again: by its answers, which a server hears, or by a trial.

A rank that serves computes nothing that shows it: it is tried with some micro-batches where a round ends
(`tried`), and workers say how long theirs took. Replicas that train alone are followed where they meet
(`followed`).

To be named a rank has to take `factor` times what others take, in two windows; to have recovered, half of
that excess at most, in three windows one after another, and in twice as many after every return. So a run
that goes back and forth does so ever more seldom.

A rank that serves is tried where a round ends: it runs some micro-batches, and nothing comes of them.

A slow rank that serves computes nothing that would show that it keeps up again.

Replicas that train alone follow the slow one where they meet, until it keeps up again.

All say how long a micro-batch took them, or, where a link was slow, send some bytes around a ring, as when it
was named; so all judge from the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from statistics import median
from typing import Any, NamedTuple, cast

import torch

from paceline.comm.net import Net
from paceline.comm.reduction.gradients import LocalReducer
from paceline.data.work import TrainingFeed
from paceline.job.mesh import RankGroup
from paceline.observe.sinks import EventCallback
from paceline.observe.step_stats import LOCAL_PHASES, PhaseTimer, StepStats
from paceline.parallel.model_runner import ModelRunner
from paceline.parallel.session_context import SessionContext
from paceline.state.train_state import TrainState
from paceline.sync.server.server_policies import ServerPolicy, WorkerPush, WorkTicket
from paceline.sync.straggler_detection import COMMUNICATION, faster_link_seconds, probe_links
from paceline.sync.sync_rule import SyncRule
from paceline.sync.update import UpdateStep
from paceline.sync.work_assignment import even_share_micro_batches

RECOVERED = "recovered"
"""The event that ends the phase of a rule that took over."""
MICRO_BATCH_SECONDS = "took"
"""Of a push, where a worker says it: how long a micro-batch has taken it."""
ANSWERS_PER_WINDOW = 4  # answers of the slow worker
GOOD_WINDOWS = 3


class AwaitedRank(NamedTuple):
    """Whom a run waits for.

    Args:
        rank: that was named as slow.
        cause: see `SlowRank`.
        returns: how often the run has gone back already.
    """

    rank: int
    cause: str
    returns: int


class RecoveryJudge:
    """Judges one worker of a server, or one replica; pure.

    Args:
        slow: the worker.
        num_workers: at least two; of one nobody can tell.
        factor: see `StragglerJudge`.
        returns: see `AwaitedRank`.
    """

    def __init__(self, slow: int, num_workers: int, factor: float, returns: int) -> None:
        self._slow, self._limit = slow, 1 + (factor - 1) / 2
        self._wanted, self._good = GOOD_WINDOWS * 2**returns, 0
        self._found: dict[int, list[float]] = {worker: [] for worker in range(num_workers)}

    def observe_seconds(self, worker: int, seconds: float) -> Mapping[str, float] | None:
        """A worker has answered after so long. Returns what both take, once the slow one is so no more."""
        self._found[worker].append(seconds)
        if len(self._found[self._slow]) < ANSWERS_PER_WINDOW or not all(self._found.values()):
            return None
        mine = median(self._found[self._slow])
        usual = median(median(found) for other, found in self._found.items() if other != self._slow)
        self._good = self._good + 1 if mine <= self._limit * usual else 0
        self._found = {one: [] for one in self._found}
        return {"seconds": mine, "usual": usual} if self._good >= self._wanted else None


class ServerTrial(NamedTuple):
    """Of a rank that is tried, for it answers nobody.

    Args:
        number: among those that are heard.
        seconds: runs some micro-batches, and says how long one took; None: nobody is tried.
    """

    number: int = 0
    seconds: Callable[[], float] | None = None

    def answers(self) -> list[float]:
        """As many as a window has."""
        return [] if self.seconds is None else [self.seconds()] * ANSWERS_PER_WINDOW


class StopWhenRecovered:
    """A policy that opens no further step once the slow worker has recovered; all others are the inner one's.

    Not once a worker is lost: every-step would need it.

    Args:
        hear: of a `RecoveryJudge`.
        rank: of the slow worker.
        clock: in seconds.
        took: of what a worker brought, and how long it was away, what is heard of it.
    """

    def __init__(
        self,
        inner: ServerPolicy,
        hear: Callable[[int, float], Mapping[str, float] | None],
        rank: int,
        clock: Callable[[], float],
        took: Callable[[WorkerPush, float], float] = lambda push, seconds: seconds,
    ) -> None:
        self._inner, self._hear, self._rank, self._clock = inner, hear, rank, clock
        self._took, self._trial = took, ServerTrial()
        self.begin, self.stop, self.give_back = inner.begin, inner.stop, inner.give_back
        self.is_late, self.drops = inner.is_late, inner.drops
        self._given: dict[int, float] = {}
        self._found: Mapping[str, float] | None = None
        self._is_whole = True

    def ticket(self, worker: int) -> WorkTicket | None:
        """See `ServerPolicy`."""
        found = self._inner.ticket(worker)
        if found is not None:
            self._given[worker] = self._clock()
        return found

    def bind_trial(self, number: int, seconds: Callable[[], float]) -> None:
        """The slow rank is this one, which serves; see `ServerTrial`."""
        self._trial = ServerTrial(number, seconds)

    def push(self, worker: int, push: WorkerPush) -> Sequence[WorkerPush] | None:
        """See `ServerPolicy`."""
        found = self._hear(worker, self._took(push, self._clock() - self._given[worker]))
        if found is not None and self._is_whole:
            self._found = found
        applied = self._inner.push(worker, push)
        if self._found is not None:
            self._inner.stop()
        return applied

    def lose(self, worker: int, ticket: WorkTicket | None) -> None:
        """See `ServerPolicy`."""
        self._is_whole, self._found = False, None
        self._inner.lose(worker, ticket)

    def news(self) -> Mapping[str, Mapping[str, Any]]:
        """What all ranks are to be told at the end of a round, by the name of the event."""
        if self._is_whole and self._found is None:
            for seconds in self._trial.answers():
                self._found = self._hear(self._trial.number, seconds) or self._found
        if self._found is None:
            return {}
        return {RECOVERED: {"step": self._inner.step, "rank": self._rank, **self._found}}

    @property
    def is_complete(self) -> bool:
        """See `ServerPolicy`."""
        return self._inner.is_complete

    @property
    def num_needed(self) -> int:
        """See `ServerPolicy`."""
        return self._inner.num_needed

    @property
    def step(self) -> int:
        """See `ServerPolicy`."""
        return self._inner.step


MAX_TRIAL_MICRO_BATCHES = 4  # micro-batches of a trial: its cost, where others wait
BindTrial = Callable[[Callable[[], float]], None]


class TrialServerRule:
    """The rule of a server that is tried.

    Args:
        inner: serves.
        bind: is told, once the data are known, what makes a trial.
        phases: measures it.
    """

    def __init__(self, inner: SyncRule, bind: BindTrial, phases: PhaseTimer) -> None:
        self.inner, self._bind, self._phases = inner, bind, phases

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        """See `SyncRule`."""
        self._bind(partial(run_trial, feed, runner, update_step.state, self._phases))
        return self.inner.rounds(feed, runner, update_step)

    def abort(self) -> None:
        """See `SyncRule`."""
        self.inner.abort()


def run_trial(feed: TrainingFeed, runner: ModelRunner, state: TrainState, phases: PhaseTimer) -> float:
    """Seconds that a micro-batch of the next step takes this rank, to read and to compute.

    Parameters and buffers stay as they are; the gradients are dropped, and no sample counts.
    """
    step, buffers = min(state.step, feed.num_steps - 1), runner.buffers.values()
    micro_batches = feed.work.part(0, 1).micro_batches(step, state.updates)[:MAX_TRIAL_MICRO_BATCHES]
    sink = LocalReducer(runner.sharded_model.computes)
    phases.take()
    with feed.open(micro_batches) as stream:
        runner.run(stream, len(micro_batches), sink, state.scale.value)
    sink.abort()
    runner.buffers.reset(buffers)
    seconds = phases.spent(*LOCAL_PHASES) / len(micro_batches)
    phases.take()
    return seconds


MeasureRound = Callable[[StepStats, range, torch.device], Sequence[float]]
"""Seconds of each replica, by its place, after a round of so many steps; collective."""


class ReplicaRecoveryRule:
    """A rule of replicas that train alone, under which one of them is followed until it keeps up again.

    A round is as many answers as it has steps, and a window at most.

    Args:
        inner: takes the steps; replicas meet where a round ends.
        hear: of a `Recovery`; a worker is a place in the group.
        rank: the slow one.
        look: what of a round is heard.
        note: is told once it keeps up, which ends the phase.
    """

    def __init__(
        self,
        inner: SyncRule,
        hear: Callable[[int, float], Mapping[str, float] | None],
        rank: int,
        look: MeasureRound,
        note: EventCallback,
    ) -> None:
        self.inner, self._hear, self._rank, self._look, self._note = inner, hear, rank, look, note
        self._has_recovered = False

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        """See `SyncRule`: a round is one of the inner rule."""
        before = update_step.state.step
        rounds = cast("Generator[StepStats, None, None]", self.inner.rounds(feed, runner, update_step))
        with closing(rounds):
            for stats in rounds:
                steps = range(before, stats.step + 1)
                before = stats.step + 1
                if not self._has_recovered:
                    self._follow(stats, steps, runner.sharded_model.device)
                yield stats

    def abort(self) -> None:
        """See `SyncRule`."""
        self.inner.abort()

    def _follow(self, stats: StepStats, steps: range, device: torch.device) -> None:
        """Hear what the round took each replica; collective."""
        parts = self._look(stats, steps, device)
        for _ in range(min(ANSWERS_PER_WINDOW, len(steps))):
            for place, part in enumerate(parts):
                found = self._hear(place, part)
                if found is not None and not self._has_recovered:
                    self._has_recovered = True
                    self._note(RECOVERED, {"step": stats.step + 1, "rank": self._rank, **found})


def measure_compute(ran: Callable[[int], int], group: RankGroup, net: Net) -> MeasureRound:
    """How long a micro-batch of the round took each replica.

    Args:
        ran: how many micro-batches this rank ran in a step.
        group: the replicas.
    Wire: one all_gather of 8 bytes a rank for each round.
    """

    def look(stats: StepStats, steps: range, device: torch.device) -> list[float]:
        phases, num = stats.phases, max(1, sum(map(ran, steps)))
        mine = (phases["data"] + phases["forward"] + phases["backward"]) / num
        seconds = torch.tensor([mine], dtype=torch.float64, device=device)
        return [float(part) for part in net.all_gather(seconds, group, equal=True).wait()]

    return look


def measure_links(group: RankGroup, net: Net) -> MeasureRound:
    """How long a probe takes on the faster link of each replica.

    Args:
        group: the replicas, at least three.
    Wire: that of a probe for each round; see `straggler`.
    """

    def look(stats: StepStats, steps: range, device: torch.device) -> list[float]:
        return faster_link_seconds(probe_links(net, group, device))

    return look


def stop_when_recovered(context: SessionContext, rule: SyncRule) -> SyncRule:
    """End a rule of replicas that train alone once the slow replica, or its link, has recovered.

    Return the rule unchanged if the run is not waiting for a slow replica.
    """
    slow, replicas = context.rule_inputs.awaited_rank, context.mesh.replica
    factor = context.recipe.health.straggler_factor
    if slow is None or factor is None:
        return rule
    judge = RecoveryJudge(replicas.ranks.index(slow.rank), replicas.size, factor, slow.returns)
    if slow.cause == COMMUNICATION:
        measure = measure_links(replicas, context.net)
    else:
        num_run = partial(even_share_micro_batches, context.shards, replicas)
        measure = measure_compute(num_run, replicas, context.net)
    return ReplicaRecoveryRule(rule, judge.observe_seconds, slow.rank, measure, context.note)
