"""What servers and their workers share: the channel, the ledger, and an update as all servers make it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.comm import Gradients, Net, Tally
from paceline.comm.channel import Channel, Message
from paceline.comm.reduction import joint_norm
from paceline.errors import CommunicationError
from paceline.layout import Placed
from paceline.observe import Phases, Stats
from paceline.slot import Keeper, Piece, Slot
from paceline.state import TrainState
from paceline.sync.circle import Circle, require_same
from paceline.sync.health import Note
from paceline.sync.policy import WorkLedger
from paceline.sync.pushes import Pushes
from paceline.sync.shares import load_buffers, load_share, share_of
from paceline.sync.traffic import Traffic
from paceline.sync.update import Update, UpdateStep

News = Mapping[str, Mapping[str, Any]]
"""What has happened, by the name of the event."""


class Served(Keeper):
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
        pushes: Pushes,
        channel: Channel,
        net: Net,
        phases: Phases,
        stop_requested: Callable[[], bool],
        traffics: Sequence[Traffic],
        note: Note,
    ) -> None:
        self.channel, self.net, self.phases, self.traffics = channel, net, phases, traffics
        self.pushes, self.stop_requested, self.note = pushes, stop_requested, note
        self.left: tuple[int, ...] = ()
        self.ledger = WorkLedger()

    def send(
        self, to: int, kind: str, fields: Mapping[str, Any], tensors: Sequence[Tensor], *, lasts: bool = False
    ) -> None:
        """One message; it goes out while this rank receives. `lasts`: nobody changes its tensors any more."""
        self.channel.send(to, Message(kind, fields, tensors, lasts=lasts), self.net.deadline_seconds)

    def receive(self, seconds: float | None = None) -> Message:
        """One message, within so many seconds; None: within the deadline."""
        self.phases.begin("communication")
        return self.channel.receive(self.net.deadline_seconds if seconds is None else seconds)

    def go_on_from(self, fields: Mapping[str, Any], state: TrainState) -> Stats:
        """What rank 0 says at the end of a round holds here too; returns its record, with own times."""
        state.step, state.updates = fields["step"], fields["version"]
        state.scale.value, state.scale.clean_steps = fields["scale"]["value"], fields["scale"]["clean_steps"]
        self.ledger = WorkLedger.of(fields["ledger"])
        self.left = tuple(fields["left"])
        self.tell(fields["news"])
        seconds, spent = self.phases.take()
        sent = self.net.ledger.total().sent_bytes
        return replace(Stats(**fields["stats"]), seconds=seconds, phases=spent, sent_bytes=sent)

    def tell(self, news: News) -> News:
        """Note what has happened, which is the same on all ranks; returns it."""
        for name, record in news.items():
            self.note(name, record)
        return news

    def pieces(self) -> list[Piece]:
        """The ledger, as numbers: taken, applied, dropped, then pairs of age and count."""
        ages = [n for pair in sorted(self.ledger.staleness.items()) for n in pair]
        values = torch.tensor([self.ledger.taken, self.ledger.applied, self.ledger.dropped, *ages])
        return [Piece(Slot.whole("work", values), values)]

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `pieces`."""
        if "work" in tensors:
            taken, applied, dropped, *ages = (int(n) for n in tensors["work"])
            histogram = dict(zip(ages[::2], ages[1::2], strict=True))
            self.ledger = WorkLedger(taken, applied, dropped)
            self.ledger.staleness.update(histogram)


class Serving(Served):
    """A server, the one that decides or another: it holds parts of the model, and updates them.

    Args:
        rank: of this server, which is its number too.
        circle: the other servers.
    """

    def __init__(self, rank: int, circle: Circle, *shared: Any) -> None:
        super().__init__(*shared)
        self.rank, self.circle = rank, circle
        (self.traffic,) = self.traffics

    def parts(self, placed: Placed) -> list[Tensor]:
        """The newest values of what this server holds."""
        return [*share_of(placed.holding, self.rank).values()]

    def update(
        self, messages: Sequence[Message], placed: Placed, update_step: UpdateStep
    ) -> tuple[Tally, Update]:
        """Sum the contributions, and make one update of them; collective over the servers."""
        self.phases.begin("optimizer")
        added, state = self.pushes.add(messages, placed), update_step.state
        flats = [g for g in added.grads.values() if g is not None]
        norms = self._norms(torch._foreach_norm(flats) if flats else [], state.updates)
        self.phases.begin("optimizer")
        if added.tally.buffers.numel():
            placed.buffers.begin_step()
            placed.buffers.end_step(added.tally.buffers, added.tally.micro_batches)
        update = update_step.apply(Gradients(added.grads, flats, norms, added.scale), added.tally)
        return added.tally, update

    def take_others(self, placed: Placed) -> None:
        """Take the parts of the other servers."""
        self.phases.begin("communication")
        for rank, message in self.circle.answers("share").items():
            tensors = message.tensors if rank else load_buffers(message.tensors, placed)
            load_share(tensors, share_of(placed.holding, rank))

    def flush(self, lose: Callable[[int, str], None], comfort: Callable[[], None]) -> None:
        """Wait until all ranks that are left have received everything: a collective may follow.

        Args:
            lose: is told of a worker that is lost.
            comfort: is called now and then.
        """
        taken = False
        while not taken:
            try:
                self.phases.begin("communication")
                taken = self.channel.flush(self.net.deadline_seconds / 2)
                if not taken:
                    comfort()
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
        require_same("an update", updates, {rank: fields["updates"] for rank, fields in said.items()})
        norms = {self.rank: mine} | {rank: fields["norm"] for rank, fields in said.items()}
        return [torch.tensor(norms[rank], dtype=torch.float64) for rank in sorted(norms)]
