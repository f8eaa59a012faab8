"""Hogwild!: replicas of one host update the same parameters in shared memory, without a lock.

The parameters lie once, in memory that all ranks have mapped. Every rank runs its own part of each batch and
updates all parameters in place, with its own optimizer, while others read and write them. A gradient can
belong to parameters that others change meanwhile, and an update is lost where two ranks read a value before
either has written it. Lost updates cannot be found afterwards, so a tally of ones is kept next to the
parameters and is updated in the same way: every update adds one to each of its values, and what is missing at
the end of a round is the share that was lost.

With a bound S no rank begins a step before all others have taken all steps before the last S. So a gradient
misses at most S steps of any rank before its own, and when it is applied no rank has applied one of more than
S steps later. S steps after a rank has published its speed all ranks can read it, so shares can follow speed
(`SpeedAssignment`).

Invariant: a round is a number of steps in which no rank waits beyond the bound. Every sample is used once.
Between two rounds no rank writes, all ranks have taken the same number of steps, and all hold equal
parameters (the same memory) and equal buffers (moved by the mean of their changes on each rank, as in local
SGD). Two runs do not compute the same bits.
Source: Recht, Re, Wright and Niu 2011, Hogwild!, NIPS, arXiv:1106.5730, Algorithm 1; Ho et al. 2013, A Stale
Synchronous Parallel Parameter Server, NIPS, section 3.
Refusals: `paceline.recipe.registry.sync_specs`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from paceline.comm.net import Net
from paceline.comm.routes.shared_memory import SharedMemoryCollective
from paceline.comm.tally import StepTally
from paceline.data.work import TrainingFeed
from paceline.errors import DeadlineError, StrategyError, format_count
from paceline.job.mesh import RankGroup
from paceline.observe.step_stats import PhaseTimer, StepStats
from paceline.parallel.host_shared_parameters import share_whole_parameters
from paceline.parallel.model_layout import ModelLayout
from paceline.parallel.model_runner import ModelRunner
from paceline.parallel.session_context import SessionContext
from paceline.state.train_state import TrainState
from paceline.sync.every_step import EveryStep
from paceline.sync.local_rounds import (
    LocalRound,
    LocalRoundLoop,
    TakeStep,
    build_replica_step,
    meeting_ranks,
)
from paceline.sync.sync_rule import SyncRule
from paceline.sync.update import UpdateStep
from paceline.sync.work_assignment import (
    SPEED_WINDOW_STEPS,
    EvenAssignment,
    SharedMemorySpeeds,
    balances_by_speed,
    build_speed_assignment,
    num_window_rows,
)

_POLL_SECONDS = 5e-4


class SharedCounters:
    """Counters and flags in shared memory.

    Each value of `taken`, `stops` and `clocks` is written by one rank only, so none is lost.

    Args:
        taken: updates that each rank has made since the run began, int64 [ranks].
        stops: whether each rank was asked to stop, int64 [ranks].
        clocks: the next step of each rank, int64 [ranks].
        ones: every update adds one to each value, as updates change parameters, float32 [N].
        rank: this rank.
    """

    def __init__(self, taken: Tensor, stops: Tensor, clocks: Tensor, ones: Tensor, rank: int) -> None:
        self.taken, self.stops, self.clocks, self.ones, self._rank = taken, stops, clocks, ones, rank
        self._updates_before, self._counter_before = 0, 0.0

    @property
    def updates(self) -> int:
        """Return the updates of all ranks that this rank sees."""
        return int(self.taken.sum())

    @property
    def stopping(self) -> bool:
        """Return whether any rank was asked to stop."""
        return bool(self.stops.any())

    def request_stop(self, is_requested: bool) -> None:
        """Publish whether this rank was asked to stop."""
        self.stops[self._rank] = int(is_requested)

    def reach(self, step: int) -> None:
        """Publish that this rank has taken all steps before `step`."""
        self.clocks[self._rank] = step

    def behind(self, step: int, bound: float) -> int | None:
        """Return a rank that has not taken all steps before the last `bound` ones before `step`; None: there
        is none.
        """
        clocks = self.clocks.tolist()  # read once: which rank is slowest can change between two reads
        slowest = min(range(len(clocks)), key=clocks.__getitem__)
        return slowest if clocks[slowest] < step - bound else None

    def count(self) -> None:
        """Record that this rank has made an update."""
        # Without a lock on purpose: it loses updates as the parameters do, which is what it measures.
        self.ones.add_(1.0)
        self.taken[self._rank] += 1

    def begin(self) -> None:
        """Start a round, while no rank writes."""
        self._updates_before, self._counter_before = self.updates, float(self.ones.double().mean())

    def lost_update_share(self) -> float:
        """Return the share of this round's updates that a value has lost on average, while no rank writes."""
        num_made = self.updates - self._updates_before
        num_arrived = float(self.ones.double().mean()) - self._counter_before
        return 1.0 - num_arrived / num_made if num_made else 0.0


