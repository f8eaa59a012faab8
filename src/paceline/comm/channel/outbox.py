"""What one peer has not taken yet: written when its socket takes it, so that nobody waits for a slow reader.

Invariant: what was put is written once, whole and in order. What waits is a copy, so the owner of a tensor
may change it as soon as `put` has returned, unless it says that nobody will. It does not bound how much
waits: whoever sends large messages waits for an answer to one before the next.
"""

from __future__ import annotations

import math
import socket
import time
from collections import deque
from collections.abc import Iterable


class Outbox:
    """Bytes for one socket.

    Args:
        connection: connected; it does not block.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._waiting: deque[memoryview] = deque()
        self._patience = math.inf
        self.moved_at = time.monotonic()

    @property
    def num_bytes(self) -> int:
        """How much waits."""
        return sum(len(part) for part in self._waiting)

    @property
    def expires_at(self) -> float:
        """When the peer has read nothing for too long, on the monotonic clock; infinity: nothing waits."""
        return self.moved_at + self._patience if self._waiting else math.inf

    def put(self, parts: Iterable[memoryview], patience_seconds: float, *, lasts: bool = False) -> None:
        """Write what the socket takes now, and keep a copy of the rest.

        Args:
            parts: bytes, in order; not used after this returns, unless they last.
            patience_seconds: how long the peer may read nothing while something waits.
            lasts: they do not change any more.
        Raises:
            OSError: the connection is broken.
        """
        self._patience = patience_seconds
        rest = deque(part for part in parts if part)
        if not self._waiting:
            self.moved_at = time.monotonic()
            while rest and self._send(rest):
                pass
        if rest:
            self._waiting.extend(rest if lasts else (memoryview(b"".join(rest)),))

    def write(self) -> None:
        """Write once, as much as the socket takes.

        Raises:
            OSError: the connection is broken.
        """
        if self._waiting:
            self._send(self._waiting)

    def _send(self, parts: deque[memoryview]) -> bool:
        """Whether the socket took some of the first part; what it took is removed."""
        try:
            taken = self._socket.send(parts[0])
        except BlockingIOError:
            return False
        self.moved_at = time.monotonic()
        parts[0] = parts[0][taken:]
        if not parts[0]:
            parts.popleft()
        return True
