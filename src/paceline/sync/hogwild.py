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
steps later (`bounded` without a server). So S steps after a rank has told how fast it is all can read it, and
shares may follow speed (`dealing`).
Source: Recht, Re, Wright and Niu 2011, Hogwild!, NIPS, arXiv:1106.5730, Algorithm 1; Ho et al. 2013, A Stale
Synchronous Parallel Parameter Server, NIPS, section 3.

Hogwild! on the ranks of one host: parameters and counters in memory that they share.
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
from paceline.errors import DeadlineError, StrategyError
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
        self._before, self._counter_before = 0, 0.0

    @property
    def updates(self) -> int:
        """Of all ranks, as far as this one sees."""
        return int(self.taken.sum())

    @property
    def stopping(self) -> bool:
        """Whether any rank was asked to stop."""
        return bool(self.stops.any())

    def request_stop(self, asked: bool) -> None:
        """Tell the others whether this rank was asked."""
        self.stops[self._rank] = int(asked)

    def reach(self, step: int) -> None:
        """This rank has taken all steps before this one."""
        self.clocks[self._rank] = step

    def behind(self, step: int, bound: float) -> int | None:
        """A rank that has not taken all steps before the last `bound` ones before `step`; None: all have."""
        clocks = self.clocks.tolist()  # once: who is the slowest may change between two looks
        slowest = min(range(len(clocks)), key=clocks.__getitem__)
        return slowest if clocks[slowest] < step - bound else None

    def count(self) -> None:
        """This rank has made an update."""
        self.ones.add_(1.0)
        self.taken[self._rank] += 1

    def begin(self) -> None:
        """A round begins; nobody writes."""
        self._before, self._counter_before = self.updates, float(self.ones.double().mean())

    def lost_update_share(self) -> float:
        """Of the updates of this round, the share that was lost in a value; nobody writes."""
        made = self.updates - self._before
        arrived = float(self.ones.double().mean()) - self._counter_before
        return 1.0 - arrived / made if made else 0.0


