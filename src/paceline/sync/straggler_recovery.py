"""Straggler recovery: notices when a rank that was slow keeps up again, so that a run can return to
every-step.

Under a rule with servers a slow worker is judged by the time of its answers (`StopWhenRecovered`). A slow
rank that serves computes nothing that would show its speed: it runs a few micro-batches at the end of each
round (`TrialServerRule`), and workers report how long theirs took. Replicas that train alone exchange their
times at the end of each round, or probe their links as in straggler detection if a link was slow
(`ReplicaRecoveryRule`).

A rank is named as slow if it takes `factor` times as long as others in two windows. It has recovered if it
takes at most half of that excess in three windows in a row, and in twice as many after every return, so that
a run that goes back and forth does so less and less often.

Invariant: all ranks judge by the same numbers, or rank 0 alone decides; so they end the phase together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

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
from paceline.sync.sync_rule import SyncRule, observe_rounds
from paceline.sync.update import UpdateStep
from paceline.sync.work_assignment import even_share_micro_batches

RECOVERED = "recovered"
"""The event that ends the phase of the rule that took over from every-step."""
MICRO_BATCH_SECONDS = "took"
"""Key of a push with the seconds that a micro-batch took the worker."""
ANSWERS_PER_WINDOW = 4  # answers of the slow worker
GOOD_WINDOWS = 3  # windows in a row after which a rank has recovered for the first time


class AwaitedRank(NamedTuple):
    """The slow rank that a run is waiting for.

    Args:
        rank: its global rank.
        cause: "data", "compute" or "communication".
        returns: how often the run has returned to every-step already.
    """

    rank: int
    cause: str
    returns: int


class RecoveryJudge:
    """The decision whether one worker of a server, or one replica, has recovered; pure.

    Args:
        slow: the number of the slow worker.
        num_workers: at least two; one worker has nothing to compare with.
        factor: the factor at which a rank is named as slow, as for `StragglerJudge`.
        returns: as for `AwaitedRank`.
    """

    def __init__(self, slow: int, num_workers: int, factor: float, returns: int) -> None:
        self._slow, self._limit = slow, 1 + (factor - 1) / 2
        self._num_needed, self._num_good = GOOD_WINDOWS * 2**returns, 0
        self._seconds: dict[int, list[float]] = {worker: [] for worker in range(num_workers)}

    def observe_seconds(self, worker: int, seconds: float) -> Mapping[str, float] | None:
        """Record how long a worker took for an answer.

        Returns:
            The times of the slow worker and of the others once the slow one has recovered, else None.
        """
        self._seconds[worker].append(seconds)
        if len(self._seconds[self._slow]) < ANSWERS_PER_WINDOW or not all(self._seconds.values()):
            return None
        slow_seconds = median(self._seconds[self._slow])
        usual = median(median(seconds) for other, seconds in self._seconds.items() if other != self._slow)
        self._num_good = self._num_good + 1 if slow_seconds <= self._limit * usual else 0
        self._seconds = {worker: [] for worker in self._seconds}
        return {"seconds": slow_seconds, "usual": usual} if self._num_good >= self._num_needed else None


class ServerTrial(NamedTuple):
    """A trial of the rank that serves, because it pushes nothing by which it could be judged.

    Args:
        number: its number among the judged workers.
        seconds: runs some micro-batches and returns the seconds of one; None: there is no trial.
    """

    number: int = 0
    seconds: Callable[[], float] | None = None

    def answers(self) -> list[float]:
        """Return as many times as a window has."""
        # One measurement counts as a whole window: others wait while the trial runs.
        return [] if self.seconds is None else [self.seconds()] * ANSWERS_PER_WINDOW


class StopWhenRecovered:
    """A server policy that opens no further step once the slow worker has recovered, around another policy.

    It never stops once a worker was lost, because every-step would need that worker.

    Args:
        inner: decides everything else.
        observe_seconds: `RecoveryJudge.observe_seconds`.
        rank: global rank of the slow worker.
        clock: returns seconds.
        answer_seconds: returns the seconds to judge, given a push and the seconds since its ticket.
    """

    def __init__(
        self,
        inner: ServerPolicy,
        observe_seconds: Callable[[int, float], Mapping[str, float] | None],
        rank: int,
        clock: Callable[[], float],
        answer_seconds: Callable[[WorkerPush, float], float] = lambda push, seconds: seconds,
    ) -> None:
        self._inner, self._observe_seconds, self._rank, self._clock = inner, observe_seconds, rank, clock
        self._answer_seconds, self._trial = answer_seconds, ServerTrial()
        self.begin, self.stop, self.reissue = inner.begin, inner.stop, inner.reissue
        self.is_late, self.drops = inner.is_late, inner.drops
        self._handed_out: dict[int, float] = {}
        self._recovered: Mapping[str, float] | None = None
        self._has_all_workers = True

    def ticket(self, worker: int) -> WorkTicket | None:
        ticket = self._inner.ticket(worker)
        if ticket is not None:
            self._handed_out[worker] = self._clock()
        return ticket

    def bind_trial(self, number: int, seconds: Callable[[], float]) -> None:
        """Judge this rank, which is slow and serves, by a trial at the end of each round.

        Args:
            number, seconds: as for `ServerTrial`.
        """
        self._trial = ServerTrial(number, seconds)

    def push(self, worker: int, push: WorkerPush) -> Sequence[WorkerPush] | None:
        recovered = self._observe_seconds(
            worker, self._answer_seconds(push, self._clock() - self._handed_out[worker])
        )
        if recovered is not None and self._has_all_workers:
            self._recovered = recovered
        # The push still counts: the policy only stops opening steps.
        applied = self._inner.push(worker, push)
        if self._recovered is not None:
            self._inner.stop()
        return applied

    def drop_worker(self, worker: int, ticket: WorkTicket | None) -> None:
        # Every-step would need the lost worker, so from here on the run stays with its server.
        self._has_all_workers, self._recovered = False, None
        self._inner.drop_worker(worker, ticket)

    def round_events(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the events that all ranks record at the end of a round, by name."""
        if self._has_all_workers and self._recovered is None:
            for seconds in self._trial.answers():
                self._recovered = self._observe_seconds(self._trial.number, seconds) or self._recovered
        if self._recovered is None:
            return {}
        return {RECOVERED: {"step": self._inner.step, "rank": self._rank, **self._recovered}}

    @property
    def is_complete(self) -> bool:
        return self._inner.is_complete

    @property
    def num_needed(self) -> int:
        return self._inner.num_needed

    @property
    def step(self) -> int:
        return self._inner.step


