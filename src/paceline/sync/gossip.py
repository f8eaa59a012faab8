"""Gossip: replicas update independently and exchange halves of their parameters in pairs.

There is no server, no shared memory, and no rank waits for all others. A replica keeps a sum x of parameters
and a weight w (1 at the start), and computes with x / w. After its step of clock k it adds the change of that
step to x, halves x and w, and sends the other half to the peer of that clock. Halves that others sent at
earlier clocks are added when they have arrived; before clock k begins, all halves sent before clock k - S
have arrived.

A half can carry the speed of its sender, so that shares follow speed (`SpeedAssignment`): every rank meets
every other once in a turn of the pairs, and what was sent has arrived S clocks later.

Invariant: nothing is lost or counted twice: over all replicas and messages the weights add up to the number
of replicas, and the sums to the changes of all steps. A half is added at most S clocks late. At the end of a
round all halves have arrived, and all replicas continue from the mean; the optimizers stay different.
Not as in the papers: both ranks of a pair send, pairs take turns as in a tournament, and any optimizer moves
x.
Source: Assran, Loizou, Ballas and Rabbat 2019, Stochastic Gradient Push, ICML, arXiv:1811.10792, Algorithm 2
(push-sum and overlap SGP); the pairs of Lian et al. 2018, Asynchronous Decentralized Parallel SGD,
arXiv:1710.06952.
Refusals: `paceline.recipe.registry.sync_specs`.
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
    """Return the rank that a rank exchanges halves with at a clock; None: with an odd number one rests; pure.

    Source: the circle method of round-robin tournaments.
    """
    last = size + size % 2 - 1
    turn = clock % clocks_per_turn(size)
    # The last rank stays in place while the others turn around it; it meets the rank that would otherwise
    # meet itself.
    if rank == last:
        # Solve 2 * peer = turn modulo `last`: as `last` is odd, (last + 1) / 2 is the inverse of 2.
        peer = turn * ((last + 1) // 2) % last
    else:
        peer = (turn - rank) % last
        peer = last if peer == rank else peer
    return peer if peer < size else None


def clocks_per_turn(size: int) -> int:
    """Return the number of clocks in which every rank meets every other once; pure."""
    return max(1, size + size % 2 - 1)


class PendingHalves:
    """The halves of push-sum states that peers have sent and this rank has not received yet; pure.

    Args:
        rank, size: this rank, and the number of ranks.
        bound: S, how many clocks late a half can be.
    """

    def __init__(self, rank: int, size: int, bound: int) -> None:
        self._rank, self._size, self._bound = rank, size, bound
        self._missing: set[int] = set()  # clocks of halves that have not arrived
        self._reached = 0

    def begin(self, clock: int) -> None:
        """Start a round: nothing is in flight."""
        self._missing, self._reached = set(), clock

    def reach(self, clock: int) -> None:
        """Record that this rank is about to begin a clock, so halves of all clocks before it can arrive."""
        for earlier_clock in range(self._reached, clock):
            if peer_at_clock(self._rank, earlier_clock, self._size) is not None:
                self._missing.add(earlier_clock)
        self._reached = clock

    def is_early(self, clock: int) -> bool:
        """Return whether a half belongs to a clock that this rank has not finished itself."""
        return clock >= self._reached

    def take(self, clock: int) -> int:
        """Record that the half sent at a clock has arrived, and return how many clocks late it is.

        Raises:
            CommunicationError: it was added before.
        """
        if clock not in self._missing:
            raise internal_rule_error(f"rank {self._rank} received the half of clock {clock} twice")
        self._missing.remove(clock)
        return self._reached - 1 - clock

    def is_due(self, late: int | None = None) -> bool:
        """Return whether a half has to arrive before this rank continues.

        Args:
            late: how late a half can be; None: as late as the bound allows.
        """
        max_late = self._bound if late is None else late
        return any(clock < self._reached - max_late for clock in self._missing)


class PushSumState:
    """The sum of parameters of a rank, and its weight.

    Args:
        params: what this rank computes with; `load_mean` sets them to sum / weight.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = list(params)
        self.sums: list[Tensor] = []
        self.weight = 1.0
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Start with the parameters as they are, and weight 1."""
        self.sums, self.weight = [p.detach().clone() for p in self._params], 1.0

    @torch.no_grad()
    def load_mean(self) -> list[Tensor]:
        """Set the parameters to sum / weight, and return copies of them."""
        torch._foreach_copy_(self._params, torch._foreach_div(self.sums, self.weight))
        return [p.detach().clone() for p in self._params]

    @torch.no_grad()
    def add_movement(self, before: Sequence[Tensor]) -> None:
        """Add what the parameters have changed since `before` to the sum."""
        # Without messages the parameters are the sum, and copying them loses no bits.
        if self.weight == 1.0:
            torch._foreach_copy_(self.sums, self._params)
            return
        torch._foreach_add_(self.sums, torch._foreach_sub([p.detach() for p in self._params], list(before)))

    @torch.no_grad()
    def halve(self) -> None:
        """Halve sum and weight; the half that is sent to the peer has the same values."""
        torch._foreach_mul_(self.sums, 0.5)
        self.weight /= 2

    @torch.no_grad()
    def add(self, sums: Sequence[Tensor], weight: float) -> None:
        """Add the half that another rank has sent."""
        torch._foreach_add_(
            self.sums, [received.to(x.device) for received, x in zip(sums, self.sums, strict=True)]
        )
        self.weight += weight


class GossipSGD:
    """The rule of gossip.

    Args:
        inner: the step of one replica.
        bound: S, at least 0: how many clocks late a half can be.
        params: what this rank computes with.
        channel: to all other ranks.
        replicas: all ranks; each is one replica.
        net, phases: as for `LocalRoundLoop`.
        stop_requested: returns whether this rank was asked to stop.
        exchange: speeds that are sent with halves; None: shares stay.
        shares: assigns this rank its part of each batch.
    Wire: a message with the parameters per step; at the end of a round a few bytes to every other rank, and
        an all_reduce of the parameters (16 MiB at a time) and of the tally.
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
        exchange: MessageSpeeds | None = None,
        shares: EvenAssignment | None = None,
    ) -> None:
        self.inner, self.push_sum, self._exchange = inner, PushSumState(params), exchange
        self.pending_halves = PendingHalves(replicas.rank, replicas.size, bound)
        self._loop = LocalRoundLoop(inner, replicas=replicas, net=net, phases=phases, shares=shares)
        self._channel, self._replicas, self._net, self._phases = channel, replicas, net, phases
        self._stop_requested = stop_requested
        self._delays, self._early = list[int](), dict[int, ChannelMessage]()
        self._end_steps = dict[int, int]()  # next step of the ranks that want to end the round

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        return self._loop.rounds(
            feed, runner, update_step, begin=self._begin, step=self._step, meet=self._meet
        )

    def abort(self) -> None:
        self.inner.abort()

    def _begin(self, feed: TrainingFeed, step: int) -> int:
        self._delays.clear()
        self._end_steps.clear()
        self.push_sum.reset()
        self.pending_halves.begin(step)
        return feed.next_pause(step)

    def _step(self, local_round: LocalRound, take: TakeStep) -> None:
        """Run one clock: receive halves, take a step, send a half; agree on the end of the round once it is
        due.
        """
        clock = local_round.step
        self._phases.begin("communication")
        may_begin = self._receive_halves(local_round)
        if may_begin:
            # Every step computes with x / w: halves that arrived changed both.
            before = self.push_sum.load_mean()
            take()
            self.push_sum.add_movement(before)
        self._phases.begin("communication")
        if may_begin:
            self._send_half(clock)
        is_due = (
            local_round.step == local_round.end
            or self._stop_requested()
            or self._end_was_requested(local_round)
        )
        if is_due and not local_round.is_agreed:
            self._agree_on_end(local_round)

    def _end_was_requested(self, local_round: LocalRound) -> bool:
        """Return whether a rank wants to end the round before its end, and the ranks have not agreed yet."""
        return not local_round.is_agreed and any(step < local_round.end for step in self._end_steps.values())

    def _agree_on_end(self, local_round: LocalRound) -> None:
        """Exchange how far each rank has come; all of them end where the most advanced one is."""
        rank = self._replicas.ranks[self._replicas.rank]
        self._end_steps[rank] = local_round.step
        for peer in self._replicas.ranks:
            if peer != rank:
                message = ChannelMessage("end", {"step": local_round.step})
                self._channel.send(peer, message, self._net.deadline_seconds)
        # Halves can still arrive between the answers, and must be added as well.
        while len(self._end_steps) < self._replicas.size:
            self._handle(self._channel.receive(self._net.deadline_seconds))
        local_round.end_with(self._end_steps.values())

    def _send_half(self, clock: int) -> None:
        peer = peer_at_clock(self._replicas.rank, clock, self._replicas.size)
        if peer is None:
            return
        # Halving keeps the total over replicas and messages: what is sent is removed here.
        self.push_sum.halve()
        fields: dict[str, Any] = {"clock": clock, "weight": self.push_sum.weight}
        if self._exchange is not None:
            fields |= self._exchange.message_fields()
        self._channel.send(
            self._replicas.ranks[peer],
            # Not marked as immutable: the next step changes these sums, so the channel has to copy them.
            ChannelMessage("half", fields, self.push_sum.sums),
            self._net.deadline_seconds,
        )

    def _receive_halves(self, local_round: LocalRound, late: int | None = None) -> bool:
        """Add the halves that have arrived, and wait for those that are due. False: the round ends instead.

        Args:
            local_round: the round in progress.
            late: how late a half can be; None: as late as the bound allows.
        Raises:
            CommunicationError: a peer is gone, or sends nothing until the deadline.
        """
        self.pending_halves.reach(local_round.step)
        for clock in sorted(self._early):
            if not self.pending_halves.is_early(clock):
                self._add(self._early.pop(clock))
        while self._replicas.size > 1:
            waits = self.pending_halves.is_due(late)
            # Ranks that end the round send no further half, so waiting for one would never end.
            if waits and self._end_was_requested(local_round):
                return False
            try:
                self._handle(self._channel.receive(self._net.deadline_seconds if waits else 0.0))
            except DeadlineError:
                if waits:
                    raise
                break
        return True

    def _handle(self, message: ChannelMessage) -> None:
        """Handle a message: half of a peer's push-sum state, or a request to end the round."""
        if message.kind == "end":
            self._end_steps[message.sender] = int(message.fields["step"])
            return
        if self._exchange is not None:
            self._exchange.receive_fields(self._replicas.ranks.index(message.sender), message.fields)
        self._add(message)

    def _add(self, message: ChannelMessage) -> None:
        """Add a half, or keep it until this rank has finished the clock that it belongs to."""
        clock = int(message.fields["clock"])
        if self.pending_halves.is_early(clock):
            # A fast peer can be ahead. Its half counts once this rank has finished that clock, so no delay is
            # negative.
            self._early[clock] = message
            return
        self._delays.append(self.pending_halves.take(clock))
        self.push_sum.add(message.tensors, message.fields["weight"])

    @torch.no_grad()
    def _meet(self, local_round: LocalRound, runner: ModelRunner) -> tuple[StepTally, Mapping[str, float]]:
        """Receive everything in flight, then continue from the mean on all ranks."""
        # Each rank first hands over what it has sent, then waits for what the others have.
        self._channel.flush(self._net.deadline_seconds)
        self._receive_halves(local_round, late=0)
        tally, sums = self._loop.agree(
            local_round, runner, ages=sum(self._delays), num_halves=len(self._delays)
        )
        oldest = torch.tensor(
            [float(max(self._delays, default=0))], dtype=torch.float64, device=runner.sharded_model.device
        )
        max_delay = self._net.all_reduce(oldest, self._replicas, "max")
        all_reduce_coalesced(self.push_sum.sums, self._net, self._replicas)
        # Push-sum loses no weight: the weights add up to the number of replicas, so they are not summed.
        self.push_sum.weight = float(self._replicas.size)
        self.push_sum.load_mean()
        return tally, {
            "staleness": sums["ages"] / max(1.0, sums["num_halves"]),
            "staleness_max": float(max_delay.wait()),
        }