class Hogwild:
    """The rule.

    Args:
        inner: the step of one rank, on parameters that lie in common.
        shared_counters: in memory of the same ranks.
        bound: S; `math.inf`: none.
        replicas: all ranks, each of which is one.
        stop_requested: see `EveryStep`.
        shares: which part of a batch this rank runs.
    Wire: at the end of a round one all_gather of 8 bytes a rank, one all_reduce of the tally, and a barrier.
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
        self._ages = list[int]()  # of each step of a round, the updates that others made while it was taken

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        """See `Rule`: a round ends where the feed wants a pause, or a rank was asked to stop."""
        return self._loop.rounds(
            feed, runner, update_step, begin=self._begin, step=self._go_on, meet=self._meet
        )

    def abort(self) -> None:
        """See `Rule`."""
        self.inner.abort()

    def _begin(self, feed: TrainingFeed, step: int) -> int:
        """A new round, once nobody reads what it will change."""
        self._ages.clear()
        self.shared_counters.begin()
        self.shared_counters.reach(step)
        self._phases.begin("communication")
        self._net.barrier(self._replicas)
        return feed.next_pause(step)

    def _go_on(self, stretch: LocalRound, take: TakeStep) -> None:
        """A step, unless the round is about to end instead; and where it ends, once that is asked."""
        if self._may_begin(stretch):
            self._step(stretch, take)
        if not stretch.is_agreed and (self.shared_counters.stopping or stretch.step == stretch.end):
            self._phases.begin("communication")
            own = torch.tensor([stretch.step])
            stretch.end_with(int(one) for one in self._net.all_gather(own, self._replicas, equal=True).wait())

    def _may_begin(self, stretch: LocalRound) -> bool:
        """Wait for those who are too far behind; false: the round is about to end instead.

        Raises:
            DeadlineError: one stays behind for a deadline.
        """
        step = stretch.step
        if self._awaited(step) is None:
            return True
        expires = time.monotonic() + self._net.deadline_seconds
        self._phases.begin("communication")
        while (rank := self._awaited(step)) is not None:
            self.shared_counters.request_stop(self._stop_requested())
            if self.shared_counters.stopping and not stretch.is_agreed:
                return False
            if time.monotonic() > expires:
                raise DeadlineError(
                    f"rank {rank} is more than {self._bound:g} steps behind step {step} for"
                    f" {self._net.deadline_seconds:g} s",
                    next_step="look at what that rank does, or raise runtime.deadline_seconds",
                )
            time.sleep(_POLL_SECONDS)
        return True

    def _awaited(self, step: int) -> int | None:
        """A rank without which this one does not begin a step; None: there is none."""
        rank = self.shared_counters.behind(step, self._bound)
        return self._replicas.rank if rank is None and not self._loop.shares.is_ready(step) else rank

    def _step(self, stretch: LocalRound, take: TakeStep) -> None:
        """One step of this rank; what others do meanwhile is its staleness."""
        self.shared_counters.request_stop(self._stop_requested())
        read = self.shared_counters.updates
        update = take()
        self._ages.append(self.shared_counters.updates - read)
        if update.applied:
            self.shared_counters.count()
        self.shared_counters.reach(stretch.step)

    def _meet(self, stretch: LocalRound, runner: ModelRunner) -> tuple[StepTally, Mapping[str, float]]:
        """The sums over all ranks, and buffers that are equal; afterwards nobody writes."""
        tally, own = self._loop.agree(stretch, runner, ages=sum(self._ages), steps=len(self._ages))
        return tally, {
            "staleness": own["ages"] / own["steps"],
            "lost_updates": self.shared_counters.lost_update_share(),
        }


_MAX_TALLY_SIZE = 1 << 16
_TALLY_ITEM_BYTES = 4


def build_hogwild(context: SessionContext, layout: ModelLayout, state: TrainState) -> SyncRule:
    """Replicas update the same parameters, without a lock.

    Raises:
        StrategyError: the ranks have no memory in common.
    """
    world, sharded_model = context.mesh.world, layout.runner.sharded_model
    bound = context.recipe.strategy.sync_word.argument
    bound = context.recipe.strategy.sync_word.argument
    num_ones = _tally_size(max(p.numel() for p in sharded_model.computes.values()))
    if world.size == 1:
        shared_counters = _build_board(0, 1, num_ones, lambda n, dtype: torch.zeros(n, dtype=dtype))
    else:
        memory = _shared_memory(context)
        share_whole_parameters(sharded_model, memory)
        shared_counters = _build_board(world.rank, world.size, num_ones, partial(_zeros, memory))
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
    """By speed, as ranks write it down in memory; None: they stay."""
    if not balances_by_speed(context):
        return None
    bound, size = context.recipe.strategy.sync_word.argument, context.mesh.world.size
    rows = num_window_rows(bound, SPEED_WINDOW_STEPS)
    words = _zeros(_shared_memory(context), rows * size, torch.int64).view(rows, size)
    return build_speed_assignment(context, SharedMemorySpeeds(words, context.mesh.world.rank), lag=bound)


def _tally_size(num_values: int) -> int:
    """Of a tally, where so many values are in the largest tensor."""
    return min(_MAX_TALLY_SIZE, num_values)


def _build_board(
    rank: int, num_ranks: int, num_ones: int, zeros: Callable[[int, torch.dtype], Tensor]
) -> SharedCounters:
    taken, stops, clocks = (zeros(num_ranks, torch.int64) for _ in range(3))
    return SharedCounters(taken, stops, clocks, zeros(num_ones, torch.float32), rank)


def _shared_memory(context: SessionContext) -> SharedMemoryCollective:
    found = context.exact_collective(context.mesh.world)
    if isinstance(found, SharedMemoryCollective):
        return found
    why = "compute on GPUs" if context.device.type != "cpu" else "run on several hosts"
    raise StrategyError(
        f"sync=hogwild trains in the memory of one host, and these ranks {why}",
        next_step="choose sync=local:H, or servers=1 sync=server-async",
    )


def _zeros(memory: SharedMemoryCollective, num_values: int, dtype: torch.dtype) -> Tensor:
    return memory.allocate_shared_once(num_values, torch.empty(0, dtype=dtype))