MAX_TRIAL_MICRO_BATCHES = 4  # other ranks wait for a trial, so this is its cost
BindTrial = Callable[[Callable[[], float]], None]
"""Receives the function that runs a trial and returns its seconds, as `StopWhenRecovered.bind_trial`."""


class TrialServerRule:
    """The rule of a slow rank that serves, with trials.

    Args:
        inner: serves.
        bind: receives the function that runs a trial, once the data are known.
        phases: measures the trial.
    """

    def __init__(self, inner: SyncRule, bind: BindTrial, phases: PhaseTimer) -> None:
        self.inner, self._bind, self._phases = inner, bind, phases

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        self._bind(partial(run_trial, feed, runner, update_step.state, self._phases))
        return self.inner.rounds(feed, runner, update_step)

    def abort(self) -> None:
        self.inner.abort()


def run_trial(feed: TrainingFeed, runner: ModelRunner, state: TrainState, phases: PhaseTimer) -> float:
    """Return the seconds that this rank takes to read and compute a micro-batch of the next step.

    Parameters and buffers stay as they are, gradients are dropped, and no sample counts.
    """
    # After the last step there is no next one; the work of the last is the same.
    step, buffers = min(state.step, feed.num_steps - 1), runner.buffers.values()
    micro_batches = feed.work.part(0, 1).micro_batches(step, state.num_updates)[:MAX_TRIAL_MICRO_BATCHES]
    # Without collectives: the other ranks are not part of a trial.
    sink = LocalReducer(runner.sharded_model.computes)
    # The trial belongs to no round: its times are removed from the record, before and after it.
    phases.take()
    with feed.open(micro_batches) as stream:
        runner.run(stream, len(micro_batches), sink, state.scale.value)
    sink.abort()
    runner.buffers.reset(buffers)
    seconds = phases.spent(*LOCAL_PHASES) / len(micro_batches)
    phases.take()
    return seconds


