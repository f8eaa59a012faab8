"""The worker of a server: takes tickets, runs them, pushes what they brought."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from paceline.comm.channel import Message
from paceline.data import Feed
from paceline.layout import Placed
from paceline.observe import Stats
from paceline.state import TrainState
from paceline.sync.every_step import gradient_scale
from paceline.sync.policy import WorkLedger
from paceline.sync.pushes import Given, Pushes
from paceline.sync.served import SERVER, Served
from paceline.sync.traffic import load_newest
from paceline.sync.update import UpdateStep


class Worker(Served):
    """The rule of all other ranks.

    Args:
        num_workers: the parts of a step.
        items_per_sample: as for `EveryStep`.
        pushes: makes what is pushed.
    """

    def __init__(self, num_workers: int, items_per_sample: int, pushes: Pushes, *shared: Any) -> None:
        super().__init__(*shared)
        self._num_workers, self._items_per_sample = num_workers, items_per_sample
        self._pushes = pushes
        self._forgot = False

    def rounds(self, feed: Feed, placed: Placed, update_step: UpdateStep) -> Iterator[Stats]:
        """See `Rule`."""
        state = update_step.state
        while state.step < feed.num_steps:
            self.phases.take()
            self.send(SERVER, "ready", {"stops": self.stop_requested(), "forgot": self._forgot}, [])
            self._forgot = False
            while (message := self.receive()).kind != "pause":
                if message.kind == "ticket":  # else the server only says that it lives
                    self._work(message, feed, placed, state)
            yield self._take_over(message, placed, state)

    def abort(self) -> None:
        """Whatever was half done is lost; the next `rounds` says that this worker is ready."""
        self.traffic.forget()
        self.traffic.settle(dropped=True)
        self._forgot = True

    def _work(self, message: Message, feed: Feed, placed: Placed, state: TrainState) -> None:
        """Run one ticket with the parameters that came with it, and push what it brought."""
        step, part = self._take(message, placed, state)
        work = feed.work.part(part, self._num_workers)
        micro_batches = work.micro_batches(step, message.fields["version"])
        sink = self._pushes.sink(placed, part)
        scale = gradient_scale(work, state, self._items_per_sample)
        sink.begin()
        with feed.open(micro_batches) as stream:
            sums = placed.run(stream, len(micro_batches), sink, scale)
        given = Given(step, part, [micro_batch.shard for micro_batch in micro_batches])
        fields, tensors = self._pushes.made(sink, sums, placed, scale, given)
        told = {"place": (step, part), "stops": self.stop_requested()}
        self.send(SERVER, "push", {**fields, **told}, tensors)

    def _take(self, message: Message, placed: Placed, state: TrainState) -> tuple[int, int]:
        """The parameters of a ticket, and which step and part of it is to be done."""
        fields = message.fields
        self.traffic.settle(dropped=fields["dropped"])
        self.traffic.take(message.tensors, placed, fields["to"], fields["version"])
        self.net.step = state.step = fields["step"]
        state.scale.value = fields["scale"]
        return fields["step"], fields["part"]

    def _take_over(self, message: Message, placed: Placed, state: TrainState) -> Stats:
        fields = message.fields
        self.traffic.settle(dropped=fields["dropped"])
        self.traffic.forget()
        load_newest(message.tensors, placed)
        state.step, state.updates = fields["step"], fields["updates"]
        state.scale.value, state.scale.clean_steps = fields["scale"]["value"], fields["scale"]["clean_steps"]
        self.ledger = WorkLedger.of(fields["ledger"])
        self.left = (SERVER, *fields["left"])
        seconds, spent = self.phases.take()
        sent = self.net.ledger.total().sent_bytes
        return replace(Stats(**fields["stats"]), seconds=seconds, phases=spent, sent_bytes=sent)
