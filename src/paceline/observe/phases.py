"""Where the time of a step goes, on this rank.

Seconds are wall time between marks on the host. On a GPU the host runs ahead of the device, so there the
shares say where the host waited. It does not synchronise the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PHASES = ("data", "forward", "backward", "communication", "optimizer")


class Phases:
    """Seconds by phase since the last `take`."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._opened = time.perf_counter()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Add the time of the block to `phase`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - began

    def take(self) -> tuple[float, dict[str, float]]:
        """Seconds since the last take, and how they fall on the phases; starts anew."""
        now = time.perf_counter()
        whole, parts = now - self._opened, self._seconds
        self._opened, self._seconds = now, dict.fromkeys(PHASES, 0.0)
        return whole, parts
