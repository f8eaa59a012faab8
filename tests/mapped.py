"""What a rank maps of memory that ranks of its host have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from paceline.comm.routes import host_mail
from paceline.comm.routes.shared_memory import SharedMemoryCollective


class Mapped:
    """Counts what is mapped here of memory that other ranks of the host have, too, and that is theirs."""

    def __init__(self) -> None:
        self.num_bytes = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count inside."""
        sums = patch.object(SharedMemoryCollective, "_map", self._of_all(SharedMemoryCollective._map))
        with sums, patch.object(host_mail, "mapped", self._of_one(host_mail.mapped)):
            yield

    def _of_all(self, plain: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
        """Each of the ranks has a share of all."""

        def call(collective: SharedMemoryCollective, *args: Any) -> list[Tensor]:
            found, size = plain(collective, *args), collective.group.size
            self.num_bytes += (size - 1) * sum(t.nbytes for t in found) // size
            return found

        return call

    def _of_one(self, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any) -> Tensor:
            found = plain(*args)
            self.num_bytes += found.nbytes
            return found

        return call
