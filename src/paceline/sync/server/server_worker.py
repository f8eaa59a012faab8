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

from paceline.comm.channel.message_channel import ChannelMessage
from paceline.data.work import BatchStream, LoadedBatch, TrainingFeed
from paceline.errors import CommunicationError, DeadlineError
from paceline.observe.step_stats import LOCAL_PHASES, StepStats
from paceline.parallel.model_runner import ModelRunner
from paceline.state.train_state import TrainState
from paceline.sync.every_step import gradient_scale
from paceline.sync.server.gradient_push import AssignedPart
from paceline.sync.server.parameter_transfer import (
    PRIMARY_RANK,
    load_buffers,
    load_server_values,
    server_values,
)
from paceline.sync.server.server_common import ServerParticipant
from paceline.sync.straggler_recovery import MICRO_BATCH_SECONDS
from paceline.sync.sync_rule import internal_rule_error
from paceline.sync.update import UpdateStep


class RecalledError(Exception):
    """What is under way comes too late."""


class ServerWorker(ServerParticipant):
    """The rule of all other ranks.

    Args:
        num_workers: the parts of a step.
        items_per_sample: as for `EveryStep`.
        checks_for_recall: it hears between two micro-batches whether what it does comes too late.
        tells: it says how long a micro-batch takes it.
        weigh: of the samples of a batch, and of those of this worker's part: see `AssignedPart`.
    """

    def __init__(
        self,
        num_workers: int,
        items_per_sample: int,
        checks_for_recall: bool,
        tells: bool,
        weigh: Callable[[int, int], float],
        *shared: Any,
    ) -> None:
        super().__init__(*shared)
        self._weigh = weigh
        self._num_workers, self._items_per_sample, self._heeds = (
            num_workers,
            items_per_sample,
            checks_for_recall,
        )
        self._tells = tells
        self._arrived: list[deque[ChannelMessage]] = [deque() for _ in self.traffics]
        self._forgot = False
        self._gone: CommunicationError | None = None  # a server, after its piece of the present message

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        """See `Rule`."""
        state = update_step.state
        state.optimizer.state.clear()  # of a checkpoint: it would grow old here, and seem to differ
        while state.step < feed.num_steps:
            self.phases.take()
            self.send(PRIMARY_RANK, "ready", {"stops": self.stop_requested(), "forgot": self._forgot}, [])
            self._forgot = False
            while (pieces := self._hear())[PRIMARY_RANK].kind == "ticket":
                self._work(pieces, feed, runner, state)
            yield self._take_over(pieces, runner, state)

    def abort(self) -> None:
        """Whatever was half done is lost; the next `rounds` says that this worker is ready."""
        for traffic in self.traffics:
            traffic.forget()
            traffic.settle(dropped=True)
        self._forgot = True

    def _hear(self) -> list[ChannelMessage]:
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
            if message.kind not in _IGNORED_KINDS:
                self._arrived[message.sender].append(message)
        pieces = [one.popleft() for one in self._arrived]
        if len({(piece.kind, piece.fields["number"], piece.fields["version"]) for piece in pieces}) > 1:
            raise internal_rule_error("servers have sent pieces of different tickets")
        return pieces

    def _work(
        self, pieces: Sequence[ChannelMessage], feed: TrainingFeed, runner: ModelRunner, state: TrainState
    ) -> None:
        """Run one ticket with the parameters that came with it, and push what it brought."""
        step, part = self._take(pieces, runner, state)
        work, fields = feed.work.part(part, self._num_workers), pieces[PRIMARY_RANK].fields
        micro_batches = work.micro_batches(step, fields["version"])
        sink = self.pushes.sink(runner, part)
        scale = gradient_scale(work, state, self._items_per_sample)
        sink.begin()
        before = self.phases.spent(*LOCAL_PHASES)
        try:
            with feed.open(micro_batches) as stream:
                sums = runner.run(self._iterate_until_recalled(stream), len(micro_batches), sink, scale)
        except RecalledError:
            runner.abort()
            self.send(PRIMARY_RANK, "ready", {"stops": self.stop_requested(), "recalled": True}, [])
            return
        samples = sum(len(micro_batch.indices) for micro_batch in micro_batches)
        weight = self._weigh(work.num_samples(step), samples)
        given = AssignedPart(step, part, [micro_batch.shard for micro_batch in micro_batches], weight)
        told = {"number": fields["number"], "place": (step, part), "stops": self.stop_requested()}
        if self._tells:
            told[MICRO_BATCH_SECONDS] = (self.phases.spent(*LOCAL_PHASES) - before) / max(
                1, len(micro_batches)
            )
        for server, (said, tensors) in enumerate(self.pushes.made(sink, sums, runner, scale, given)):
            self.send(server, "push", {**said, **told}, tensors, lasts=self.pushes.lasts)

    def _iterate_until_recalled(self, stream: BatchStream) -> Iterator[LoadedBatch]:
        """The micro-batches.

        Raises:
            RecalledError: the server says that they come too late; nothing of them was sent.
        """
        for loaded in stream:
            yield loaded
            while self._heeds and (message := self._heard()) is not None:
                if message.kind == "recall":
                    raise RecalledError

    def _heard(self) -> ChannelMessage | None:
        """What rank 0 says beside tickets, if it says anything; it sends none while this worker has one."""
        try:
            return self.channel.receive(0.0)
        except DeadlineError:
            return None

    def _take(
        self, pieces: Sequence[ChannelMessage], runner: ModelRunner, state: TrainState
    ) -> tuple[int, int]:
        """The parameters of a ticket, and which step and part of it is to be done."""
        fields = pieces[PRIMARY_RANK].fields
        found = zip(_tensors_by_server(pieces, runner), self.traffics, strict=True)
        for server, (tensors, traffic) in enumerate(found):
            traffic.settle(dropped=fields["dropped"])
            parts = [*server_values(runner.sharded_model, server).values()]
            traffic.take(tensors, parts, fields["to"], fields["version"])
        self.net.step = state.step = fields["step"]
        state.scale.value = fields["scale"]
        return fields["step"], fields["part"]

    def _take_over(
        self, pieces: Sequence[ChannelMessage], runner: ModelRunner, state: TrainState
    ) -> StepStats:
        fields = pieces[PRIMARY_RANK].fields
        found = zip(_tensors_by_server(pieces, runner), self.traffics, strict=True)
        for server, (tensors, traffic) in enumerate(found):
            traffic.settle(dropped=fields["dropped"])
            traffic.forget()
            load_server_values(tensors, server_values(runner.sharded_model, server))
        return self.adopt_round(fields, state)


_IGNORED_KINDS = ("wait", "recall")
"""Rank 0 lives; what was under way comes too late, or came at the same time."""


def _tensors_by_server(pieces: Sequence[ChannelMessage], runner: ModelRunner) -> list[Sequence[Tensor]]:
    """By server, without the buffers, which are taken over; the server that decides sends them."""
    first, *others = pieces
    return [load_buffers(first.tensors, runner), *(piece.tensors for piece in others)]
