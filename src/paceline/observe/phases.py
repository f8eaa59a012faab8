"""Where the time of a step goes, on this rank.

Seconds are wall time between marks on the host. On a GPU the host runs ahead of the device, so there the
shares say where the host waited. It does not synchronise the device.
"""

from __future__ import annotations

import time
from types import TracebackType

PHASES = ("data", "forward", "backward", "communication", "optimizer")


class Phases:
    """Seconds by phase since the last `take`."""

    def __init__(self) -> None:
        self._spans = {phase: _Span() for phase in PHASES}
        self._opened = time.perf_counter()

    def during(self, phase: str) -> _Span:
        """Add the time of a `with` block to `phase`; blocks of one phase do not lie in each other."""
        return self._spans[phase]

    def take(self) -> tuple[float, dict[str, float]]:
        """Seconds since the last take, and how they fall on the phases; starts anew."""
        now = time.perf_counter()
        whole, self._opened = now - self._opened, now
        spent = {}
        for phase, span in self._spans.items():
            spent[phase], span.seconds = span.seconds, 0.0
        return whole, spent


class _Span:
    """The seconds of one phase; made once, since a step opens it for every micro-batch.

    Attributes:
        seconds: what has been added since they were taken.
    """

    __slots__ = ("_began", "seconds")

    def __init__(self) -> None:
        self.seconds = self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds += time.perf_counter() - self._began
