"""A further server: it holds parts of the model, and does with them what rank 0 does with its own.

It deals no work and decides nothing. Workers push to it and are given its parts; which pushes make an update,
and which worker is given what, it hears from rank 0, in one order. Invariant: after as many updates its parts
are those that one server alone would hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from paceline.comm.channel import Message
from paceline.data import Feed
from paceline.errors import CommunicationError
from paceline.layout import Placed
from paceline.observe import Stats
from paceline.state import TrainState
from paceline.sync.circle import require_same
from paceline.sync.served import Serving
from paceline.sync.shares import SERVER
from paceline.sync.update import UpdateStep


class Holder(Serving):
    """The rule of a server other than rank 0."""

    def __init__(self, *shared: Any) -> None:
        super().__init__(*shared)
        self._pushed: dict[int, Message] = {}  # by number

    def rounds(self, feed: Feed, placed: Placed, update_step: UpdateStep) -> Iterator[Stats]:
        """See `Rule`."""
        state = update_step.state
        does: Mapping[str, Callable[[Message], None]] = {
            "push": self._keep,
            "ticket": lambda message: self._hand_out(message.fields, placed, state),
            "apply": lambda message: self._apply(message.fields, placed, update_step),
            "drop": lambda message: self._drop(message.fields["number"]),
            "forget": lambda message: self.traffic.forget(message.fields["rank"]),
            "lose": lambda message: self._lose(message.fields["rank"]),
            "alive": lambda message: self.send(SERVER, "alive", {}, []),
        }
        while state.step < feed.num_steps:
            self.phases.take()
            self.circle.begin()
            while (message := self.receive()).kind != "end":
                does[message.kind](message)
            yield self._pause(message.fields, placed, state)

    def abort(self) -> None:
        """Nothing is half done here that rank 0 would not say again."""

    def _keep(self, message: Message) -> None:
        """A worker has pushed: rank 0 may count on it."""
        self._pushed[message.fields["number"]] = message
        self.send(SERVER, "have", {"number": message.fields["number"]}, [])

    def _hand_out(self, fields: Mapping[str, Any], placed: Placed, state: TrainState) -> None:
        require_same("a ticket", state.updates, {SERVER: fields["version"]})
        tensors = self.traffic.ticket(fields["to"], self.parts(placed), state.updates)
        self.send(fields["to"], "ticket", fields, tensors, lasts=self.traffic.lasts)

    def _apply(self, fields: Mapping[str, Any], placed: Placed, update_step: UpdateStep) -> None:
        missing = [number for number in fields["numbers"] if number not in self._pushed]
        if missing:
            raise CommunicationError(
                f"an update is to be made of pushes of which this server has not {missing[0]}",
                next_step="this is a mistake of the rule, not of the recipe: please report it",
            )
        messages = [self._pushed.pop(number) for number in fields["numbers"]]
        self.update(messages, placed, update_step)
        update_step.state.step = fields["step"]

    def _drop(self, number: int) -> None:
        self._pushed.pop(number, None)

    def _lose(self, rank: int) -> None:
        self._pushed = {n: message for n, message in self._pushed.items() if message.sender != rank}
        self.traffic.forget(rank)
        self.channel.drop(rank)

    def _pause(self, fields: Mapping[str, Any], placed: Placed, state: TrainState) -> Stats:
        """Give all ranks this server's parts, take those of the others, and see that all have taken them."""
        require_same("the end of a round", state.updates, {SERVER: fields["version"]})
        self._pushed.clear()
        self.traffic.forget()
        parts, servers = self.parts(placed), (self.rank, *self.circle.others)
        self.circle.tell("share", {}, parts)
        for rank in fields["left"]:
            if rank not in servers:
                self.send(rank, "pause", {key: fields[key] for key in ("number", "version")}, parts)
        self.take_others(placed)
        self.circle.rest()
        self.flush(lambda rank, why: None, lambda: None)  # who is lost, rank 0 says
        return self.go_on_from(fields, state)
