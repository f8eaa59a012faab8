"""What compiling a model has cost, in seconds and in steps: nobody knows it before."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

_LATER_STEPS = 5


class CompileCost:
    """Watches the first steps of a model that is compiled when it is first called."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def follow(self, seconds: float) -> Mapping[str, Any] | None:
        """Note the wall time of a step; returns the event `compile` when it is known."""
        if len(self._seconds) > _LATER_STEPS:
            return None
        self._seconds.append(seconds)
        if len(self._seconds) <= _LATER_STEPS:
            return None
        first, usual = self._seconds[0], median(self._seconds[1:])
        spent = max(0.0, first - usual)
        return {"seconds": spent, "steps": int(spent / usual) if usual > 0 else 0}
