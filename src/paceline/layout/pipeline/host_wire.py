"""What stages of one host send each other: it lies in memory that both have mapped, a message in one part.

Invariant: what was received has memory of its own, since a module may change its input, and the buffer
is written again. Messages are found by key and attempt: what an aborted run has left is never taken for
something new, and a neighbour may have begun its next attempt before this stage has given up the last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor

from paceline.comm.routes import HostMail
from paceline.layout.pipeline.letter import Letter, read_whole, write_whole
from paceline.layout.pipeline.wire import Message


class HostWire:
    """Stages that are ranks of a group, on one host.

    Args:
        mail: between them; `close` closes it.
    Attributes:
        stages: those that it reaches.
    Wire: nothing. The ledger counts a description of 512 bytes for each message, longer with many tensors,
        and the tensors, which begin at multiples of 64 bytes.
    """

    def __init__(self, mail: HostMail) -> None:
        self._mail, self.stages = mail, mail.places
        self._attempt = self.num_sent = 0
        self._early: dict[tuple[int, int, int], deque[Message]] = {}

    def send(self, to: int, tensors: Sequence[Tensor], note: float = 0.0, *, key: int = 0) -> None:
        """See `Neighbours`; the tensors may change afterwards."""
        letter = Letter.of(tensors, note, key, self._attempt)
        self._mail.send(to, letter.num_bytes, partial(write_whole, letter, tensors))
        self.num_sent += 1

    def receive(self, source: int, *, key: int = 0) -> Message:
        """See `Neighbours`."""
        wanted = source, key, self._attempt
        while not self._early.get(wanted):
            letter, found = self._mail.take(source, read_whole)
            if letter.attempt >= self._attempt:
                place = source, letter.key, letter.attempt
                self._early.setdefault(place, deque()).append((found, letter.note))
        return self._early[wanted].popleft()

    def say_taken(self) -> None:
        """See `HostMail`."""
        self._mail.say_taken()

    def await_messages(self, counts: Mapping[int, int]) -> None:
        """Does nothing: they come by themselves."""

    def flush(self, most: int = 0) -> None:
        """See `Neighbours`; the tensors are free before, and this holds a stage back that runs ahead."""
        self._mail.flush(most)

    def abort(self) -> None:
        """See `Neighbours`."""
        self._mail.abort()
        self._attempt += 1
        self._early = {place: found for place, found in self._early.items() if place[2] >= self._attempt}

    def close(self) -> None:
        """Leave the neighbours."""
        self._mail.close()
