"""The workers of a server: which remain, what each works on, and whose answer is due.

Pure: the clock is an argument. Invariant: a worker has one ticket at most, and is idle, awaited or lost.

A server and its workers: gradients come over channels, one update follows another, nobody waits for all.

Rank 0 is the server: it holds the state, hands out tickets with its newest parameters, and applies what comes
back as its policy says. The others compute. A round is a stretch of steps; at its end the server waits for
the work that is under way, and gives its parameters to all. With several servers it holds some parts, and
tells the others, which hold the rest (`holder`), everything that it does with its own, in that order.

A worker that is gone, or that gives no sign for the deadline, is lost: what it worked on is handed out again,
and the others go on, as long as they are enough. It does not come back. At the end of a round all hear who is
left, and what is collective between two rounds (evaluation, records, saves) is among those; where one is lost
there, it is done again without it (`training.agreed`).

Invariant: every push carries the version that it read; the update step divides by the items of those that
contributed. Between two rounds all ranks that are left hold the server's parameters and buffers.

A further server: it holds parts of the model, and does with them what rank 0 does with its own.

It deals no work and decides nothing. Workers push to it and are given its parts; which pushes make an update,
and which worker is given what, it hears from rank 0, in one order. Invariant: after as many updates its parts
are those that one server alone would hold.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from paceline.comm.channel.message_channel import ChannelMessage
from paceline.comm.tally import StepTally
from paceline.data.work import TrainingFeed
from paceline.errors import CommunicationError, DeadlineError
from paceline.observe.step_stats import StepStats
from paceline.parallel.model_runner import ModelRunner
from paceline.state.train_state import TrainState
from paceline.sync.local_rounds import sum_tallies
from paceline.sync.server.parameter_transfer import PRIMARY_RANK
from paceline.sync.server.server_common import RoundEvents, ShardServer, require_same_updates
from paceline.sync.server.server_policies import ServerPolicy, WorkerPush, WorkLedger, WorkTicket
from paceline.sync.sync_rule import internal_rule_error, step_stats
from paceline.sync.update import UpdateResult, UpdateStep


class WorkerTable:
    """The workers by rank; worker k of the policy is the k-th of them, also when others are lost."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._tickets: dict[int, tuple[WorkTicket, int]] = {}
        self._awaited = dict.fromkeys(ranks, 0.0)  # since when
        self._idle: set[int] = set()
        self._recalled: set[int] = set()
        self.lost: dict[int, str] = {}

    @property
    def left(self) -> list[int]:
        """Those that are not lost."""
        return [rank for rank in self._ranks if rank not in self.lost]

    @property
    def idle(self) -> list[int]:
        """Those that wait for work."""
        return sorted(self._idle)

    @property
    def all_idle(self) -> bool:
        """Whether all that are left are idle."""
        return not self._awaited

    def number(self, rank: int) -> int:
        """Which worker this is for the policy."""
        return self._ranks.index(rank)

    def begin(self, now: float) -> None:
        """A round begins: all that are left are to say that they are ready."""
        self._idle.clear()
        self._awaited = dict.fromkeys(self.left, now)

    def give(self, rank: int, ticket: WorkTicket, version: int, now: float) -> None:
        """An idle worker gets work, and the parameters after `version` updates."""
        self._idle.remove(rank)
        self._tickets[rank] = ticket, version
        self._recalled.discard(rank)
        self._awaited[rank] = now

    def answered(self, rank: int) -> tuple[WorkTicket, int] | None:
        """A worker has said something, and is idle. Returns what it worked on, and the version it read."""
        self._idle.add(rank)
        self._awaited.pop(rank, None)
        return self._tickets.pop(rank, None)

    def recall(self, is_late: Callable[[WorkTicket], bool]) -> list[int]:
        """Those who work on what comes too late, and do not know it yet."""
        working = {rank: ticket for rank, (ticket, _) in self._tickets.items()}
        late = [rank for rank, ticket in working.items() if is_late(ticket) and rank not in self._recalled]
        self._recalled.update(late)
        return late

    def lose(self, rank: int, why: str) -> WorkTicket | None:
        """Mark a worker as lost. Returns the ticket that it worked on."""
        self.lost[rank] = why
        self._idle.discard(rank)
        self._awaited.pop(rank, None)
        ticket, _ = self._tickets.pop(rank, (None, 0))
        return ticket

    def require(self, num_needed: int) -> None:
        """See that enough are left.

        Raises:
            CommunicationError: too few; names those that are lost.
        """
        left, lost = len(self.left), len(self.lost)
        if left >= num_needed:
            return
        why = "; ".join(self.lost[rank] for rank in sorted(self.lost))
        raise CommunicationError(
            f"too few workers: a step needs {num_needed}, {left} are left and {lost} are lost: {why}",
            next_step="look at what these ranks printed, then resume from the newest checkpoint",
        )

    def due(self, last_activity: Callable[[int], float], deadline_seconds: float) -> dict[int, float]:
        """The deadline of each worker that has to answer.

        Args:
            last_activity: when a rank last took or sent a byte.
        """
        return {
            rank: max(since, last_activity(rank)) + deadline_seconds for rank, since in self._awaited.items()
        }