MeasureRound = Callable[[StepStats, range, torch.device], Sequence[float]]
"""Returns the seconds of each replica, given the record and the steps of a round; collective."""


class ReplicaRecoveryRule:
    """A rule of replicas that train alone, which ends its phase once the slow replica has recovered.

    A round counts as many answers as it has steps, and at most a window.

    Args:
        inner: takes the steps; replicas agree at the end of its rounds.
        observe_seconds: `RecoveryJudge.observe_seconds`, where a worker is a rank of the group of replicas.
        rank: global rank of the slow one.
        measure: returns the seconds of each replica in a round.
        note: receives the event "recovered".
    """

    def __init__(
        self,
        inner: SyncRule,
        observe_seconds: Callable[[int, float], Mapping[str, float] | None],
        rank: int,
        measure: MeasureRound,
        note: EventCallback,
    ) -> None:
        self.inner, self._observe_seconds, self._rank, self._measure, self._note = (
            inner,
            observe_seconds,
            rank,
            measure,
            note,
        )
        self._has_recovered = False

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        first, device = update_step.state.step, runner.sharded_model.device

        def observe(stats: StepStats) -> None:
            nonlocal first
            steps, first = range(first, stats.step + 1), stats.step + 1
            if not self._has_recovered:
                self._observe(stats, steps, device)

        return observe_rounds(self.inner, observe, feed, runner, update_step)

    def abort(self) -> None:
        self.inner.abort()

    def _observe(self, stats: StepStats, steps: range, device: torch.device) -> None:
        """Judge the times of a round; collective."""
        seconds_by_replica = self._measure(stats, steps, device)
        for _ in range(min(ANSWERS_PER_WINDOW, len(steps))):
            for replica, seconds in enumerate(seconds_by_replica):
                recovered = self._observe_seconds(replica, seconds)
                if recovered is not None and not self._has_recovered:
                    self._has_recovered = True
                    self._note(RECOVERED, {"step": stats.step + 1, "rank": self._rank, **recovered})


def measure_compute(num_run: Callable[[int], int], group: RankGroup, net: Net) -> MeasureRound:
    """Return a function that measures how long a micro-batch of a round took each replica.

    Args:
        num_run: returns how many micro-batches this rank ran in a step.
        group: the replicas.
        net: this rank's collectives.
    Wire: one all_gather of 8 bytes per rank for each round.
    """

    def measure(stats: StepStats, steps: range, device: torch.device) -> list[float]:
        phases, num_micro_batches = stats.phases, max(1, sum(map(num_run, steps)))
        own_seconds = (phases["data"] + phases["forward"] + phases["backward"]) / num_micro_batches
        seconds = torch.tensor([own_seconds], dtype=torch.float64, device=device)
        return [float(column) for column in net.all_gather(seconds, group, equal=True).wait()]

    return measure


def measure_links(group: RankGroup, net: Net) -> MeasureRound:
    """Return a function that measures how long a probe takes on the faster link of each replica.

    Args:
        group: the replicas, at least three.
        net: this rank's collectives.
    Wire: one probe per round, as in `straggler_detection`.
    """

    def measure(stats: StepStats, steps: range, device: torch.device) -> list[float]:
        return faster_link_seconds(probe_links(net, group, device))

    return measure


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
