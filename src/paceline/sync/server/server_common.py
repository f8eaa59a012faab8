"""The parts that all servers and workers share: messages between servers, and an update as every server makes
it.

Rank 0 decides, in one order, and broadcasts what it does; each server applies the same updates to its own
parts. A push counts once all servers have it: the others report it to rank 0, which only then receives it. So
a worker that is lost half-way has pushed to all servers or to none.

Invariant: replies between servers are matched by their kind, one per server and exchange. A lost server ends
the job with an error that names it; only rank 0 decides that a worker is lost.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.comm.channel.message_channel import ChannelMessage, MessageChannel
from paceline.comm.net import Net
from paceline.comm.reduction.gradient_norm import joint_norm
from paceline.comm.reduction.gradients import Gradients
from paceline.comm.tally import StepTally
from paceline.errors import CommunicationError, DeadlineError
from paceline.observe.sinks import EventCallback
from paceline.observe.step_stats import PhaseTimer, StepStats
from paceline.parallel.model_runner import ModelRunner
from paceline.state.slot import ExtraState, TensorPiece, TensorSlot
from paceline.state.train_state import TrainState
from paceline.sync.server.gradient_push import PushFormat
from paceline.sync.server.parameter_transfer import (
    PRIMARY_RANK,
    ParameterTransfer,
    load_buffers,
    own_values,
)
from paceline.sync.server.server_policies import WorkLedger
from paceline.sync.sync_rule import internal_rule_error
from paceline.sync.update import UpdateResult, UpdateStep

_REPLY_KINDS = {"norm", "share"}


class ServerGroup:
    """The message channel of a server, with the traffic between servers taken out; see `MessageChannel`.

    With one server it changes nothing.

    Args:
        inner: the channel to all other ranks.
        others: ranks of the other servers.
        deadline_seconds: for every wait for another server.
        decides: this is rank 0.
    """

    def __init__(
        self, inner: MessageChannel, others: Sequence[int], deadline_seconds: float, *, decides: bool
    ) -> None:
        self._inner, self.others, self._decides = inner, tuple(others), decides
        self._deadline = deadline_seconds
        self._received: deque[ChannelMessage] = deque()
        self._replies: defaultdict[tuple[str, int], deque[ChannelMessage]] = defaultdict(deque)
        self._errors: deque[CommunicationError] = deque()  # lost workers, noticed while waiting for servers
        self._pushes: dict[int, ChannelMessage] = {}  # by number: pushes that not all servers have yet
        self._holders: defaultdict[int, set[int]] = defaultdict(set)
        self._last_seen: dict[int, float] = {}
        # A server can leave after its last message of a round: that is an error only in the next round.
        self._lost_server: CommunicationError | None = None
        self.last_activity, self.close = inner.last_activity, inner.close
        self.begin()

    def begin(self) -> None:
        """Start a round: nothing is in flight, and the other servers are alive."""
        self._pushes.clear()
        self._holders.clear()
        self._last_seen = dict.fromkeys(self.others, time.monotonic())

    def send(self, to: int, message: ChannelMessage, deadline_seconds: float) -> None:
        """Send a message; drop it if its rank is lost and is not needed for the moment."""
        try:
            self._inner.send(to, message, deadline_seconds)
        except CommunicationError:
            if self._needs(to):
                raise

    def _needs(self, rank: int) -> bool:
        """Return whether a rank whose loss was noticed is needed: a server in a round, or a worker not yet
        reported.
        """
        if rank in self.others:
            return rank in self._last_seen
        return self._decides and not any(error.peer == rank for error in self._errors)

    def rest(self) -> None:
        """End a round: from now on the other servers are busy with collectives and send no heartbeats."""
        self._last_seen = {}

    def exchange_heartbeats(self) -> None:
        """Check that the other servers are alive, and send each a heartbeat.

        Raises:
            CommunicationError: as `require_live_servers`.
        """
        self.require_live_servers()
        for rank in self._last_seen:
            self.send(rank, ChannelMessage("alive"), self._deadline)

    def broadcast(self, kind: str, fields: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        """Send the same message to all other servers."""
        for rank in self.others:
            self.send(rank, ChannelMessage(kind, fields, tensors), self._deadline)

    def receive(self, deadline_seconds: float) -> ChannelMessage:
        """Return the next message that is no reply; on rank 0 a push only after all servers have it."""
        expires = time.monotonic() + deadline_seconds
        # Replies and heartbeats are routed away here, so only messages for the rule end the wait.
        while not self._received:
            if self._lost_server:
                raise self._lost_server
            if self._errors:
                raise self._errors.popleft()
            self._receive_one(max(0.0, expires - time.monotonic()))
        return self._received.popleft()

    def gather_replies(self, kind: str) -> dict[int, ChannelMessage]:
        """Return one message of a kind from every other server, by rank.

        Raises:
            CommunicationError: a server is lost, or is silent until the deadline; names it.
        """
        expires = time.monotonic() + self._deadline
        while missing := [rank for rank in self.others if not self._replies[kind, rank]]:
            seconds_left = expires - time.monotonic()
            if seconds_left <= 0:
                raise _silent_server_error(missing[0], self._deadline)
            try:
                self._receive_one(seconds_left)
            except DeadlineError as error:
                raise _silent_server_error(missing[0], self._deadline) from error
        return {rank: self._replies[kind, rank].popleft() for rank in self.others}

    def flush(self, seconds: float = math.inf) -> bool:
        """Wait until everything was received. A lost server is reported by `receive`, when it is needed
        again.
        """
        try:
            return self._inner.flush(seconds)
        except CommunicationError as error:
            if error.peer not in self.others:
                raise
            self._lost_server = error
            return False

    def drop(self, rank: int) -> None:
        self._inner.drop(rank)
        # Messages of a lost rank that are already here must not reach the policy.
        self._received = deque(message for message in self._received if message.sender != rank)
        self._errors = deque(error for error in self._errors if error.peer != rank)
        self._forget_pushes(rank)

    def require_live_servers(self) -> None:
        """Check that each other server, which answers every heartbeat, has been heard from lately.

        Raises:
            CommunicationError: one has not; names it.
        """
        now = time.monotonic()
        for rank, seen in self._last_seen.items():
            # Heartbeats are half a deadline apart, so one may be late but not missing.
            if now - seen > 0.75 * self._deadline:
                raise _silent_server_error(rank, now - seen)

    def _receive_one(self, seconds: float) -> None:
        """Receive one message, or record that a peer is lost."""
        try:
            self._route(self._inner.receive(seconds))
        except CommunicationError as error:
            if error.peer is None:
                raise
            # It has sent its parts, so it may leave; this is an error only if it is needed again.
            if error.peer in self.others and self._replies["share", error.peer]:
                self._lost_server = error
            elif error.peer in self.others:
                raise CommunicationError(
                    f"server rank {error.peer} is lost: {error.what}", next_step=_LOST_SERVER_ADVICE
                ) from error
            elif self._decides:
                self._errors.append(error)

    def _route(self, message: ChannelMessage) -> None:
        kind, sender = message.kind, message.sender
        if sender in self._last_seen:
            self._last_seen[sender] = time.monotonic()
        if kind in _REPLY_KINDS:
            self._replies[kind, sender].append(message)
        elif kind == "have":
            self._holders[message.fields["number"]].add(sender)
            self._deliver_if_held(message.fields["number"])
        # Only rank 0 waits for the reports; the other servers store a push as it arrives.
        elif kind == "push" and self._decides:
            self._pushes[message.fields["number"]] = message
            self._deliver_if_held(message.fields["number"])
        # Rank 0 sends heartbeats and the others answer each of them; the answers end here.
        elif kind != "alive" or not self._decides:
            if kind == "ready":  # the worker has dropped its work, so a push in progress is incomplete
                self._forget_pushes(sender)
            self._received.append(message)

    def _deliver_if_held(self, number: int) -> None:
        # The reports of other servers can arrive before the push itself, so both orders end here.
        if number in self._pushes and len(self._holders[number]) == len(self.others):
            del self._holders[number]
            self._received.append(self._pushes.pop(number))

    def _forget_pushes(self, rank: int) -> None:
        self._pushes = {n: message for n, message in self._pushes.items() if message.sender != rank}


_LOST_SERVER_ADVICE = "its parts of the model are lost; resume from the newest checkpoint"


def _silent_server_error(rank: int, seconds: float) -> CommunicationError:
    return DeadlineError(
        f"server rank {rank} has sent nothing for {seconds:g} s",
        next_step="check what that rank is doing, or raise runtime.deadline_seconds",
    )


def require_same_updates(what: str, num_updates: int, others: Mapping[int, int]) -> None:
    """Check that all servers have applied the same updates.

    Args:
        what: the moment, for the message.
        num_updates: the number of updates on this server.
        others: the number of updates of other servers, by rank.
    Raises:
        CommunicationError: they differ; names a server.
    """
    for rank, other_updates in others.items():
        if other_updates != num_updates:
            raise internal_rule_error(
                f"at {what} server rank {rank} has made {other_updates} updates, another server {num_updates}"
            )


RoundEvents = Mapping[str, Mapping[str, Any]]
"""Records of events, by the name of the event."""


@dataclass(frozen=True)
class ServerConnections:
    """The channel, collectives and formats of a server or worker, which its constructor passes to its rule.

    Args:
        pushes: encodes, decodes and adds pushes.
        channel: on a worker to the servers; on a server to all other ranks.
        net: this rank's collectives.
        phases: measures the seconds of each phase.
        stop_requested: returns whether this rank was asked to stop.
        transfers: of a worker one per server, by server; of a server its own.
        note: receives events.
    """

    pushes: PushFormat
    channel: MessageChannel
    net: Net
    phases: PhaseTimer
    stop_requested: Callable[[], bool]
    transfers: Sequence[ParameterTransfer]
    note: EventCallback


class ServerParticipant(ExtraState):
    """The base of servers and workers: parameters and sums as messages, and the ledger as state.

    Args:
        connections: channel, collectives and formats of this rank.
    Attributes:
        left: the ranks that were not lost at the end of the last round; empty before the first.
    """

    def __init__(self, connections: ServerConnections) -> None:
        self.channel, self.net, self.phases = connections.channel, connections.net, connections.phases
        self.pushes, self.transfers = connections.pushes, connections.transfers
        self.stop_requested, self.note = connections.stop_requested, connections.note
        self.left: tuple[int, ...] = ()
        self.ledger = WorkLedger()

    def send(
        self, to: int, kind: str, fields: Mapping[str, Any], tensors: Sequence[Tensor], *, lasts: bool = False
    ) -> None:
        """Send one message in the background. `lasts`: its tensors do not change until it was sent."""
        self.channel.send(
            to, ChannelMessage(kind, fields, tensors, is_immutable=lasts), self.net.deadline_seconds
        )

    def receive(self, seconds: float | None = None) -> ChannelMessage:
        """Return one message that arrives within `seconds`, or within the deadline."""
        self.phases.begin("communication")
        return self.channel.receive(self.net.deadline_seconds if seconds is None else seconds)

    def adopt_round(self, fields: Mapping[str, Any], state: TrainState) -> StepStats:
        """Adopt the state that rank 0 sent at the end of a round. Return its record, with the times of this
        rank.
        """
        state.step, state.num_updates = fields["step"], fields["version"]
        state.scale.value, state.scale.clean_steps = fields["scale"]["value"], fields["scale"]["clean_steps"]
        self.ledger = WorkLedger.of(fields["ledger"])
        self.left = tuple(fields["left"])
        self.record_events(fields["news"])
        seconds, phase_seconds = self.phases.take()
        sent_bytes = self.net.ledger.total().sent_bytes
        stats = StepStats(**fields["stats"])
        return replace(stats, seconds=seconds, phases=phase_seconds, sent_bytes=sent_bytes)

    def record_events(self, events: RoundEvents) -> RoundEvents:
        """Record events that are the same on all ranks, and return them."""
        for name, record in events.items():
            self.note(name, record)
        return events

    def pieces(self) -> list[TensorPiece]:
        """Return the ledger as numbers: taken, applied, dropped, then pairs of staleness and count."""
        ages = [n for pair in sorted(self.ledger.staleness.items()) for n in pair]
        values = torch.tensor([self.ledger.taken, self.ledger.applied, self.ledger.dropped, *ages])
        return [TensorPiece(TensorSlot.whole("work", values), values)]

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `pieces` returned."""
        if "work" in tensors:
            taken, applied, dropped, *ages = (int(n) for n in tensors["work"])
            histogram = dict(zip(ages[::2], ages[1::2], strict=True))
            self.ledger = WorkLedger(taken, applied, dropped)
            self.ledger.staleness.update(histogram)


