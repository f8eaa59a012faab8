"""The worker of a server, or of several: takes tickets, runs them, pushes what they brought.

A message of several servers comes in as many pieces, each with the parts of one; it is taken when
all have come. Between two micro-batches a worker hears whether what it does comes too late (backup workers):
then it leaves it, and asks for other work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from paceline.comm.channel import Message
from paceline.data import Feed, LoadedBatch, Stream
from paceline.errors import CommunicationError, DeadlineError
from paceline.layout import Placed
from paceline.observe import OWN, Stats
from paceline.state import TrainState
from paceline.sync.every_step import gradient_scale
from paceline.sync.pushes import Given
from paceline.sync.recovery import TOOK
from paceline.sync.served import Served
from paceline.sync.shares import SERVER, load_buffers, load_share, share_of
from paceline.sync.update import UpdateStep


class RecalledError(Exception):
    """What is under way comes too late."""


class Worker(Served):
    """The rule of all other ranks.

    Args:
        num_workers: the parts of a step.
        items_per_sample: as for `EveryStep`.
        heeds: it hears between two micro-batches whether what it does comes too late.
        tells: it says how long a micro-batch takes it.
        weigh: of the samples of a batch, and of those of this worker's part: see `Given`.
    """

    def __init__(
        self,
        num_workers: int,
        items_per_sample: int,
        heeds: bool,
        tells: bool,
        weigh: Callable[[int, int], float],
        *shared: Any,
    ) -> None:
        super().__init__(*shared)
        self._weigh = weigh
        self._num_workers, self._items_per_sample, self._heeds = num_workers, items_per_sample, heeds
        self._tells = tells
        self._arrived: list[deque[Message]] = [deque() for _ in self.traffics]
        self._forgot = False
        self._gone: CommunicationError | None = None  # a server, after its piece of the present message

    def rounds(self, feed: Feed, placed: Placed, update_step: UpdateStep) -> Iterator[Stats]:
        """See `Rule`."""
        state = update_step.state
        state.optimizer.state.clear()  # of a checkpoint: it would grow old here, and seem to differ
        while state.step < feed.num_steps:
            self.phases.take()
            self.send(SERVER, "ready", {"stops": self.stop_requested(), "forgot": self._forgot}, [])
            self._forgot = False
            while (pieces := self._hear())[SERVER].kind == "ticket":
                self._work(pieces, feed, placed, state)
            yield self._take_over(pieces, placed, state)

    def abort(self) -> None:
        """Whatever was half done is lost; the next `rounds` says that this worker is ready."""
        for traffic in self.traffics:
            traffic.forget()
            traffic.settle(dropped=True)
        self._forgot = True

    def _hear(self) -> list[Message]:
        """The next ticket or pause, a piece from each server.

        Raises:
            CommunicationError: the pieces are not of one message.
        """
        if self._gone is not None:
            raise self._gone
        while not all(self._arrived):
            try:
                message = self.receive()
            except CommunicationError as error:
                if error.peer is None or not self._arrived[error.peer]:
                    raise
                self._gone = error
                continue
            if message.kind not in _BESIDE:
                self._arrived[message.sender].append(message)
        pieces = [one.popleft() for one in self._arrived]
        if len({(piece.kind, piece.fields["number"], piece.fields["version"]) for piece in pieces}) > 1:
            raise CommunicationError(
                "servers have sent pieces of different tickets",
                next_step="this is a mistake of the rule, not of the recipe: please report it",
            )
        return pieces

    def _work(self, pieces: Sequence[Message], feed: Feed, placed: Placed, state: TrainState) -> None:
        """Run one ticket with the parameters that came with it, and push what it brought."""
        step, part = self._take(pieces, placed, state)
        work, fields = feed.work.part(part, self._num_workers), pieces[SERVER].fields
        micro_batches = work.micro_batches(step, fields["version"])
        sink = self.pushes.sink(placed, part)
        scale = gradient_scale(work, state, self._items_per_sample)
        sink.begin()
        before = self.phases.spent(*OWN)
        try:
            with feed.open(micro_batches) as stream:
                sums = placed.run(self._until_recalled(stream), len(micro_batches), sink, scale)
        except RecalledError:
            placed.abort()
            self.send(SERVER, "ready", {"stops": self.stop_requested(), "recalled": True}, [])
            return
        samples = sum(len(micro_batch.indices) for micro_batch in micro_batches)
        weight = self._weigh(work.num_samples(step), samples)
        given = Given(step, part, [micro_batch.shard for micro_batch in micro_batches], weight)
        told = {"number": fields["number"], "place": (step, part), "stops": self.stop_requested()}
        if self._tells:
            told[TOOK] = (self.phases.spent(*OWN) - before) / max(1, len(micro_batches))
        for server, (said, tensors) in enumerate(self.pushes.made(sink, sums, placed, scale, given)):
            self.send(server, "push", {**said, **told}, tensors, lasts=self.pushes.lasts)

    def _until_recalled(self, stream: Stream) -> Iterator[LoadedBatch]:
        """The micro-batches.

        Raises:
            RecalledError: the server says that they come too late; nothing of them was sent.
        """
        for loaded in stream:
            yield loaded
            while self._heeds and (message := self._heard()) is not None:
                if message.kind == "recall":
                    raise RecalledError

    def _heard(self) -> Message | None:
        """What rank 0 says beside tickets, if it says anything; it sends none while this worker has one."""
        try:
            return self.channel.receive(0.0)
        except DeadlineError:
            return None

    def _take(self, pieces: Sequence[Message], placed: Placed, state: TrainState) -> tuple[int, int]:
        """The parameters of a ticket, and which step and part of it is to be done."""
        fields = pieces[SERVER].fields
        found = zip(_tensors(pieces, placed), self.traffics, strict=True)
        for server, (tensors, traffic) in enumerate(found):
            traffic.settle(dropped=fields["dropped"])
            parts = [*share_of(placed.holding, server).values()]
            traffic.take(tensors, parts, fields["to"], fields["version"])
        self.net.step = state.step = fields["step"]
        state.scale.value = fields["scale"]
        return fields["step"], fields["part"]

    def _take_over(self, pieces: Sequence[Message], placed: Placed, state: TrainState) -> Stats:
        fields = pieces[SERVER].fields
        found = zip(_tensors(pieces, placed), self.traffics, strict=True)
        for server, (tensors, traffic) in enumerate(found):
            traffic.settle(dropped=fields["dropped"])
            traffic.forget()
            load_share(tensors, share_of(placed.holding, server))
        return self.go_on_from(fields, state)


_BESIDE = ("wait", "recall")
"""Rank 0 lives; what was under way comes too late, or came at the same time."""


def _tensors(pieces: Sequence[Message], placed: Placed) -> list[Sequence[Tensor]]:
    """By server, without the buffers, which are taken over; the server that decides sends them."""
    first, *others = pieces
    return [load_buffers(first.tensors, placed), *(piece.tensors for piece in others)]
