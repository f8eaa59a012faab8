"""The servers: they hold the model, and apply the gradients that workers push, without waiting for all of
them.

Rank 0 is the primary server. It hands out tickets with its newest parameters, and applies pushes as its
policy says. A round is a number of steps; at its end the server waits for the work in progress and sends its
parameters to all workers. With several servers each holds some parts of the model and no others: rank 0
broadcasts everything that it does, and the secondary servers do the same with their parts, in the same order.

A worker that is gone, or silent until the deadline, is lost and does not return: its work is handed out
again, and the others continue while enough of them are left. At the end of a round all ranks learn which
ranks are left, and what is collective between two rounds (evaluation, records, saves) is among those.

Invariant: every push carries the version of the parameters that it read, and the update step divides by the
items of the pushes that it used. Between two rounds all workers that are left hold the parameters of the
servers, and all ranks the buffers. After the same updates a secondary server holds the values that a single
server would hold.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from paceline.comm.channel.message_channel import ChannelMessage
from paceline.comm.tally import StepTally, sum_tallies
from paceline.data.work import TrainingFeed
from paceline.errors import CommunicationError, DeadlineError
from paceline.observe.step_stats import StepStats
from paceline.parallel.model_runner import ModelRunner
from paceline.state.train_state import TrainState
from paceline.sync.server.parameter_transfer import PRIMARY_RANK
from paceline.sync.server.server_common import (
    RoundEvents,
    ServerConnections,
    ServerGroup,
    ShardServer,
    require_same_updates,
)
from paceline.sync.server.server_policies import ServerPolicy, WorkerPush, WorkLedger, WorkTicket
from paceline.sync.sync_rule import internal_rule_error, step_stats
from paceline.sync.update import UpdateResult, UpdateStep


class WorkerTable:
    """The workers of a server: which remain, what each works on, and which owe an answer; pure.

    A worker has at most one ticket, and is idle, awaited or lost. Worker k of the policy is the k-th rank,
    also after others were lost.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._tickets: dict[int, tuple[WorkTicket, int]] = {}
        self._awaited = dict.fromkeys(ranks, 0.0)  # the time since which an answer is due
        self._idle: set[int] = set()
        self._recalled: set[int] = set()
        self.lost: dict[int, str] = {}

    @property
    def left(self) -> list[int]:
        """Return the workers that are not lost."""
        return [rank for rank in self._ranks if rank not in self.lost]

    @property
    def idle(self) -> list[int]:
        """Return the workers that wait for work."""
        return sorted(self._idle)

    @property
    def all_idle(self) -> bool:
        """Return whether all remaining workers are idle."""
        return not self._awaited

    def number(self, rank: int) -> int:
        """Return the number of a worker for the policy."""
        return self._ranks.index(rank)

    def begin(self, now: float) -> None:
        """Start a round: all remaining workers have to report that they are ready."""
        self._idle.clear()
        self._awaited = dict.fromkeys(self.left, now)

    def assign_ticket(self, rank: int, ticket: WorkTicket, version: int, now: float) -> None:
        """Assign an idle worker a ticket, with the parameters after `version` updates."""
        self._idle.remove(rank)
        self._tickets[rank] = ticket, version
        self._recalled.discard(rank)
        self._awaited[rank] = now

    def record_answer(self, rank: int) -> tuple[WorkTicket, int] | None:
        """Mark a worker as idle. Return its ticket and the version of the parameters that it read."""
        self._idle.add(rank)
        self._awaited.pop(rank, None)
        return self._tickets.pop(rank, None)

    def recall(self, is_late: Callable[[WorkTicket], bool]) -> list[int]:
        """Return the workers whose work is late and that were not recalled yet."""
        working = {rank: ticket for rank, (ticket, _) in self._tickets.items()}
        late = [rank for rank, ticket in working.items() if is_late(ticket) and rank not in self._recalled]
        self._recalled.update(late)
        return late

    def mark_lost(self, rank: int, why: str) -> WorkTicket | None:
        """Mark a worker as lost, with the reason. Return its ticket."""
        self.lost[rank] = why
        self._idle.discard(rank)
        self._awaited.pop(rank, None)
        ticket, _ = self._tickets.pop(rank, (None, 0))
        return ticket

    def require(self, num_needed: int) -> None:
        """Check that enough workers remain.

        Raises:
            CommunicationError: there are too few; names those that are lost.
        """
        left, num_lost = len(self.left), len(self.lost)
        if left >= num_needed:
            return
        why = "; ".join(self.lost[rank] for rank in sorted(self.lost))
        raise CommunicationError(
            f"too few workers: a step needs {num_needed}, {left} are left and {num_lost} are lost: {why}",
            next_step="check the output of these ranks, then resume from the newest checkpoint",
        )

    def deadlines(self, last_activity: Callable[[int], float], deadline_seconds: float) -> dict[int, float]:
        """Return the deadline of each worker whose answer is due.

        Args:
            last_activity: returns when a rank last received or sent a byte.
            deadline_seconds: after the request or the last activity, whichever is later.
        """
        return {
            rank: max(since, last_activity(rank)) + deadline_seconds for rank, since in self._awaited.items()
        }


