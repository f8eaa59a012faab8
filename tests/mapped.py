"""What a rank maps of memory that ranks of its host have in common."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from paceline.comm.routes import host_messages
from paceline.comm.routes.shared_memory import SharedMemoryCollective


class Mapped:
    """Counts what is mapped here of memory that other ranks of the host have, too, and that is theirs.

    Attributes:
        num_bytes: now.
        noted: when they changed (nanoseconds), and by how much.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.noted: list[tuple[int, int]] = []

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count inside."""
        sums = patch.object(SharedMemoryCollective, "_map", self._of_all(SharedMemoryCollective._map))
        with (
            sums,
            patch.object(host_messages, "map_shared_tensor", self._of_one(host_messages.map_shared_tensor)),
        ):
            yield

    def _of_all(self, plain: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
        """Each of the ranks has a share of all."""

        def call(collective: SharedMemoryCollective, *args: Any) -> list[Tensor]:
            begin = time.time_ns()
            found, size = plain(collective, *args), collective.group.size
            self._count(begin, found[0], (size - 1) * sum(t.nbytes for t in found) // size)
            return found

        return call

    def _of_one(self, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any) -> Tensor:
            begin = time.time_ns()
            found = plain(*args)
            self._count(begin, found, found.nbytes)
            return found

        return call

    def _count(self, at: int, mapped: Tensor, num_bytes: int) -> None:
        """Until it is mapped no more, as where a larger one takes its place; the first goes last."""
        self._note(at, num_bytes)
        weakref.finalize(mapped.untyped_storage(), self._gone, num_bytes)

    def _gone(self, num_bytes: int) -> None:
        self._note(time.time_ns(), -num_bytes)

    def _note(self, at: int, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.noted.append((at, num_bytes))
