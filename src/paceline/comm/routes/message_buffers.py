"""Buffers that one rank writes and another reads, a message in each.

They are made when messages need them, as large as these are; where only smaller ones are free, a larger one
takes the place of the largest. Invariant: a buffer is not written again before its message was taken. There
are as many as messages were on the way at a time, so none waits for its reader.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm.routes.host_memory import mapped, reserve


class MessageBuffer(NamedTuple):
    """One that a message is written into.

    Args:
        number: counted from 0.
        memory: uint8 [n], of which the message takes the beginning.
        file: of memory that the reader has not mapped yet; None: it has.
    """

    number: int
    memory: Tensor
    file: int | None


class MessageBuffers:
    """What this rank writes for one other, who takes messages in their order."""

    def __init__(self) -> None:
        self._memory: list[Tensor] = []
        self._on_the_way: deque[int] = deque()  # the oldest message first

    @contextmanager
    def lend(self, num_bytes: int) -> Iterator[MessageBuffer]:
        """A free buffer, from now on that of a message on the way: the smallest that is large enough, or new.

        After an error the message was never there.

        Raises:
            CommunicationError: the machine has no memory left.
        """
        number, file, is_sent = self._choose(num_bytes), None, False
        try:
            if self._size(number) < num_bytes:
                file = self._make(number, num_bytes)
            yield MessageBuffer(number, self._memory[number], file)
            is_sent = True
        finally:
            if file is not None:
                os.close(file)
            if is_sent:
                self._on_the_way.append(number)
            else:
                self._drop(number)  # its reader may not know it

    def has_free(self, num_bytes: int) -> bool:
        """Whether a message of so many bytes needs no new buffer."""
        return self._size(self._choose(num_bytes)) >= num_bytes

    def free_oldest(self) -> None:
        """The reader has taken the oldest message."""
        self._on_the_way.popleft()

    def _choose(self, num_bytes: int) -> int:
        """The smallest free one that is large enough; else the largest that is free; else a new one."""
        free = {*range(len(self._memory))} - {*self._on_the_way}
        enough = [number for number in free if self._size(number) >= num_bytes]
        return min(enough, key=self._size) if enough else max(free, key=self._size, default=len(self._memory))

    def _size(self, number: int) -> int:
        return self._memory[number].numel() if number < len(self._memory) else 0

    def _make(self, number: int, num_bytes: int) -> int:
        """Reserve memory for a buffer, new or in place of a smaller one; its open file."""
        size = whole_pages(num_bytes)
        self._drop(number)  # before there is more
        file = reserve(size, "paceline-messages")
        self._memory[number] = mapped(file, size, torch.uint8)
        return file

    def _drop(self, number: int) -> None:
        self._memory[number : number + 1] = [torch.empty(0, dtype=torch.uint8)]


def whole_pages(num_bytes: int) -> int:
    """Bytes of a buffer for a message of so many."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