class PrimaryServer(ShardServer):
    """The rule of rank 0.

    Args:
        policy: hands out work, and decides what makes an update.
        workers: ranks of the workers; worker k runs part k of a step.
        round_events: returns events for all ranks at the end of a round.
        server_group: the other servers.
        connections: channel, collectives and formats; `note` receives the events "lost", "work" and
            "arrivals".
    """

    def __init__(
        self,
        policy: ServerPolicy,
        workers: tuple[int, ...],
        round_events: Callable[[], RoundEvents],
        server_group: ServerGroup,
        connections: ServerConnections,
    ) -> None:
        super().__init__(PRIMARY_RANK, server_group, connections)
        self._policy, self._round_events = policy, round_events
        self.worker_table = WorkerTable(workers)
        self._next_heartbeat = math.inf
        self._tallies: list[StepTally] = []
        self._arrivals: list[int] = []
        self._last_number = 0  # of the last ticket
        self._ticket_numbers: dict[int, int] = {}  # by worker
        self._untold_dropped: set[int] = set()  # workers that do not know yet that their push was dropped

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        state = update_step.state
        while state.step < feed.num_steps:
            self.phases.take()
            first = state.step
            self._policy.begin(first, feed.next_pause(first))
            self.worker_table.begin(time.monotonic())
            self.server_group.begin()
            # No worker waits for work yet: this checks the other servers and plans the next heartbeat.
            self._send_heartbeats(())
            self._tallies, update = [], UpdateResult(0.0, 0.0, applied=False)
            ages = WorkLedger()
            while not self._hand_out_tickets(runner, state):  # until all are idle and no work is left
                message = self._receive()
                if message is not None:
                    update = self._handle(message, runner, update_step, ages) or update
            tally = sum_tallies(self._tallies)
            stats = step_stats(
                range(first, state.step), feed.work, state, tally, update, self.phases, self.net
            )
            yield self._pause(stats, ages, runner, state)

    def abort(self) -> None:
        """Do nothing: no step is half done here, and a worker that lost its work reports that it is ready."""

    def _hand_out_tickets(self, runner: ModelRunner, state: TrainState) -> bool:
        """Hand tickets to idle workers. Return whether all are still idle, so that the round is over.

        Raises:
            CommunicationError: too few workers remain; names those that are lost.
        """
        self.worker_table.require(self._policy.num_needed)
        if self.stop_requested():
            self._policy.stop()
        for rank in self.worker_table.idle:
            ticket = self._policy.ticket(self.worker_table.number(rank))
            if ticket is not None:
                self._send_ticket(rank, ticket, runner, state)
        if self.worker_table.all_idle and not self._policy.is_complete:
            raise internal_rule_error(f"all workers are idle, but step {self._policy.step} is not complete")
        return self.worker_table.all_idle

    def _receive(self) -> ChannelMessage | None:
        """Return the next message of a worker; None: there is none in time, or a worker was lost instead."""
        now = time.monotonic()
        if now >= self._next_heartbeat:
            self._send_heartbeats(self.worker_table.idle)
        deadlines = self.worker_table.deadlines(self.channel.last_activity, self.net.deadline_seconds)
        try:
            # Wake up for whichever is due first: a heartbeat, or the deadline of a silent worker.
            message = self.receive(max(0.0, min(self._next_heartbeat, *deadlines.values()) - now))
        except CommunicationError as error:
            if error.peer is not None:
                self._drop_worker(error.peer, error.what)
            elif isinstance(error, DeadlineError):
                self._drop_silent_workers()
            else:
                raise
            return None
        self._arrivals.append(message.sender)
        return message

    def _send_heartbeats(self, ranks: Sequence[int]) -> None:
        """Send heartbeats, so that these workers do not time out while the server waits for others."""
        for rank in ranks:
            self.send(rank, "wait", {}, [])
        self.server_group.exchange_heartbeats()
        self._next_heartbeat = time.monotonic() + self.net.deadline_seconds / 2

    def _drop_silent_workers(self) -> None:
        """Mark workers as lost whose answer is overdue."""
        deadline, now = self.net.deadline_seconds, time.monotonic()
        for rank, expires in self.worker_table.deadlines(self.channel.last_activity, deadline).items():
            if expires <= now:
                self._drop_worker(rank, f"rank {rank} has sent nothing for {deadline:g} s")

    def _drop_worker(self, rank: int, why: str) -> None:
        """Continue without a worker; its work is handed out again."""
        # A worker that waits for a silent server is silent as well: look for the server first.
        self.server_group.require_live_servers()
        ticket = self.worker_table.mark_lost(rank, why)
        self.transfer.forget(rank)
        self.channel.drop(rank)
        self.server_group.broadcast("lose", {"rank": rank})
        # The ticket counts as taken again when it is handed out to another worker.
        self.ledger.taken -= ticket is not None
        self._policy.drop_worker(self.worker_table.number(rank), ticket)
        loss_record = {"rank": rank, "reason": why, "workers_left": len(self.worker_table.left)}
        self.note("lost", {"step": self._policy.step, **loss_record})

    def _send_ticket(self, rank: int, ticket: WorkTicket, runner: ModelRunner, state: TrainState) -> None:
        self.worker_table.assign_ticket(rank, ticket, state.num_updates, time.monotonic())
        self.ledger.taken += 1
        self._last_number = self._ticket_numbers[rank] = self._last_number + 1
        fields = {**asdict(ticket), "number": self._last_number, "version": state.num_updates, "to": rank}
        # The other servers follow these broadcasts in order, so their pieces have the same version.
        self.server_group.broadcast("ticket", fields)
        fields |= {"scale": state.scale.value, "dropped": self._take_dropped_flag(rank)}
        tensors = runner.buffers.values()
        tensors += self.transfer.encode_parameters(rank, self.parts(runner), state.num_updates)
        self.send(rank, "ticket", fields, tensors, lasts=self.transfer.lasts)

    def _take_dropped_flag(self, rank: int) -> bool:
        """Return, once, whether the last push of a worker was dropped."""
        dropped = rank in self._untold_dropped
        self._untold_dropped.discard(rank)
        return dropped

    def _handle(
        self, message: ChannelMessage, runner: ModelRunner, update_step: UpdateStep, ages: WorkLedger
    ) -> UpdateResult | None:
        ticket_and_version = self.worker_table.record_answer(message.sender)
        # After an error the worker holds no known parameters, so the next ticket carries all of them.
        if message.fields.get("forgot"):
            self.transfer.forget(message.sender)
            self.server_group.broadcast("forget", {"rank": message.sender})
        if message.fields.get("stops"):
            self._policy.stop()
        # At the start of a round a worker is ready without having had a ticket.
        if ticket_and_version is None:
            return None
        (ticket, version), worker = ticket_and_version, self.worker_table.number(message.sender)
        number = {"number": self._ticket_numbers[message.sender]}
        if message.kind == "ready":  # the worker has lost its result, or was recalled
            self.ledger.count_returned(late="recalled" in message.fields)
            self.server_group.broadcast("drop", number)
            self._policy.reissue(worker, ticket)
            return None
        pushes = self._policy.push(worker, WorkerPush(ticket, version, message))
        if pushes is None:
            # The worker learns of it with its next ticket, because its codec then keeps the old error.
            self.ledger.dropped += 1
            self.server_group.broadcast("drop", number)
            self._untold_dropped.add(message.sender)
        return self._apply(pushes, runner, update_step, ages) if pushes else None

    def _apply(
        self, pushes: Any, runner: ModelRunner, update_step: UpdateStep, ages: WorkLedger
    ) -> UpdateResult:
        """Sum the pushes and make one update of them."""
        state = update_step.state
        for push in pushes:
            for ledger in (self.ledger, ages):
                ledger.applied += 1
                ledger.staleness[state.num_updates - push.version] += 1
        messages = [push.message for push in pushes]
        numbers = [message.fields["number"] for message in messages]
        self.server_group.broadcast("apply", {"numbers": numbers, "step": self._policy.step})
        tally, update = self.update(messages, runner, update_step)
        state.step = self._policy.step
        self._tallies.append(tally)
        # An update can complete a step that others still work on.
        for rank in self.worker_table.recall(self._policy.is_late):
            self.send(rank, "recall", {"number": self._ticket_numbers[rank]}, [])
        return update

    def _record_round(self, step: int) -> None:
        """Record the work of the round and the order in which pushes arrived."""
        self.ledger.require_balance()
        self.note("work", {"step": step, **self.ledger.record()})
        self.note("arrivals", {"step": step, "senders": self._arrivals})
        self._arrivals = []

    def _pause(self, stats: StepStats, ages: WorkLedger, runner: ModelRunner, state: TrainState) -> StepStats:
        """Send all workers the parameters, all ranks the same record, and wait until they have them."""
        self._record_round(state.step)
        metrics, stops = {**stats.metrics, **ages.metrics()}, int(stats.stops) + int(self.stop_requested())
        stats = replace(stats, metrics=metrics, stops=stops)
        self.left = (PRIMARY_RANK, *self.server_group.others, *self.worker_table.left)
        fields = {
            "stats": asdict(stats),
            "ledger": self.ledger.record(),
            "step": state.step,
            "number": self._last_number,
            "version": state.num_updates,
            "scale": asdict(state.scale),
            "left": self.left,
            "news": self.record_events(self._round_events()),
        }
        # Every rank receives exact parameters now, so differences to what a worker had are void.
        self.transfer.forget()
        buffers = runner.buffers.values()
        tensors = [*buffers, *self.parts(runner)]
        self.server_group.broadcast("end", fields)
        for rank in self.worker_table.left:
            self.send(rank, "pause", {**fields, "dropped": self._take_dropped_flag(rank)}, tensors)
        self.end_round_of_servers(buffers, runner)
        self.server_group.rest()
        self.flush(self._drop_worker, lambda: self._send_heartbeats(self.worker_table.left))
        return stats


