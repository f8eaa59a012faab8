"""Point-to-point transports between pipeline stages: tensors of any shape and dtype, and a number.

`NetTransport` uses the backend, `HostMemoryTransport` memory that stages of one host share,
`MultiHostTransport` both, and `ThreadTransport` queues between threads. Two stages always use the same
transport in both directions.

Invariant: messages between two stages arrive in order and are found by their key. What is received has
memory of its own, since a module may change its input. Every run is an attempt with its own number: what an
aborted run has left in flight is never taken for a new message, and a neighbour may have begun its next
attempt before this stage has given up the last. Both sides know how long the first part of a message is
(`p2p_message`).
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from paceline.comm.handle import Handle
from paceline.comm.net import Net
from paceline.comm.routes.host_messages import HostMessenger
from paceline.errors import CommunicationError, DeadlineError
from paceline.job.mesh import RankGroup
from paceline.parallel.pipeline.p2p_message import (
    HEADER_BYTES,
    MessageHeader,
    message_parts,
    next_first_part_bytes,
    parse_first_part,
    read_message,
    tensor_from_bytes,
    write_message,
)

StageMessage = tuple[list[Tensor], float]


class StageTransport(Protocol):
    """Transport of messages to the stages before and after this one."""

    @property
    def num_sent(self) -> int:
        """Number of message parts that were handed over so far."""

    def send(self, to: int, tensors: Sequence[Tensor], note: float = 0.0, *, key: int = 0) -> None:
        """Start sending; `flush` waits. The tensors must not change until then.

        Args:
            to: index of the receiving stage.
            note: a number that travels with the tensors.
            key: what the message is for; messages of one key arrive in order.
        """

    def receive(self, source: int, *, key: int = 0) -> tuple[list[Tensor], float]:
        """Wait for the next message of a neighbour under this key; messages under other keys are kept.

        Returns:
            The tensors and the number.
        Raises:
            CommunicationError: the neighbour is gone.
            DeadlineError: it sent nothing in time.
        """

    def await_messages(self, counts: Mapping[int, int]) -> None:
        """Announce how many messages will be received, so that they can arrive before they are requested.

        Args:
            counts: by neighbour; all of them are received before the next call, unless the run is aborted.
        """

    def flush(self, most: int = 0) -> None:
        """Wait until the neighbours have received what was sent, except for the parts of the last `most`
        messages.
        """

    def abort(self) -> None:
        """Drop everything in flight."""


class NetTransport:
    """Transport over the backend, for stages that are ranks of a group.

    Args:
        back: group for messages to earlier stages; None for the same group. NCCL runs all messages of two
            ranks over one group in one order, so both directions in one group would deadlock.
    Wire: a header of 512 bytes for each message, longer with many tensors, and the bytes of the tensors. On
        a CPU, both travel as one part if the last message was as long, up to 64 KiB; tensors then begin at
        multiples of 64 bytes.
    """

    def __init__(
        self, group: RankGroup, net: Net, device: torch.device, back: RankGroup | None = None
    ) -> None:
        self._forward_group, self._backward_group, self._net, self._device = group, back or group, net, device
        self._in_flight: list[Handle] = []
        self._abandoned: list[Handle] = []
        self._attempt = self.num_sent = 0
        self._early: dict[tuple[int, int], deque[StageMessage]] = {}
        # By neighbour, bytes of the first part of the next message.
        self._first_sent: dict[int, int] = {}
        self._first_received: dict[int, int] = {}
        # By neighbour, messages whose first part may be received before they are requested.
        self._awaited: dict[int, int] = {}
        self._prefetched: dict[int, Handle] = {}

    def send(self, to: int, tensors: Sequence[Tensor], note: float = 0.0, *, key: int = 0) -> None:
        group = self._forward_group if to > self._forward_group.rank else self._backward_group
        header = MessageHeader.of(tensors, note, key, self._attempt)
        for part in message_parts(header, tensors, self._first_sent.get(to, HEADER_BYTES)):
            if part.numel():
                self.num_sent += 1
                # The attempt is the tag, so what an aborted run has left matches no receive of a later one.
                self._in_flight.append(self._net.send(part.to(self._device), group, to, self._attempt))
        self._expect(self._first_sent, to, header)

    def await_messages(self, counts: Mapping[int, int]) -> None:
        """Start receiving first parts ahead of time: a message is sent at once if its receiver is already
        waiting.
        """
        if self._device.type == "cpu":
            # Not on NCCL, which runs all calls in their order.
            self._awaited = dict(counts)
            for source in counts:
                self._prefetch(source)

    def _prefetch(self, source: int) -> None:
        if self._awaited.get(source, 0) and source not in self._prefetched:
            self._awaited[source] -= 1
            self._prefetched[source] = self._first_part(source)

    def receive(self, source: int, *, key: int = 0) -> StageMessage:
        while not self._early.get((source, key)):
            header, tensors = self._next(source)
            # NCCL has no tags: what an aborted run has left arrives first.
            if header.attempt == self._attempt:
                self._early.setdefault((source, header.key), deque()).append((tensors, header.note))
                self._expect(self._first_received, source, header)
                # Only now: the length of the next first part follows from this message.
                self._prefetch(source)
        return self._early[source, key].popleft()

    def _next(self, source: int) -> tuple[MessageHeader, list[Tensor]]:
        """Receive the next message of a neighbour."""
        first = (self._prefetched.pop(source, None) or self._first_part(source)).wait()
        words, missing = parse_first_part(first)
        if missing:
            words += self._receive_bytes(missing, source).wait().view(torch.int64).tolist()
        header = MessageHeader.read(words)
        if header.fits(len(first)):
            return header, header.copy_tensors_from(first)
        # All receives are started before the first wait, so that the sender waits for none of them.
        pending = [self._receive_bytes(size, source) for size in header.sizes]
        return header, [
            tensor_from_bytes(x.wait(), kind) for x, kind in zip(pending, header.kinds, strict=True)
        ]

    def _expect(self, sizes: dict[int, int], neighbour: int, header: MessageHeader) -> None:
        """Record how long the first part of the next message will be.

        Only on a CPU: elsewhere messages of an aborted run may still arrive, and both sides could disagree.
        """
        if self._device.type == "cpu":
            sizes[neighbour] = next_first_part_bytes(header)

    def _first_part(self, source: int) -> Handle:
        return self._receive_bytes(self._first_received.get(source, HEADER_BYTES), source)

    def _receive_bytes(self, size: int, source: int) -> Handle:
        x = torch.empty(size, dtype=torch.uint8, device=self._device)
        group = self._backward_group if source > self._forward_group.rank else self._forward_group
        return self._net.receive(x, group, source, self._attempt) if size else Handle.ready(x)

    def flush(self, most: int = 0) -> None:
        while len(self._in_flight) > most:
            self._in_flight.pop(0).wait()

    def abort(self) -> None:
        """Drop everything in flight, but keep its memory: the backend may still read it."""
        self._abandoned += [*self._in_flight, *self._prefetched.values()]
        self._in_flight, self._early = [], {}
        # Back to the header alone: the sides cannot know which messages the other has received.
        self._first_sent, self._first_received = {}, {}
        self._awaited, self._prefetched = {}, {}
        self._attempt += 1


class ThreadTransport:
    """Transport between threads of one process.

    It sends copies, since a module may change its input.

    Args:
        stage: index of this stage.
        boxes: one queue for each direction, by sender and receiver; shared by all stages.
        left: stages that have ended; shared by all.
        deadline_seconds: the longest wait.
    """

    def __init__(self, stage: int, boxes: StageQueues, left: set[int], deadline_seconds: float) -> None:
        self._stage, self._boxes, self._left, self.num_sent = stage, boxes, left, 0
        self._deadline_seconds = deadline_seconds

    def send(self, to: int, tensors: Sequence[Tensor], note: float = 0.0, *, key: int = 0) -> None:
        """Queue copies of the tensors; the key is not needed, as stages receive in the order of sending."""
        if to in self._left:
            raise self._gone(to)
        self._boxes[self._stage, to].put(([x.detach().clone() for x in tensors], note))

    def receive(self, source: int, *, key: int = 0) -> StageMessage:
        try:
            message = self._boxes[source, self._stage].get(timeout=self._deadline_seconds)
        except queue.Empty:
            raise DeadlineError(
                f"stage {source} sent nothing within {self._deadline_seconds:g} s",
                where=f"stage {self._stage}",
                next_step="check what that stage computes, or increase runtime.deadline_seconds",
            ) from None
        if message is None:
            raise self._gone(source)
        return message

    def await_messages(self, counts: Mapping[int, int]) -> None:
        """Do nothing: messages arrive by themselves."""

    def leave(self) -> None:
        """Tell the neighbours that this stage sends nothing more in this step."""
        self._left.add(self._stage)
        for (source, _), box in self._boxes.items():
            if source == self._stage:
                # Wakes a neighbour that is waiting already; `_left` is only read before a send.
                box.put(None)

    def flush(self, most: int = 0) -> None:
        """Do nothing: the queues are unbounded."""

    def abort(self) -> None:
        """Empty all queues; every stage must have ended."""
        self._left.clear()
        for box in self._boxes.values():
            while not box.empty():
                box.get_nowait()

    def _gone(self, stage: int) -> CommunicationError:
        return CommunicationError(f"stage {stage} has ended", where=f"stage {self._stage}")


StageQueues = dict[tuple[int, int], "queue.SimpleQueue[StageMessage | None]"]


def thread_transports(num_stages: int, deadline_seconds: float) -> list[ThreadTransport]:
    """Return the transports of stages in threads, by stage."""
    directions = [(a, b) for a in range(num_stages) for b in (a - 1, a + 1) if 0 <= b < num_stages]
    boxes: StageQueues = {direction: queue.SimpleQueue() for direction in directions}
    left: set[int] = set()
    return [ThreadTransport(stage, boxes, left, deadline_seconds) for stage in range(num_stages)]


class HostMemoryTransport:
    """Transport over shared memory, for stages on one host.

    Args:
        messenger: between the stages; `close` closes it.

    Attributes:
        stages: indices of the stages that it reaches.
    Wire: nothing. The ledger counts a header of 512 bytes for each message, longer with many tensors, and the
        tensors, which begin at multiples of 64 bytes.
    """

    def __init__(self, messenger: HostMessenger) -> None:
        self._messenger, self.stages = messenger, messenger.places
        self._attempt = self.num_sent = 0
        self._early: dict[tuple[int, int, int], deque[StageMessage]] = {}

    def send(self, to: int, tensors: Sequence[Tensor], note: float = 0.0, *, key: int = 0) -> None:
        """Copy the tensors into shared memory; they may change afterwards."""
        header = MessageHeader.of(tensors, note, key, self._attempt)
        self._messenger.send(to, header.num_bytes, partial(write_message, header, tensors))
        self.num_sent += 1

    def receive(self, source: int, *, key: int = 0) -> StageMessage:
        wanted = source, key, self._attempt
        while not self._early.get(wanted):
            header, tensors = self._messenger.take(source, read_message)
            if header.attempt >= self._attempt:
                # A later attempt is kept, too: the neighbour may have aborted first.
                message_key = source, header.key, header.attempt
                self._early.setdefault(message_key, deque()).append((tensors, header.note))
        return self._early[wanted].popleft()

    def acknowledge_read(self) -> None:
        self._messenger.acknowledge_read()

    def await_messages(self, counts: Mapping[int, int]) -> None:
        """Do nothing: messages arrive by themselves."""

    def flush(self, most: int = 0) -> None:
        """Wait for the receivers, so that no stage runs far ahead; tensors are free after `send`."""
        self._messenger.flush(most)

    def abort(self) -> None:
        self._messenger.abort()
        self._attempt += 1
        # A neighbour may have begun its next attempt: messages of it are kept.
        self._early = {
            message_key: messages
            for message_key, messages in self._early.items()
            if message_key[2] >= self._attempt
        }

    def close(self) -> None:
        """Leave the neighbours."""
        self._messenger.close()


class MultiHostTransport:
    """Transport for stages of which some are on this host.

    Args:
        near: reaches the stages of this host.
        far: reaches the others.
    Wire: that of `far`. The ledger counts the bytes of both.
    """

    def __init__(self, near: HostMemoryTransport, far: NetTransport) -> None:
        self._near, self._far = near, far

    @property
    def num_sent(self) -> int:
        return self._near.num_sent + self._far.num_sent

    def send(self, to: int, tensors: Sequence[Tensor], note: float = 0.0, *, key: int = 0) -> None:
        self._to(to).send(to, tensors, note, key=key)

    def receive(self, source: int, *, key: int = 0) -> StageMessage:
        """Receive from a neighbour; before a wait for another host, acknowledge messages of this host."""
        if source not in self._near.stages:
            self._near.acknowledge_read()
        return self._to(source).receive(source, key=key)

    def await_messages(self, counts: Mapping[int, int]) -> None:
        """Announce the messages from other hosts; those of this host arrive by themselves."""
        self._far.await_messages({stage: n for stage, n in counts.items() if stage not in self._near.stages})

    def flush(self, most: int = 0) -> None:
        """Wait until at most `most` parts are in flight on each transport.

        Stages of this host may wait for acknowledgements, so these are sent first.
        """
        self._near.acknowledge_read()
        self._near.flush(most)
        self._far.flush(most)

    def abort(self) -> None:
        self._near.abort()
        self._far.abort()

    def _to(self, stage: int) -> StageTransport:
        return self._near if stage in self._near.stages else self._far