def build_gossip(context: SessionContext, layout: ModelLayout, state: TrainState) -> SyncRule:
    """Build the rule in which replicas exchange halves of their parameters in pairs."""
    sharded_model, bound = layout.runner.sharded_model, context.recipe.strategy.sync_word.argument
    exchange, shares = _build_exchange(context, bound) if balances_by_speed(context) else (None, None)
    # Any two ranks meet in a turn, so every rank connects to every other.
    channel = connect_first_ranks(context, context.mesh.world.size)
    context.close_callbacks.append(channel.close)
    return GossipSGD(
        build_replica_step(context, sharded_model, state),
        bound,
        [*sharded_model.computes.values()],
        channel,
        stop_requested=context.rule_inputs.stop_requested,
        exchange=exchange,
        shares=shares,
        replicas=meeting_ranks(context),
        net=context.net,
        phases=context.phases,
    )


def _build_exchange(context: SessionContext, bound: int) -> tuple[MessageSpeeds, SpeedAssignment]:
    """Build the exchange of speeds with halves, and the assignment that uses it.

    A rank meets all others in one turn of the pairs, which is the least window and part of the lag.
    """
    world = context.mesh.world
    exchange, turn = MessageSpeeds(world.rank, world.size), clocks_per_turn(world.size)
    return exchange, build_speed_assignment(context, exchange, lag=turn - 1 + bound, min_window=turn)