class SecondaryServer(ShardServer):
    """The rule of a server other than rank 0."""

    def __init__(self, rank: int, server_group: ServerGroup, connections: ServerConnections) -> None:
        super().__init__(rank, server_group, connections)
        self._pushed: dict[int, ChannelMessage] = {}  # by number

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        state = update_step.state
        handlers: Mapping[str, Callable[[ChannelMessage], None]] = {
            "push": self._store_push,
            "ticket": lambda message: self._send_ticket(message.fields, runner, state),
            "apply": lambda message: self._apply(message.fields, runner, update_step),
            "drop": lambda message: self._drop(message.fields["number"]),
            "forget": lambda message: self.transfer.forget(message.fields["rank"]),
            "lose": lambda message: self._drop_worker(message.fields["rank"]),
            "alive": lambda message: self.send(PRIMARY_RANK, "alive", {}, []),
        }
        while state.step < feed.num_steps:
            self.phases.take()
            self.server_group.begin()
            while (message := self.receive()).kind != "end":
                handlers[message.kind](message)
            yield self._pause(message.fields, runner, state)

    def abort(self) -> None:
        """Do nothing: rank 0 repeats nothing that was half done here."""

    def _store_push(self, message: ChannelMessage) -> None:
        """Store a push and report it, so that rank 0 can use it."""
        self._pushed[message.fields["number"]] = message
        self.send(PRIMARY_RANK, "have", {"number": message.fields["number"]}, [])

    def _send_ticket(self, fields: Mapping[str, Any], runner: ModelRunner, state: TrainState) -> None:
        # A ticket must have parameters of one version from all servers.
        require_same_updates("a ticket", state.num_updates, {PRIMARY_RANK: fields["version"]})
        tensors = self.transfer.encode_parameters(fields["to"], self.parts(runner), state.num_updates)
        self.send(fields["to"], "ticket", fields, tensors, lasts=self.transfer.lasts)

    def _apply(self, fields: Mapping[str, Any], runner: ModelRunner, update_step: UpdateStep) -> None:
        missing = [number for number in fields["numbers"] if number not in self._pushed]
        # Rank 0 applies a push only once every server has reported it, so none can be missing.
        if missing:
            raise internal_rule_error(f"server rank {self.rank} is missing push {missing[0]} of an update")
        messages = [self._pushed.pop(number) for number in fields["numbers"]]
        self.update(messages, runner, update_step)
        update_step.state.step = fields["step"]

    def _drop(self, number: int) -> None:
        self._pushed.pop(number, None)

    def _drop_worker(self, rank: int) -> None:
        self._pushed = {n: message for n, message in self._pushed.items() if message.sender != rank}
        self.transfer.forget(rank)
        self.channel.drop(rank)

    def _pause(self, fields: Mapping[str, Any], runner: ModelRunner, state: TrainState) -> StepStats:
        """Send all workers this server's parts, and wait until all servers' parts have arrived."""
        require_same_updates("the end of a round", state.num_updates, {PRIMARY_RANK: fields["version"]})
        self._pushed.clear()
        self.transfer.forget()
        parts, servers = self.parts(runner), (self.rank, *self.server_group.others)
        for rank in fields["left"]:
            if rank not in servers:
                self.send(rank, "pause", {key: fields[key] for key in ("number", "version")}, parts)
        self.end_round_of_servers((), runner)
        self.server_group.rest()
        self.flush(lambda rank, why: None, lambda: None)  # rank 0 reports lost workers
        return self.adopt_round(fields, state)
