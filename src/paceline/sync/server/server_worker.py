"""The worker of one or several servers: it takes tickets, runs them, and pushes the gradients.

A message of several servers arrives in one piece per server, each with the parts of one; it is used when all
pieces have arrived. Between two micro-batches a worker checks whether its work is late (backup workers): then
it drops it and requests other work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

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
from paceline.sync.server.server_common import ServerConnections, ServerParticipant
from paceline.sync.straggler_recovery import MICRO_BATCH_SECONDS
from paceline.sync.sync_rule import internal_rule_error
from paceline.sync.update import UpdateStep


class RecalledError(Exception):
    """A recall of the ticket in progress, whose result would be dropped."""


class ServerWorker(ServerParticipant):
    """The rule of a rank that works for servers.

    Args:
        num_workers: the parts of a step.
        items_per_sample: as for `EveryStep`.
        checks_for_recall: check between two micro-batches whether the work is late.
        reports_seconds: report how long a micro-batch takes.
        weigh: returns the weight of a push, given the samples of the batch and of this part; see
            `AssignedPart`.
        connections: channel, collectives and formats of this rank.
    """

    def __init__(
        self,
        num_workers: int,
        items_per_sample: int,
        weigh: Callable[[int, int], float],
        connections: ServerConnections,
        *,
        checks_for_recall: bool,
        reports_seconds: bool,
    ) -> None:
        super().__init__(connections)
        self._num_workers, self._items_per_sample, self._weigh = num_workers, items_per_sample, weigh
        self._checks_for_recall, self._reports_seconds = checks_for_recall, reports_seconds
        self._arrived: list[deque[ChannelMessage]] = [deque() for _ in self.transfers]
        self._forgot = False
        # A server can leave after its piece of the present message: an error only when the next is due.
        self._lost_server: CommunicationError | None = None

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        state = update_step.state
        # The servers own the optimizer. A loaded copy would get old here, and ranks would seem to differ.
        state.optimizer.state.clear()
        while state.step < feed.num_steps:
            self.phases.take()
            self.send(PRIMARY_RANK, "ready", {"stops": self.stop_requested(), "forgot": self._forgot}, [])
            self._forgot = False
            while (pieces := self._receive_pieces())[PRIMARY_RANK].kind == "ticket":
                self._run_ticket(pieces, feed, runner, state)
            yield self._end_round(pieces, runner, state)

    def abort(self) -> None:
        """Drop the work in progress; the next `rounds` reports that this worker is ready."""
        # The servers forget what this worker has as well, once it says that it forgot.
        for transfer in self.transfers:
            transfer.forget()
            transfer.settle_push(dropped=True)
        self._forgot = True

    def _receive_pieces(self) -> list[ChannelMessage]:
        """Return the next ticket or end of a round: one piece from each server, by server.

        Raises:
            CommunicationError: the pieces belong to different messages.
        """
        if self._lost_server is not None:
            raise self._lost_server
        while not all(self._arrived):
            try:
                message = self.receive()
            except CommunicationError as error:
                if error.peer is None or not self._arrived[error.peer]:
                    raise
                self._lost_server = error
                continue
            if message.kind not in _IGNORED_KINDS:
                self._arrived[message.sender].append(message)
        pieces = [arrived.popleft() for arrived in self._arrived]
        if len({(piece.kind, piece.fields["number"], piece.fields["version"]) for piece in pieces}) > 1:
            raise internal_rule_error("the servers have sent pieces of different tickets")
        return pieces

    def _run_ticket(
        self, pieces: Sequence[ChannelMessage], feed: TrainingFeed, runner: ModelRunner, state: TrainState
    ) -> None:
        """Run one ticket with the parameters that came with it, and push the gradients."""
        step, part = self._load_ticket(pieces, runner, state)
        work, fields = feed.work.part(part, self._num_workers), pieces[PRIMARY_RANK].fields
        micro_batches = work.micro_batches(step, fields["version"])
        accumulator = self.pushes.new_accumulator(runner, part)
        scale = gradient_scale(work, state, self._items_per_sample)
        accumulator.begin()
        seconds_before = self.phases.spent(*LOCAL_PHASES)
        try:
            with feed.open(micro_batches) as stream:
                sums = runner.run(
                    self._iterate_until_recalled(stream), len(micro_batches), accumulator, scale
                )
        except RecalledError:
            # Nothing was sent of this ticket, so the server can drop it.
            runner.abort()
            self.send(PRIMARY_RANK, "ready", {"stops": self.stop_requested(), "recalled": True}, [])
            return
        samples = sum(len(micro_batch.indices) for micro_batch in micro_batches)
        weight = self._weigh(work.num_samples(step), samples)
        assigned = AssignedPart(step, part, [micro_batch.shard for micro_batch in micro_batches], weight)
        common_fields = {"number": fields["number"], "place": (step, part), "stops": self.stop_requested()}
        if self._reports_seconds:
            seconds = self.phases.spent(*LOCAL_PHASES) - seconds_before
            common_fields[MICRO_BATCH_SECONDS] = seconds / max(1, len(micro_batches))
        messages = self.pushes.encode(accumulator, sums, runner, scale, assigned)
        for server, (push_fields, tensors) in enumerate(messages):
            self.send(server, "push", {**push_fields, **common_fields}, tensors, lasts=self.pushes.lasts)

    def _iterate_until_recalled(self, stream: BatchStream) -> Iterator[LoadedBatch]:
        """Yield the micro-batches.

        Raises:
            RecalledError: the work is late; nothing of it was sent.
        """
        for loaded in stream:
            yield loaded
            # Between two micro-batches, so that late work costs at most one of them.
            while self._checks_for_recall and (message := self._poll_recall()) is not None:
                if message.kind == "recall":
                    raise RecalledError

    def _poll_recall(self) -> ChannelMessage | None:
        """Return a message of rank 0 if there is one; while this worker has a ticket it sends no other."""
        try:
            return self.channel.receive(0.0)
        except DeadlineError:
            return None

    def _load_ticket(
        self, pieces: Sequence[ChannelMessage], runner: ModelRunner, state: TrainState
    ) -> tuple[int, int]:
        """Load the parameters of a ticket, and return its step and part."""
        fields = pieces[PRIMARY_RANK].fields
        tensors_and_transfers = zip(_tensors_by_server(pieces, runner), self.transfers, strict=True)
        for server, (tensors, transfer) in enumerate(tensors_and_transfers):
            # Before the next gradients are coded: only now it is known whether the last push counted.
            transfer.settle_push(dropped=fields["dropped"])
            parts = [*server_values(runner.sharded_model, server).values()]
            transfer.decode_parameters(tensors, parts, fields["to"], fields["version"])
        self.net.step = state.step = fields["step"]
        state.scale.value = fields["scale"]
        return fields["step"], fields["part"]

    def _end_round(
        self, pieces: Sequence[ChannelMessage], runner: ModelRunner, state: TrainState
    ) -> StepStats:
        fields = pieces[PRIMARY_RANK].fields
        tensors_and_transfers = zip(_tensors_by_server(pieces, runner), self.transfers, strict=True)
        for server, (tensors, transfer) in enumerate(tensors_and_transfers):
            transfer.settle_push(dropped=fields["dropped"])
            # The parameters below are exact, so the next ticket has to start with whole ones.
            transfer.forget()
            load_server_values(tensors, server_values(runner.sharded_model, server))
        return self.adopt_round(fields, state)


_IGNORED_KINDS = ("wait", "recall")
"""A heartbeat of rank 0, and a recall that crossed the push that it was meant for."""


def _tensors_by_server(pieces: Sequence[ChannelMessage], runner: ModelRunner) -> list[Sequence[Tensor]]:
    """Return the tensors of each piece, without the buffers, which are loaded; server 0 sends them first."""
    first, *others = pieces
    return [load_buffers(first.tensors, runner), *(piece.tensors for piece in others)]