class ShardServer(ServerParticipant):
    """The base of all servers: it holds parts of the model and updates them.

    Args:
        rank: rank and number of this server.
        server_group: the other servers.
        connections: channel, collectives and formats of this rank.
    """

    def __init__(self, rank: int, server_group: ServerGroup, connections: ServerConnections) -> None:
        super().__init__(connections)
        self.rank, self.server_group = rank, server_group
        (self.transfer,) = self.transfers

    def parts(self, runner: ModelRunner) -> list[Tensor]:
        """Return the newest values of this server's parts."""
        return [*own_values(runner.sharded_model).values()]

    def update(
        self, messages: Sequence[ChannelMessage], runner: ModelRunner, update_step: UpdateStep
    ) -> tuple[StepTally, UpdateResult]:
        """Sum some pushes and make one update of them; collective over the servers."""
        self.phases.begin("optimizer")
        total, state = self.pushes.add(messages, runner), update_step.state
        flats = [g for g in total.grads.values() if g is not None]
        norms = self._norms(torch._foreach_norm(flats) if flats else [], state.num_updates)
        self.phases.begin("optimizer")
        # Only server 0 receives the changes of buffers; it sends them on with the end of the round.
        if total.tally.buffers.numel():
            runner.buffers.begin_step()
            runner.buffers.end_step(total.tally.buffers, total.tally.micro_batches)
        update = update_step.apply(Gradients(total.grads, flats, norms, total.scale), total.tally)
        return total.tally, update

    def end_round_of_servers(self, buffers: Sequence[Tensor], runner: ModelRunner) -> None:
        """Wait until all servers have ended the round, and load the buffers, which rank 0 sends.

        Args:
            buffers: on rank 0; empty on the others.
        """
        # Every server sends before it waits: if all first waited, none would send.
        self.server_group.broadcast("share", {}, buffers)
        self.phases.begin("communication")
        for rank, message in self.server_group.gather_replies("share").items():
            if rank == PRIMARY_RANK:
                load_buffers(message.tensors, runner)

    def flush(self, lose: Callable[[int, str], None], send_heartbeat: Callable[[], None]) -> None:
        """Wait until all live ranks have received everything, so that a collective can follow.

        Args:
            lose: called with the rank and the reason if a worker is lost.
            send_heartbeat: called twice per deadline while this waits.
        """
        is_flushed = False
        while not is_flushed:
            try:
                self.phases.begin("communication")
                # Half a deadline at a time, so that heartbeats reach the workers that already wait.
                is_flushed = self.channel.flush(self.net.deadline_seconds / 2)
                if not is_flushed:
                    send_heartbeat()
            except CommunicationError as error:
                if error.peer is None:
                    raise
                lose(error.peer, error.what)

    def _norms(self, own_norms: Sequence[Tensor], updates: int) -> Sequence[Tensor]:
        """Return norms that together give the norm of the whole sum, in the order of the servers on all of
        them.
        """
        if not self.server_group.others:
            return own_norms
        own_norm = joint_norm(own_norms)
        self.phases.begin("communication")
        self.server_group.broadcast("norm", {"norm": own_norm, "updates": updates})
        replies = {rank: message.fields for rank, message in self.server_group.gather_replies("norm").items()}
        require_same_updates(
            "an update", updates, {rank: fields["updates"] for rank, fields in replies.items()}
        )
        norms = {self.rank: own_norm} | {rank: fields["norm"] for rank, fields in replies.items()}
        # Every server adds the norms in the same order, so they all clip by the same number.
        return [torch.tensor(norms[rank], dtype=torch.float64) for rank in sorted(norms)]
