"""A line: one thread that takes the later hops of collectives while training goes on.

Each hop waits for the one before it, so the caller can launch the first only. Every process group is used by
one
thread, and buffers pass through it in the order of their launch: so there is one order on every rank.
Invariant: after an error, nothing that waits behind it is started before `mend`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from paceline.comm.handle import Handle
from paceline.errors import CommunicationError


class Line:
    """Runs hops one after another.

    Args:
        name: of the thread.
        count_seconds: is told how long a caller waited for the line.
    """

    def __init__(self, name: str, count_seconds: Callable[[str, float], None]) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._count_seconds = count_seconds
        self._broken: CommunicationError | None = None

    def submit(self, op: str, hops: Callable[[], Any]) -> Handle:
        """Run hops in their turn; the handle returns what they return. Each of their waits has a deadline."""
        under_way = self._pool.submit(self._unless_broken, hops)

        def resolve(deadline_seconds: float | None, exposed: bool) -> Any:
            began = time.perf_counter()
            try:
                return under_way.result()
            finally:
                if exposed:
                    self._count_seconds(op, time.perf_counter() - began)

        return Handle(resolve, under_way.done)

    def mend(self) -> None:
        """Forget that something broke."""
        self._broken = None

    def close(self) -> None:
        """End the thread; what was launched has been waited for."""
        self._pool.shutdown()

    def _unless_broken(self, hops: Callable[[], Any]) -> Any:
        if self._broken is not None:
            raise self._broken
        try:
            return hops()
        except CommunicationError as error:
            self._broken = error
            raise
