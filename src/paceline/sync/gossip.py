"""What a replica that gossips keeps: whose turn it is, which halves are to come, what it has of the sum.

No wire. Invariant: halves are taken once; over all replicas and messages the weights add up to their number.
Source: Assran et al. 2019, Stochastic Gradient Push, arXiv:1811.10792, Algorithm 2 (push-sum).

Gossip: replicas update when each is ready, and give halves of what they have to each other, in pairs.

No server, no memory in common, and nobody waits for all. A replica has a sum x of parameters and a weight w
(1 to begin with), and computes with x / w. After its step of clock k it adds what the step has moved to x,
halves x and w, and sends the other half to the peer that the clock names. What others have sent at clocks
before is added when it is there; before clock k begins, all that was sent before clock k - S has come.

Invariant: nothing is lost or counted twice: over replicas and messages the weights add up to their number,
and the sums to what all steps have moved. What is added is at most S clocks late. At the end of a round all
has come, and all replicas go on from the mean; optimizers stay apart.
A half may carry how fast its sender is, so that shares follow speed (`dealing`): every rank meets every other
in a turn of the pairs, and what was sent has come S clocks later.
Not as in the papers: both ranks of a pair send, pairs take turns as in a tournament, any optimizer moves x.
Source: Assran, Loizou, Ballas and Rabbat 2019, Stochastic Gradient Push, ICML, arXiv:1811.10792, Algorithm 2
(overlap SGP); the pairs of Lian et al. 2018, Asynchronous Decentralized Parallel SGD, arXiv:1710.06952.

Gossip between the ranks of any hosts: channels between all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.channel.channel_builders import connect_first_ranks
from paceline.comm.channel.message_channel import ChannelMessage, MessageChannel
from paceline.comm.group_collectives import all_reduce_coalesced
from paceline.comm.net import Net
from paceline.comm.tally import StepTally
from paceline.data.work import TrainingFeed
from paceline.errors import DeadlineError
from paceline.job.mesh import RankGroup
from paceline.observe.step_stats import PhaseTimer, StepStats
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
from paceline.sync.sync_rule import SyncRule, internal_rule_error
from paceline.sync.update import UpdateStep
from paceline.sync.work_assignment import (
    EvenAssignment,
    MessageSpeeds,
    SpeedAssignment,
    balances_by_speed,
    build_speed_assignment,
)


def peer_at_clock(rank: int, clock: int, size: int) -> int | None:
    """Whom a rank swaps with; every other in turn; None: of an odd number one rests. Pure.

    Source: the circle method of round-robin tournaments.
    """
    last = size + size % 2 - 1
    turn = clock % clocks_per_turn(size)
    if rank == last:
        other = turn * ((last + 1) // 2) % last
    else:
        other = (turn - rank) % last
        other = last if other == rank else other
    return other if other < size else None


def clocks_per_turn(size: int) -> int:
    """Clocks in which every rank meets every other, once. Pure."""
    return max(1, size + size % 2 - 1)


class PendingHalves:
    """Which halves are still to come to a rank; pure.

    Args:
        bound: S, the clocks that one may be late.
    """

    def __init__(self, rank: int, size: int, bound: int) -> None:
        self._rank, self._size, self._bound = rank, size, bound
        self._missing: set[int] = set()  # clocks
        self._reached = 0

    def begin(self, clock: int) -> None:
        """A round begins: nothing is under way."""
        self._missing, self._reached = set(), clock

    def reach(self, clock: int) -> None:
        """This rank is about to begin a clock: what was sent at those before it may come."""
        for one in range(self._reached, clock):
            if peer_at_clock(self._rank, one, self._size) is not None:
                self._missing.add(one)
        self._reached = clock

    def is_early(self, clock: int) -> bool:
        """Whether a half is of a clock that this rank has not made itself."""
        return clock >= self._reached

    def take(self, clock: int) -> int:
        """The half of a clock is added; returns how many clocks late.

        Raises:
            CommunicationError: it was added before.
        """
        if clock not in self._missing:
            raise internal_rule_error(f"rank {self._rank} was given its half of clock {clock} twice")
        self._missing.remove(clock)
        return self._reached - 1 - clock

    def is_due(self, late: int | None = None) -> bool:
        """Whether one has to come before this rank goes on.

        Args:
            late: how late one may be; None: as late as the bound says.
        """
        allowed = self._bound if late is None else late
        return any(clock < self._reached - allowed for clock in self._missing)


class PushSumState:
    """A sum of parameters and its weight.

    Args:
        params: what this rank computes with; set to sum / weight by `spend`.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = list(params)
        self.sums: list[Tensor] = []
        self.weight = 1.0
        self.fill()

    @torch.no_grad()
    def fill(self) -> None:
        """Begin with the parameters as they are."""
        self.sums, self.weight = [p.detach().clone() for p in self._params], 1.0

    @torch.no_grad()
    def spend(self) -> list[Tensor]:
        """Let the rank compute with the mean; returns it."""
        torch._foreach_copy_(self._params, torch._foreach_div(self.sums, self.weight))
        return [p.detach().clone() for p in self._params]

    @torch.no_grad()
    def move(self, before: Sequence[Tensor]) -> None:
        """Add what the parameters have moved since; where nothing is under way, these are the sum."""
        if self.weight == 1.0:
            torch._foreach_copy_(self.sums, self._params)
            return
        torch._foreach_add_(self.sums, torch._foreach_sub([p.detach() for p in self._params], list(before)))

    @torch.no_grad()
    def halve(self) -> None:
        """Keep a half; the other one is what is left, and has the same values."""
        torch._foreach_mul_(self.sums, 0.5)
        self.weight /= 2

    @torch.no_grad()
    def add(self, sums: Sequence[Tensor], weight: float) -> None:
        """Take somebody's half."""
        torch._foreach_add_(self.sums, [mine.to(x.device) for mine, x in zip(sums, self.sums, strict=True)])
        self.weight += weight