class PrimaryServer(ShardServer):
    """Rank 0's rule.

    Args:
        policy: hands out work and decides what makes an update.
        workers: their ranks; worker k runs as part k of as many.
        news: what all ranks are to be told at the end of a round, by the name of the event.
        shared: see `ShardServer`; every worker that is lost, and after a round the work and its order, is noted.
    """

    def __init__(
        self,
        policy: ServerPolicy,
        workers: tuple[int, ...],
        news: Callable[[], RoundEvents],
        *shared: Any,
    ) -> None:
        super().__init__(PRIMARY_RANK, *shared)
        self._policy, self._news = policy, news
        self.crew = WorkerTable(workers)
        self._next_beat = math.inf
        self._taken: list[StepTally] = []
        self._heard: list[int] = []
        self._number = 0  # of the last ticket
        self._given: dict[int, int] = {}  # by worker
        self._dropped: set[int] = set()  # whose last push was left out, and who do not know it yet

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        """See `Rule`: a round ends where the feed wants a pause, or a rank was asked to stop."""
        state = update_step.state
        while state.step < feed.num_steps:
            self.phases.take()
            first = state.step
            self._policy.begin(first, feed.next_pause(first))
            self.crew.begin(time.monotonic())
            self.circle.begin()
            self._send_heartbeats(())
            self._taken, update = [], UpdateResult(0.0, 0.0, applied=False)
            ages = WorkLedger()
            while not self._over(runner, state):
                message = self._hear()
                if message is not None:
                    update = self._take_in(message, runner, update_step, ages) or update
            tally = sum_tallies(self._taken)
            stats = step_stats(
                range(first, state.step), feed.work, state, tally, update, self.phases, self.net
            )
            yield self._pause(stats, ages, runner, state)

    def abort(self) -> None:
        """Nothing is half done here: a worker that lost its work asks for it again."""

    def _over(self, runner: ModelRunner, state: TrainState) -> bool:
        """Give idle workers what there is; whether all are idle and nothing is left.

        Raises:
            CommunicationError: too few workers are left; names those that are lost. Or no worker has
                anything to do, and steps are not complete.
        """
        self.crew.require(self._policy.num_needed)
        if self.stop_requested():
            self._policy.stop()
        for rank in self.crew.idle:
            ticket = self._policy.ticket(self.crew.number(rank))
            if ticket is not None:
                self._send_ticket(rank, ticket, runner, state)
        if self.crew.all_idle and not self._policy.is_complete:
            raise internal_rule_error(f"all workers are idle, and step {self._policy.step} is not complete")
        return self.crew.all_idle

    def _hear(self) -> ChannelMessage | None:
        """What a worker says next; None: nothing in time, or one was lost instead."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._send_heartbeats(self.crew.idle)
        due = self.crew.due(self.channel.last_activity, self.net.deadline_seconds)
        try:
            message = self.receive(max(0.0, min(self._next_beat, *due.values()) - now))
        except CommunicationError as error:
            if error.peer is not None:
                self._lose(error.peer, error.what)
            elif isinstance(error, DeadlineError):
                self._drop_silent_workers()
            else:
                raise
            return None
        self._heard.append(message.sender)
        return message

    def _send_heartbeats(self, ranks: Sequence[int]) -> None:
        """Send a heartbeat, so that workers do not time out while the server waits for others."""
        for rank in ranks:
            self.send(rank, "wait", {}, [])
        self.circle.exchange_heartbeats()
        self._next_beat = time.monotonic() + self.net.deadline_seconds / 2

    def _drop_silent_workers(self) -> None:
        """Nothing has arrived in time: those that are late are lost."""
        deadline, now = self.net.deadline_seconds, time.monotonic()
        for rank, by in self.crew.due(self.channel.last_activity, deadline).items():
            if by <= now:
                self._lose(rank, f"rank {rank} has given no sign for {deadline:g} s")

    def _lose(self, rank: int, why: str) -> None:
        """Go on without a worker: what it worked on is to be done by others."""
        self.circle.require_live_servers()  # a worker that waits for a server is not to blame
        ticket = self.crew.lose(rank, why)
        self.traffic.forget(rank)
        self.channel.drop(rank)
        self.circle.tell("lose", {"rank": rank})
        self.ledger.taken -= ticket is not None
        self._policy.lose(self.crew.number(rank), ticket)
        lost = {"rank": rank, "reason": why, "workers_left": len(self.crew.left)}
        self.note("lost", {"step": self._policy.step, **lost})

    def _send_ticket(self, rank: int, ticket: WorkTicket, runner: ModelRunner, state: TrainState) -> None:
        self.crew.give(rank, ticket, state.updates, time.monotonic())
        self.ledger.taken += 1
        self._number = self._given[rank] = self._number + 1
        fields = {**asdict(ticket), "number": self._number, "version": state.updates, "to": rank}
        self.circle.tell("ticket", fields)
        fields |= {"scale": state.scale.value, "dropped": self._take_dropped_flag(rank)}
        tensors = runner.buffers.values()
        tensors += self.traffic.ticket(rank, self.parts(runner), state.updates)
        self.send(rank, "ticket", fields, tensors, lasts=self.traffic.lasts)

    def _take_dropped_flag(self, rank: int) -> bool:
        """Whether the last push of a worker was left out; it is told once."""
        dropped = rank in self._dropped
        self._dropped.discard(rank)
        return dropped

    def _take_in(
        self, message: ChannelMessage, runner: ModelRunner, update_step: UpdateStep, ages: WorkLedger
    ) -> UpdateResult | None:
        given = self.crew.answered(message.sender)
        if message.fields.get("forgot"):
            self.traffic.forget(message.sender)
            self.circle.tell("forget", {"rank": message.sender})
        if message.fields.get("stops"):
            self._policy.stop()
        if given is None:
            return None
        (ticket, version), worker = given, self.crew.number(message.sender)
        number = {"number": self._given[message.sender]}
        if message.kind == "ready":  # it lost what it was doing, or has left it
            self.ledger.count_returned(late="recalled" in message.fields)
            self.circle.tell("drop", number)
            self._policy.give_back(worker, ticket)
            return None
        pushes = self._policy.push(worker, WorkerPush(ticket, version, message))
        if pushes is None:
            self.ledger.dropped += 1
            self.circle.tell("drop", number)
            self._dropped.add(message.sender)
        return self._apply(pushes, runner, update_step, ages) if pushes else None

    def _apply(
        self, pushes: Any, runner: ModelRunner, update_step: UpdateStep, ages: WorkLedger
    ) -> UpdateResult:
        """Sum the contributions, and make one update of them."""
        state = update_step.state
        for push in pushes:
            for ledger in (self.ledger, ages):
                ledger.applied += 1
                ledger.staleness[state.updates - push.version] += 1
        messages = [push.message for push in pushes]
        numbers = [message.fields["number"] for message in messages]
        self.circle.tell("apply", {"numbers": numbers, "step": self._policy.step})
        tally, update = self.update(messages, runner, update_step)
        state.step = self._policy.step
        self._taken.append(tally)
        for rank in self.crew.recall(self._policy.is_late):
            self.send(rank, "recall", {"number": self._given[rank]}, [])
        return update

    def _record_round(self, step: int) -> None:
        """Note what was done and who was heard."""
        self.ledger.require_balance()
        self.note("work", {"step": step, **self.ledger.record()})
        self.note("arrivals", {"step": step, "senders": self._heard})
        self._heard = []

    def _pause(self, stats: StepStats, ages: WorkLedger, runner: ModelRunner, state: TrainState) -> StepStats:
        """Give all workers the newest parameters and the same record, and see that they have taken them."""
        self._record_round(state.step)
        metrics, stops = {**stats.metrics, **ages.metrics()}, int(stats.stops) + int(self.stop_requested())
        stats = replace(stats, metrics=metrics, stops=stops)
        self.left = (PRIMARY_RANK, *self.circle.others, *self.crew.left)
        fields = {
            "stats": asdict(stats),
            "ledger": self.ledger.record(),
            "step": state.step,
            "number": self._number,
            "version": state.updates,
            "scale": asdict(state.scale),
            "left": self.left,
            "news": self.tell(self._news()),
        }
        self.traffic.forget()
        tensors = [*runner.buffers.values(), *self.parts(runner)]
        self.circle.tell("end", fields)
        self.circle.tell("share", {}, tensors)
        for rank in self.crew.left:
            self.send(rank, "pause", {**fields, "dropped": self._take_dropped_flag(rank)}, tensors)
        self.load_other_parts(runner)
        self.circle.rest()
        self.flush(self._lose, lambda: self._send_heartbeats(self.crew.left))
        return stats


class SecondaryServer(ShardServer):
    """The rule of a server other than rank 0."""

    def __init__(self, *shared: Any) -> None:
        super().__init__(*shared)
        self._pushed: dict[int, ChannelMessage] = {}  # by number

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        """See `Rule`."""
        state = update_step.state
        does: Mapping[str, Callable[[ChannelMessage], None]] = {
            "push": self._keep,
            "ticket": lambda message: self._send_ticket(message.fields, runner, state),
            "apply": lambda message: self._apply(message.fields, runner, update_step),
            "drop": lambda message: self._drop(message.fields["number"]),
            "forget": lambda message: self.traffic.forget(message.fields["rank"]),
            "lose": lambda message: self._lose(message.fields["rank"]),
            "alive": lambda message: self.send(PRIMARY_RANK, "alive", {}, []),
        }
        while state.step < feed.num_steps:
            self.phases.take()
            self.circle.begin()
            while (message := self.receive()).kind != "end":
                does[message.kind](message)
            yield self._pause(message.fields, runner, state)

    def abort(self) -> None:
        """Nothing is half done here that rank 0 would not say again."""

    def _keep(self, message: ChannelMessage) -> None:
        """A worker has pushed: rank 0 may count on it."""
        self._pushed[message.fields["number"]] = message
        self.send(PRIMARY_RANK, "have", {"number": message.fields["number"]}, [])

    def _send_ticket(self, fields: Mapping[str, Any], runner: ModelRunner, state: TrainState) -> None:
        require_same_updates("a ticket", state.updates, {PRIMARY_RANK: fields["version"]})
        tensors = self.traffic.ticket(fields["to"], self.parts(runner), state.updates)
        self.send(fields["to"], "ticket", fields, tensors, lasts=self.traffic.lasts)

    def _apply(self, fields: Mapping[str, Any], runner: ModelRunner, update_step: UpdateStep) -> None:
        missing = [number for number in fields["numbers"] if number not in self._pushed]
        if missing:
            raise internal_rule_error(
                f"an update is to be made of pushes of which this server has not {missing[0]}"
            )
        messages = [self._pushed.pop(number) for number in fields["numbers"]]
        self.update(messages, runner, update_step)
        update_step.state.step = fields["step"]

    def _drop(self, number: int) -> None:
        self._pushed.pop(number, None)

    def _lose(self, rank: int) -> None:
        self._pushed = {n: message for n, message in self._pushed.items() if message.sender != rank}
        self.traffic.forget(rank)
        self.channel.drop(rank)

    def _pause(self, fields: Mapping[str, Any], runner: ModelRunner, state: TrainState) -> StepStats:
        """Give all ranks this server's parts, take those of the others, and see that all have taken them."""
        require_same_updates("the end of a round", state.updates, {PRIMARY_RANK: fields["version"]})
        self._pushed.clear()
        self.traffic.forget()
        parts, servers = self.parts(runner), (self.rank, *self.circle.others)
        self.circle.tell("share", {}, parts)
        for rank in fields["left"]:
            if rank not in servers:
                self.send(rank, "pause", {key: fields[key] for key in ("number", "version")}, parts)
        self.load_other_parts(runner)
        self.circle.rest()
        self.flush(lambda rank, why: None, lambda: None)  # who is lost, rank 0 says
        return self.adopt_round(fields, state)
