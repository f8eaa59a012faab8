"""Time in which a launcher looked at its workers. Pure: the clock is an argument.

Whoever stands still, as everything does on a machine that is asleep or that gives its cores to others for a
while, sees nothing of what the workers have done since; they stood still as well.
"""

from __future__ import annotations

_LONGEST_SECONDS = 0.25  # between two looks; what is more is left out


class Awake:
    """A clock that leaves out the time in which nobody looked at it."""

    def __init__(self) -> None:
        self._left_out, self._looked_at = 0.0, float("inf")

    def at(self, now: float) -> float:
        """Seconds of this clock, at a look.

        Args:
            now: on the monotonic clock, never earlier than at the look before.
        """
        self._left_out += max(0.0, now - self._looked_at - _LONGEST_SECONDS)
        self._looked_at = now
        return now - self._left_out