class Hogwild:
    """The rule of Hogwild!.

    Args:
        inner: the step of one rank, on shared parameters.
        shared_counters: in memory of the same ranks.
        bound: S; `math.inf`: none.
        replicas: all ranks; each is one replica.
        net, phases: as for `LocalRoundLoop`.
        stop_requested: returns whether this rank was asked to stop.
        shares: assigns this rank its part of each batch.
    Wire: at the end of a round one all_gather of 8 bytes per rank, one all_reduce of the tally, and a
        barrier.
    """

    def __init__(
        self,
        inner: EveryStep,
        shared_counters: SharedCounters,
        bound: float = math.inf,
        *,
        replicas: RankGroup,
        net: Net,
        phases: PhaseTimer,
        stop_requested: Callable[[], bool],
        shares: EvenAssignment | None = None,
    ) -> None:
        self.inner, self.shared_counters, self._bound = inner, shared_counters, bound
        self._loop = LocalRoundLoop(inner, replicas=replicas, net=net, phases=phases, shares=shares)
        self._replicas, self._net, self._phases, self._stop_requested = replicas, net, phases, stop_requested
        self._staleness = list[int]()  # of each step: updates that other ranks made while it was taken

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        return self._loop.rounds(
            feed, runner, update_step, begin=self._begin, step=self._step_or_end, meet=self._meet
        )

    def abort(self) -> None:
        self.inner.abort()

    def _begin(self, feed: TrainingFeed, step: int) -> int:
        """Start a round, once no rank reads what it will change."""
        self._staleness.clear()
        self.shared_counters.begin()
        self.shared_counters.reach(step)
        self._phases.begin("communication")
        # Others may still read the counters of the last round.
        self._net.barrier(self._replicas)
        return feed.next_pause(step)

    def _step_or_end(self, local_round: LocalRound, take: TakeStep) -> None:
        """Take a step unless the round is about to end; agree on its end once that is requested."""
        if self._may_begin(local_round):
            self._step(local_round, take)
        if not local_round.is_agreed and (
            self.shared_counters.stopping or local_round.step == local_round.end
        ):
            self._phases.begin("communication")
            next_step = torch.tensor([local_round.step])
            local_round.end_with(
                int(step) for step in self._net.all_gather(next_step, self._replicas, equal=True).wait()
            )

    def _may_begin(self, local_round: LocalRound) -> bool:
        """Wait for ranks that are too far behind. False: the round is about to end instead.

        Raises:
            DeadlineError: a rank stays behind until the deadline.
        """
        step = local_round.step
        if self._slowest_behind(step) is None:
            return True
        expires = time.monotonic() + self._net.deadline_seconds
        self._phases.begin("communication")
        while (rank := self._slowest_behind(step)) is not None:
            # A request to stop can come during the wait, and the other ranks have to see it.
            self.shared_counters.request_stop(self._stop_requested())
            # A rank that is asked to stop begins no further step, so waiting for it would never end.
            if self.shared_counters.stopping and not local_round.is_agreed:
                return False
            if time.monotonic() > expires:
                raise DeadlineError(
                    f"rank {rank} is more than {format_count(float(self._bound), 'step')} behind step {step}"
                    f" for {self._net.deadline_seconds:g} s",
                    next_step="check what that rank is doing, or raise runtime.deadline_seconds",
                )
            # Shared memory has no signal to wait for.
            time.sleep(_POLL_SECONDS)
        return True

    def _slowest_behind(self, step: int) -> int | None:
        """Return a rank that this one has to wait for; None: there is none."""
        rank = self.shared_counters.behind(step, self._bound)
        # A speed that another rank has just written can take a moment to be visible: poll again.
        return self._replicas.rank if rank is None and not self._loop.shares.is_ready(step) else rank

    def _step(self, local_round: LocalRound, take: TakeStep) -> None:
        """Take one step of this rank; the updates of others meanwhile are its staleness."""
        self.shared_counters.request_stop(self._stop_requested())
        updates_before = self.shared_counters.updates
        update = take()
        # Before this rank counts its own update, so only those of other ranks are included.
        self._staleness.append(self.shared_counters.updates - updates_before)
        if update.applied:
            self.shared_counters.count()
        # Published after the update, so that a rank that waits sees the step complete.
        self.shared_counters.reach(local_round.step)

    def _meet(self, local_round: LocalRound, runner: ModelRunner) -> tuple[StepTally, Mapping[str, float]]:
        """Sum over all ranks and make the buffers equal; afterwards no rank writes."""
        tally, sums = self._loop.agree(
            local_round, runner, ages=sum(self._staleness), steps=len(self._staleness)
        )
        return tally, {
            "staleness": sums["ages"] / sums["steps"],
            "lost_updates": self.shared_counters.lost_update_share(),
        }


