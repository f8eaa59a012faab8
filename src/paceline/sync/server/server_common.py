"""Several servers of one job: what they say to each other, apart from what workers say.

Rank 0 decides, in one order, and tells the others; each applies the same updates to its own parts. A push
counts once all servers have it: the others tell rank 0, which hears it then. So a worker that is lost
half-way has pushed to all of them or to none.

Invariant: what a server answers is matched by its kind, one for each server and exchange. A server that is
lost ends the job, by its name; whether a worker is lost is for rank 0 to say.

What servers and their workers share: the channel, the ledger, and an update as all servers make it.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
    ParameterTransfer,
    load_buffers,
    load_server_values,
    server_values,
)
from paceline.sync.server.server_policies import WorkLedger
from paceline.sync.sync_rule import internal_rule_error
from paceline.sync.update import UpdateResult, UpdateStep

_REPLY_KINDS = {"norm", "share"}


class ServerGroup:
    """The channel of a server, as its rule hears it; see `MessageChannel`. Alone it changes nothing.

    Args:
        others: ranks of the other servers.
        decides: whether this is rank 0.
        deadline_seconds: of every wait for another server.
    """

    def __init__(
        self, inner: MessageChannel, others: Sequence[int], deadline_seconds: float, *, decides: bool
    ) -> None:
        self._inner, self.others, self._decides = inner, tuple(others), decides
        self._deadline = deadline_seconds
        self._heard: deque[ChannelMessage] = deque()
        self._answers: defaultdict[tuple[str, int], deque[ChannelMessage]] = defaultdict(deque)
        self._errors: deque[CommunicationError] = deque()  # of workers, while servers were waited for
        self._pushes: dict[int, ChannelMessage] = {}  # by number, those that not all servers have
        self._have: defaultdict[int, set[int]] = defaultdict(set)
        self._last_seen: dict[int, float] = {}
        self._gone: CommunicationError | None = None  # a server that has said all of a round before it left
        self.last_activity, self.close = inner.last_activity, inner.close
        self.begin()

    def begin(self) -> None:
        """A round begins: nothing is under way, and the others are alive."""
        self._pushes.clear()
        self._have.clear()
        self._last_seen = dict.fromkeys(self.others, time.monotonic())

    def send(self, to: int, message: ChannelMessage, deadline_seconds: float) -> None:
        """See `MessageChannel`; what is for one that is lost, and is not needed now, goes nowhere."""
        try:
            self._inner.send(to, message, deadline_seconds)
        except CommunicationError:
            if self._needs(to):
                raise

    def _needs(self, rank: int) -> bool:
        """Whether this server cannot go on without a rank of which it has heard that it is lost."""
        if rank in self.others:
            return rank in self._last_seen
        return self._decides and not any(error.peer == rank for error in self._errors)

    def rest(self) -> None:
        """A round ends: from now on others have something else to do than to answer."""
        self._last_seen = {}

    def exchange_heartbeats(self) -> None:
        """See that the other servers live, and let them know that this one does.

        Raises:
            CommunicationError: see `require_live_servers`.
        """
        self.require_live_servers()
        for rank in self._last_seen:
            self.send(rank, ChannelMessage("alive"), self._deadline)

    def tell(self, kind: str, fields: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        """The same message to all other servers."""
        for rank in self.others:
            self.send(rank, ChannelMessage(kind, fields, tensors), self._deadline)

    def receive(self, deadline_seconds: float) -> ChannelMessage:
        """See `MessageChannel`: what is no answer; on rank 0 a push only once all servers have it."""
        expires = time.monotonic() + deadline_seconds
        while not self._heard:
            if self._gone:
                raise self._gone
            if self._errors:
                raise self._errors.popleft()
            self._listen(max(0.0, expires - time.monotonic()))
        return self._heard.popleft()

    def answers(self, kind: str) -> dict[int, ChannelMessage]:
        """One message of a kind from every other server, by rank.

        Raises:
            CommunicationError: a server is lost, or says nothing for the deadline; names it.
        """
        expires = time.monotonic() + self._deadline
        while missing := [rank for rank in self.others if not self._answers[kind, rank]]:
            left = expires - time.monotonic()
            if left <= 0:
                raise _silent_server_error(missing[0], self._deadline)
            try:
                self._listen(left)
            except DeadlineError as error:
                raise _silent_server_error(missing[0], self._deadline) from error
        return {rank: self._answers[kind, rank].popleft() for rank in self.others}

    def flush(self, seconds: float = math.inf) -> bool:
        """See `MessageChannel`; that a server is lost is told by `receive`, when it is needed again."""
        try:
            return self._inner.flush(seconds)
        except CommunicationError as error:
            if error.peer not in self.others:
                raise
            self._gone = error
            return False

    def drop(self, rank: int) -> None:
        """See `MessageChannel`."""
        self._inner.drop(rank)
        self._heard = deque(message for message in self._heard if message.sender != rank)
        self._errors = deque(error for error in self._errors if error.peer != rank)
        self._forget_pushes(rank)

    def require_live_servers(self) -> None:
        """See that the other servers, who answer every sign of life with one, have given one lately.

        Raises:
            CommunicationError: one has not; names it.
        """
        now = time.monotonic()
        for rank, seen in self._last_seen.items():
            if now - seen > 0.75 * self._deadline:
                raise _silent_server_error(rank, now - seen)

    def _listen(self, seconds: float) -> None:
        """Hear one message, or that a peer is lost."""
        try:
            self._sort(self._inner.receive(seconds))
        except CommunicationError as error:
            if error.peer is None:
                raise
            if error.peer in self.others and self._answers["share", error.peer]:
                self._gone = error
            elif error.peer in self.others:
                raise CommunicationError(
                    f"the server of rank {error.peer} is lost: {error.what}", next_step=_LOST_SERVER_ADVICE
                ) from error
            elif self._decides:
                self._errors.append(error)

    def _sort(self, message: ChannelMessage) -> None:
        kind, sender = message.kind, message.sender
        if sender in self._last_seen:
            self._last_seen[sender] = time.monotonic()
        if kind in _REPLY_KINDS:
            self._answers[kind, sender].append(message)
        elif kind == "have":
            self._have[message.fields["number"]].add(sender)
            self._complete(message.fields["number"])
        elif kind == "push" and self._decides:
            self._pushes[message.fields["number"]] = message
            self._complete(message.fields["number"])
        elif kind != "alive" or not self._decides:
            if kind == "ready":  # it has lost what it was doing, and its push with that
                self._forget_pushes(sender)
            self._heard.append(message)

    def _complete(self, number: int) -> None:
        if number in self._pushes and len(self._have[number]) == len(self.others):
            del self._have[number]
            self._heard.append(self._pushes.pop(number))

    def _forget_pushes(self, rank: int) -> None:
        self._pushes = {n: message for n, message in self._pushes.items() if message.sender != rank}


_LOST_SERVER_ADVICE = "its parts of the model are gone with it: resume from the newest checkpoint"


def _silent_server_error(rank: int, seconds: float) -> CommunicationError:
    return DeadlineError(
        f"the server of rank {rank} has given no sign for {seconds:g} s",
        next_step="look at what that rank does, or raise runtime.deadline_seconds",
    )


def require_same_updates(what: str, mine: int, theirs: Mapping[int, int]) -> None:
    """See that all servers have applied the same updates.

    Raises:
        CommunicationError: one has not; names it.
    """
    for rank, number in theirs.items():
        if number != mine:
            raise internal_rule_error(
                f"at {what} the server of rank {rank} has made {number} updates, and another {mine}"
            )


RoundEvents = Mapping[str, Mapping[str, Any]]
"""What has happened, by the name of the event."""


class ServerParticipant(ExtraState):
    """What servers and workers share: the channel, and parameters and sums as messages.

    Args:
        pushes: makes, reads and adds what workers push.
        traffics: of a worker, by server; a server has its own alone.
        note: is told of what happens beside the steps.
    Attributes:
        left: the ranks that were not lost, as of the last pause; empty before it.
    """

    def __init__(
        self,
        pushes: PushFormat,
        channel: MessageChannel,
        net: Net,
        phases: PhaseTimer,
        stop_requested: Callable[[], bool],
        traffics: Sequence[ParameterTransfer],
        note: EventCallback,
    ) -> None:
        self.channel, self.net, self.phases, self.traffics = channel, net, phases, traffics
        self.pushes, self.stop_requested, self.note = pushes, stop_requested, note
        self.left: tuple[int, ...] = ()
        self.ledger = WorkLedger()

    def send(
        self, to: int, kind: str, fields: Mapping[str, Any], tensors: Sequence[Tensor], *, lasts: bool = False
    ) -> None:
        """One message; it goes out while this rank receives. `lasts`: nobody changes its tensors any more."""
        self.channel.send(
            to, ChannelMessage(kind, fields, tensors, is_immutable=lasts), self.net.deadline_seconds
        )

    def receive(self, seconds: float | None = None) -> ChannelMessage:
        """One message, within so many seconds; None: within the deadline."""
        self.phases.begin("communication")
        return self.channel.receive(self.net.deadline_seconds if seconds is None else seconds)

    def adopt_round(self, fields: Mapping[str, Any], state: TrainState) -> StepStats:
        """What rank 0 says at the end of a round holds here too; returns its record, with own times."""
        state.step, state.updates = fields["step"], fields["version"]
        state.scale.value, state.scale.clean_steps = fields["scale"]["value"], fields["scale"]["clean_steps"]
        self.ledger = WorkLedger.of(fields["ledger"])
        self.left = tuple(fields["left"])
        self.tell(fields["news"])
        seconds, spent = self.phases.take()
        sent = self.net.ledger.total().sent_bytes
        return replace(StepStats(**fields["stats"]), seconds=seconds, phases=spent, sent_bytes=sent)

    def tell(self, news: RoundEvents) -> RoundEvents:
        """Note what has happened, which is the same on all ranks; returns it."""
        for name, record in news.items():
            self.note(name, record)
        return news

    def pieces(self) -> list[TensorPiece]:
        """The ledger, as numbers: taken, applied, dropped, then pairs of age and count."""
        ages = [n for pair in sorted(self.ledger.staleness.items()) for n in pair]
        values = torch.tensor([self.ledger.taken, self.ledger.applied, self.ledger.dropped, *ages])
        return [TensorPiece(TensorSlot.whole("work", values), values)]

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `pieces`."""
        if "work" in tensors:
            taken, applied, dropped, *ages = (int(n) for n in tensors["work"])
            histogram = dict(zip(ages[::2], ages[1::2], strict=True))
            self.ledger = WorkLedger(taken, applied, dropped)
            self.ledger.staleness.update(histogram)


