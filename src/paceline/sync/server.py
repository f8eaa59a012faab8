"""A server and its workers: gradients come over channels, one update follows another, nobody waits for all.

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
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from paceline.comm import Tally
from paceline.comm.channel import Message
from paceline.data import Feed
from paceline.errors import CommunicationError, DeadlineError
from paceline.layout import Placed
from paceline.observe import Stats
from paceline.state import TrainState
from paceline.sync.alone import add_tallies
from paceline.sync.crew import Crew
from paceline.sync.policy import Policy, Push, Ticket, WorkLedger
from paceline.sync.rule import step_stats
from paceline.sync.served import News, Serving
from paceline.sync.shares import SERVER
from paceline.sync.update import Update, UpdateStep


class Server(Serving):
    """Rank 0's rule.

    Args:
        policy: hands out work and decides what makes an update.
        workers: their ranks; worker k runs as part k of as many.
        news: what all ranks are to be told at the end of a round, by the name of the event.
        shared: see `Serving`; every worker that is lost, and after a round the work and its order, is noted.
    """

    def __init__(
        self,
        policy: Policy,
        workers: tuple[int, ...],
        news: Callable[[], News],
        *shared: Any,
    ) -> None:
        super().__init__(SERVER, *shared)
        self._policy, self._news = policy, news
        self.crew = Crew(workers)
        self._next_beat = math.inf
        self._taken: list[Tally] = []
        self._heard: list[int] = []
        self._number = 0  # of the last ticket
        self._given: dict[int, int] = {}  # by worker
        self._dropped: set[int] = set()  # whose last push was left out, and who do not know it yet

    def rounds(self, feed: Feed, placed: Placed, update_step: UpdateStep) -> Iterator[Stats]:
        """See `Rule`: a round ends where the feed wants a pause, or a rank was asked to stop."""
        state = update_step.state
        while state.step < feed.num_steps:
            self.phases.take()
            first = state.step
            self._policy.begin(first, feed.pause_after(first))
            self.crew.begin(time.monotonic())
            self.circle.begin()
            self._comfort(())
            self._taken, update = [], Update(0.0, 0.0, applied=False)
            ages = WorkLedger()
            while not self._over(placed, state):
                message = self._hear()
                if message is not None:
                    update = self._take_in(message, placed, update_step, ages) or update
            tally = add_tallies(self._taken)
            stats = step_stats(
                range(first, state.step), feed.work, state, tally, update, self.phases, self.net
            )
            yield self._pause(stats, ages, placed, state)

    def abort(self) -> None:
        """Nothing is half done here: a worker that lost its work asks for it again."""

    def _over(self, placed: Placed, state: TrainState) -> bool:
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
                self._hand_out(rank, ticket, placed, state)
        if self.crew.is_at_rest and not self._policy.is_complete:
            raise CommunicationError(
                f"all workers are idle, and step {self._policy.step} is not complete",
                next_step="this is a mistake of the rule, not of the recipe: please report it",
            )
        return self.crew.is_at_rest

    def _hear(self) -> Message | None:
        """What a worker says next; None: nothing in time, or one was lost instead."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._comfort(self.crew.idle)
        due = self.crew.due(self.channel.last_sign, self.net.deadline_seconds)
        try:
            message = self.receive(max(0.0, min(self._next_beat, *due.values()) - now))
        except CommunicationError as error:
            if error.peer is not None:
                self._lose(error.peer, error.what)
            elif isinstance(error, DeadlineError):
                self._lose_silent()
            else:
                raise
            return None
        self._heard.append(message.sender)
        return message

    def _comfort(self, ranks: Sequence[int]) -> None:
        """Send a heartbeat, so that workers do not time out while the server waits for others."""
        for rank in ranks:
            self.send(rank, "wait", {}, [])
        self.circle.look_after()
        self._next_beat = time.monotonic() + self.net.deadline_seconds / 2

    def _lose_silent(self) -> None:
        """Nothing has arrived in time: those that are late are lost."""
        deadline, now = self.net.deadline_seconds, time.monotonic()
        for rank, by in self.crew.due(self.channel.last_sign, deadline).items():
            if by <= now:
                self._lose(rank, f"rank {rank} has given no sign for {deadline:g} s")

    def _lose(self, rank: int, why: str) -> None:
        """Go on without a worker: what it worked on is to be done by others."""
        self.circle.require_signs()  # a worker that waits for a server is not to blame
        ticket = self.crew.lose(rank, why)
        self.traffic.forget(rank)
        self.channel.drop(rank)
        self.circle.tell("lose", {"rank": rank})
        self.ledger.taken -= ticket is not None
        self._policy.lose(self.crew.number(rank), ticket)
        lost = {"rank": rank, "reason": why, "workers_left": len(self.crew.left)}
        self.note("lost", {"step": self._policy.step, **lost})

    def _hand_out(self, rank: int, ticket: Ticket, placed: Placed, state: TrainState) -> None:
        self.crew.give(rank, ticket, state.updates, time.monotonic())
        self.ledger.taken += 1
        self._number = self._given[rank] = self._number + 1
        fields = {**asdict(ticket), "number": self._number, "version": state.updates, "to": rank}
        self.circle.tell("ticket", fields)
        fields |= {"scale": state.scale.value, "dropped": self._tell_dropped(rank)}
        tensors = placed.buffers.values()
        tensors += self.traffic.ticket(rank, self.parts(placed), state.updates)
        self.send(rank, "ticket", fields, tensors, lasts=self.traffic.lasts)

    def _tell_dropped(self, rank: int) -> bool:
        """Whether the last push of a worker was left out; it is told once."""
        dropped = rank in self._dropped
        self._dropped.discard(rank)
        return dropped

    def _take_in(
        self, message: Message, placed: Placed, update_step: UpdateStep, ages: WorkLedger
    ) -> Update | None:
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
            self.ledger.come_back(late="recalled" in message.fields)
            self.circle.tell("drop", number)
            self._policy.give_back(worker, ticket)
            return None
        pushes = self._policy.push(worker, Push(ticket, version, message))
        if pushes is None:
            self.ledger.dropped += 1
            self.circle.tell("drop", number)
            self._dropped.add(message.sender)
        return self._apply(pushes, placed, update_step, ages) if pushes else None

    def _apply(self, pushes: Any, placed: Placed, update_step: UpdateStep, ages: WorkLedger) -> Update:
        """Sum the contributions, and make one update of them."""
        state = update_step.state
        for push in pushes:
            for ledger in (self.ledger, ages):
                ledger.applied += 1
                ledger.staleness[state.updates - push.version] += 1
        messages = [push.message for push in pushes]
        numbers = [message.fields["number"] for message in messages]
        self.circle.tell("apply", {"numbers": numbers, "step": self._policy.step})
        tally, update = self.update(messages, placed, update_step)
        state.step = self._policy.step
        self._taken.append(tally)
        for rank in self.crew.recall(self._policy.is_late):
            self.send(rank, "recall", {"number": self._given[rank]}, [])
        return update

    def _tell_round(self, step: int) -> None:
        """Note what was done and who was heard."""
        self.ledger.require_balance()
        self.note("work", {"step": step, **self.ledger.record()})
        self.note("arrivals", {"step": step, "senders": self._heard})
        self._heard = []

    def _pause(self, stats: Stats, ages: WorkLedger, placed: Placed, state: TrainState) -> Stats:
        """Give all workers the newest parameters and the same record, and see that they have taken them."""
        self._tell_round(state.step)
        metrics, stops = {**stats.metrics, **ages.metrics()}, int(stats.stops) + int(self.stop_requested())
        stats = replace(stats, metrics=metrics, stops=stops)
        self.left = (SERVER, *self.circle.others, *self.crew.left)
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
        tensors = [*placed.buffers.values(), *self.parts(placed)]
        self.circle.tell("end", fields)
        self.circle.tell("share", {}, tensors)
        for rank in self.crew.left:
            self.send(rank, "pause", {**fields, "dropped": self._tell_dropped(rank)}, tensors)
        self.take_others(placed)
        self.circle.rest()
        self.flush(self._lose, lambda: self._comfort(self.crew.left))
        return stats