class GossipSGD:
    """The rule.

    Args:
        inner: the step of one replica.
        bound: S, at least 0: how many clocks late what others have sent may be.
        params: what this rank computes with.
        channel: to all other ranks.
        replicas: all ranks, each of which is one.
        stop_requested: see `EveryStep`.
        notices: travel with halves; None: shares stay.
        shares: which part of a batch this rank runs.
    Wire: a message of the parameters a step; at the end of a round a few bytes to every other rank, and an
        all_reduce of the parameters (16 MiB at a time) and of the tally.
    """

    def __init__(
        self,
        inner: EveryStep,
        bound: int,
        params: Sequence[Tensor],
        channel: MessageChannel,
        *,
        replicas: RankGroup,
        net: Net,
        phases: PhaseTimer,
        stop_requested: Callable[[], bool],
        notices: MessageSpeeds | None = None,
        shares: EvenAssignment | None = None,
    ) -> None:
        self.inner, self.push_sum, self._notices = inner, PushSumState(params), notices
        self.pending_halves = PendingHalves(replicas.rank, replicas.size, bound)
        self._loop = LocalRoundLoop(inner, replicas=replicas, net=net, phases=phases, shares=shares)
        self._channel, self._replicas, self._net, self._phases = channel, replicas, net, phases
        self._stop_requested = stop_requested
        self._ages, self._early = list[int](), dict[int, ChannelMessage]()
        self._come = dict[int, int]()  # how far ranks have come that are about to end the round

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        """See `Rule`: a round ends where the feed wants a pause, or a rank was asked to stop."""
        return self._loop.rounds(
            feed, runner, update_step, begin=self._begin, step=self._step, meet=self._meet
        )

    def abort(self) -> None:
        """See `Rule`."""
        self.inner.abort()

    def _begin(self, feed: TrainingFeed, step: int) -> int:
        self._ages.clear()
        self._come.clear()
        self.push_sum.fill()
        self.pending_halves.begin(step)
        return feed.next_pause(step)

    def _step(self, stretch: LocalRound, take: TakeStep) -> None:
        """One clock: what has come, a step, a half to the peer; and where the round ends, once it is due."""
        clock = stretch.step
        self._phases.begin("communication")
        may_begin = self._hear(stretch)
        if may_begin:
            before = self.push_sum.spend()
            take()
            self.push_sum.move(before)
        self._phases.begin("communication")
        if may_begin:
            self._give(clock)
        is_due = stretch.step == stretch.end or self._stop_requested() or self._end_was_requested(stretch)
        if is_due and not stretch.is_agreed:
            self._agree_on_end(stretch)

    def _end_was_requested(self, stretch: LocalRound) -> bool:
        """Whether a rank has said that it is asked to stop, and all have not agreed yet."""
        return not stretch.is_agreed and any(step < stretch.end for step in self._come.values())

    def _agree_on_end(self, stretch: LocalRound) -> None:
        """Say how far this rank has come, and hear it of all; they end where the farthest is."""
        me = self._replicas.ranks[self._replicas.rank]
        self._come[me] = stretch.step
        for rank in self._replicas.ranks:
            if rank != me:
                said = ChannelMessage("end", {"step": stretch.step})
                self._channel.send(rank, said, self._net.deadline_seconds)
        while len(self._come) < self._replicas.size:
            self._take_in(self._channel.receive(self._net.deadline_seconds))
        stretch.end_with(self._come.values())

    def _give(self, clock: int) -> None:
        other = peer_at_clock(self._replicas.rank, clock, self._replicas.size)
        if other is None:
            return
        self.push_sum.halve()
        fields: dict[str, Any] = {"clock": clock, "weight": self.push_sum.weight}
        if self._notices is not None:
            fields |= self._notices.message_fields()
        self._channel.send(
            self._replicas.ranks[other],
            ChannelMessage("half", fields, self.push_sum.sums),
            self._net.deadline_seconds,
        )

    def _hear(self, stretch: LocalRound, late: int | None = None) -> bool:
        """Take what is there, and wait for what may not be later; false: the round is about to end instead.

        Raises:
            CommunicationError: a peer is gone, or says nothing for the deadline.
        """
        self.pending_halves.reach(stretch.step)
        for made in sorted(self._early):
            if not self.pending_halves.is_early(made):
                self._add(self._early.pop(made))
        while self._replicas.size > 1:
            waits = self.pending_halves.is_due(late)
            if waits and self._end_was_requested(stretch):
                return False
            try:
                self._take_in(self._channel.receive(self._net.deadline_seconds if waits else 0.0))
            except DeadlineError:
                if waits:
                    raise
                break
        return True

    def _take_in(self, message: ChannelMessage) -> None:
        """A half; or a rank says how far it has come."""
        if message.kind == "end":
            self._come[message.sender] = int(message.fields["step"])
            return
        if self._notices is not None:
            self._notices.receive_fields(self._replicas.ranks.index(message.sender), message.fields)
        self._add(message)

    def _add(self, message: ChannelMessage) -> None:
        """Add a half; one of a clock that is not made here yet waits for it."""
        made = int(message.fields["clock"])
        if self.pending_halves.is_early(made):
            self._early[made] = message
            return
        self._ages.append(self.pending_halves.take(made))
        self.push_sum.add(message.tensors, message.fields["weight"])

    @torch.no_grad()
    def _meet(self, stretch: LocalRound, runner: ModelRunner) -> tuple[StepTally, Mapping[str, float]]:
        """All that is under way comes in, and all go on from the mean."""
        self._channel.flush(self._net.deadline_seconds)
        self._hear(stretch, late=0)
        tally, own = self._loop.agree(stretch, runner, ages=sum(self._ages), heard=len(self._ages))
        oldest = torch.tensor(
            [float(max(self._ages, default=0))], dtype=torch.float64, device=runner.sharded_model.device
        )
        latest = self._net.all_reduce(oldest, self._replicas, "max")
        all_reduce_coalesced(self.push_sum.sums, self._net, self._replicas)
        self.push_sum.weight = float(self._replicas.size)
        self.push_sum.spend()
        return tally, {
            "staleness": own["ages"] / max(1.0, own["heard"]),
            "staleness_max": float(latest.wait()),
        }


def build_gossip(context: SessionContext, layout: ModelLayout, state: TrainState) -> SyncRule:
    """Replicas give halves of what they have to each other, in pairs."""
    sharded_model, bound = layout.runner.sharded_model, context.recipe.strategy.sync_word.argument
    notices, shares = _build_speed_notices(context, bound) if balances_by_speed(context) else (None, None)
    channel = connect_first_ranks(context, context.mesh.world.size)
    context.close_callbacks.append(channel.close)
    return GossipSGD(
        build_replica_step(context, sharded_model, state),
        bound,
        [*sharded_model.computes.values()],
        channel,
        stop_requested=context.rule_inputs.stop_requested,
        notices=notices,
        shares=shares,
        replicas=meeting_ranks(context),
        net=context.net,
        phases=context.phases,
    )


def _build_speed_notices(context: SessionContext, bound: int) -> tuple[MessageSpeeds, SpeedAssignment]:
    """What travels with halves, and what deals by it; in a turn of the pairs a rank meets all others."""
    world = context.mesh.world
    notices, turn = MessageSpeeds(world.rank, world.size), clocks_per_turn(world.size)
    return notices, build_speed_assignment(context, notices, lag=turn - 1 + bound, min_window=turn)