class ShardServer(ServerParticipant):
    """A server, the one that decides or another: it holds parts of the model, and updates them.

    Args:
        rank: of this server, which is its number too.
        circle: the other servers.
    """

    def __init__(self, rank: int, circle: ServerGroup, *shared: Any) -> None:
        super().__init__(*shared)
        self.rank, self.circle = rank, circle
        (self.traffic,) = self.traffics

    def parts(self, runner: ModelRunner) -> list[Tensor]:
        """The newest values of what this server holds."""
        return [*server_values(runner.sharded_model, self.rank).values()]

    def update(
        self, messages: Sequence[ChannelMessage], runner: ModelRunner, update_step: UpdateStep
    ) -> tuple[StepTally, UpdateResult]:
        """Sum the contributions, and make one update of them; collective over the servers."""
        self.phases.begin("optimizer")
        added, state = self.pushes.add(messages, runner), update_step.state
        flats = [g for g in added.grads.values() if g is not None]
        norms = self._norms(torch._foreach_norm(flats) if flats else [], state.updates)
        self.phases.begin("optimizer")
        if added.tally.buffers.numel():
            runner.buffers.begin_step()
            runner.buffers.end_step(added.tally.buffers, added.tally.micro_batches)
        update = update_step.apply(Gradients(added.grads, flats, norms, added.scale), added.tally)
        return added.tally, update

    def load_other_parts(self, runner: ModelRunner) -> None:
        """Take the parts of the other servers."""
        self.phases.begin("communication")
        for rank, message in self.circle.answers("share").items():
            tensors = message.tensors if rank else load_buffers(message.tensors, runner)
            load_server_values(tensors, server_values(runner.sharded_model, rank))

    def flush(self, lose: Callable[[int, str], None], send_heartbeat: Callable[[], None]) -> None:
        """Wait until all ranks that are left have received everything: a collective may follow.

        Args:
            lose: is told of a worker that is lost.
            send_heartbeat: is called now and then.
        """
        taken = False
        while not taken:
            try:
                self.phases.begin("communication")
                taken = self.channel.flush(self.net.deadline_seconds / 2)
                if not taken:
                    send_heartbeat()
            except CommunicationError as error:
                if error.peer is None:
                    raise
                lose(error.peer, error.what)

    def _norms(self, own: Sequence[Tensor], updates: int) -> Sequence[Tensor]:
        """Norms that together are that of the whole sum: of all servers, in one order on all of them."""
        if not self.circle.others:
            return own
        mine = joint_norm(own)
        self.phases.begin("communication")
        self.circle.tell("norm", {"norm": mine, "updates": updates})
        said = {rank: message.fields for rank, message in self.circle.answers("norm").items()}
        require_same_updates("an update", updates, {rank: fields["updates"] for rank, fields in said.items()})
        norms = {self.rank: mine} | {rank: fields["norm"] for rank, fields in said.items()}
        return [torch.tensor(norms[rank], dtype=torch.float64) for rank in sorted(norms)]