# The tally only estimates a share, so a sample of the values is enough.
_MAX_TALLY_SIZE = 1 << 16


def build_hogwild(context: SessionContext, layout: ModelLayout, state: TrainState) -> SyncRule:
    """Build the rule in which replicas update the same parameters without a lock.

    Raises:
        StrategyError: the ranks have no shared memory.
    """
    world, sharded_model = context.mesh.world, layout.runner.sharded_model
    bound = context.recipe.strategy.sync_word.argument
    num_ones = _tally_size(max(p.numel() for p in sharded_model.computes.values()))
    if world.size == 1:
        shared_counters = _build_counters(0, 1, num_ones, lambda n, dtype: torch.zeros(n, dtype=dtype))
    else:
        memory = _shared_memory(context)
        share_whole_parameters(sharded_model, memory)
        shared_counters = _build_counters(world.rank, world.size, num_ones, partial(_zeros, memory))
    return Hogwild(
        build_replica_step(context, sharded_model, state),
        shared_counters,
        math.inf if bound is None else bound,
        stop_requested=context.rule_inputs.stop_requested,
        shares=_build_shares(context),
        replicas=meeting_ranks(context),
        net=context.net,
        phases=context.phases,
    )


def _build_shares(context: SessionContext) -> EvenAssignment | None:
    """Build an assignment by speed, with speeds in shared memory; None: shares stay."""
    if not balances_by_speed(context):
        return None
    bound, size = context.recipe.strategy.sync_word.argument, context.mesh.world.size
    rows = num_window_rows(bound, SPEED_WINDOW_STEPS)
    words = _zeros(_shared_memory(context), rows * size, torch.int64).view(rows, size)
    return build_speed_assignment(context, SharedMemorySpeeds(words, context.mesh.world.rank), lag=bound)


def _tally_size(num_values: int) -> int:
    """Return the length of `SharedCounters.ones`, given the number of values of the largest tensor."""
    return min(_MAX_TALLY_SIZE, num_values)


def _build_counters(
    rank: int, num_ranks: int, num_ones: int, zeros: Callable[[int, torch.dtype], Tensor]
) -> SharedCounters:
    taken, stops, clocks = (zeros(num_ranks, torch.int64) for _ in range(3))
    return SharedCounters(taken, stops, clocks, zeros(num_ones, torch.float32), rank)


def _shared_memory(context: SessionContext) -> SharedMemoryCollective:
    collective = context.exact_collective(context.mesh.world)
    if isinstance(collective, SharedMemoryCollective):
        return collective
    reason = "compute on GPUs" if context.device.type != "cpu" else "run on several hosts"
    raise StrategyError(
        f"sync=hogwild needs the shared memory of one host, but these ranks {reason}",
        next_step="choose sync=local:H, or servers=1 sync=server-async",
    )


def _zeros(memory: SharedMemoryCollective, num_values: int, dtype: torch.dtype) -> Tensor:
    return memory.allocate_shared_once(num_values, torch.empty(0, dtype=dtype))
