"""How replicas that train alone tell each other what a shard takes them: in memory, or with their messages.

Invariant: nobody waits. What a rank says of a window all read as the same number.
Not done here: who has heard of a window by when follows from the rule (`lag` of `dealing.Dealt`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

_BITS = 40
_UNIT_SECONDS = 1e-8


def num_rows(bound: int, window: int) -> int:
    """Windows that may be written before the slowest rank has read the first of them."""
    return (2 * bound + 1) // window + 2


class Posted:
    """In memory that ranks of a host have mapped. Each word is written by one rank, whole.

    Args:
        words: by window, in a ring, and rank: the window and its seconds; int64 [rows, P].
        rank: this one.
    """

    def __init__(self, words: Tensor, rank: int) -> None:
        self._words, self._rank = words, rank

    def tell(self, window: int, seconds: float) -> None:
        """See `Notices`."""
        units = min(round(seconds / _UNIT_SECONDS), (1 << _BITS) - 1)
        self._words[window % len(self._words), self._rank] = (window + 1) << _BITS | units

    def told(self, window: int) -> Sequence[float] | None:
        """See `Notices`."""
        words: list[int] = self._words[window % len(self._words)].tolist()
        if any(word >> _BITS != window + 1 for word in words):
            return None
        return [(word & (1 << _BITS) - 1) * _UNIT_SECONDS for word in words]


class Carried:
    """With messages that ranks send each other anyway: each carries the last window of its sender.

    Args:
        rank, size: this one, of so many.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._known: dict[int, dict[int, float]] = {}  # seconds, by window and rank
        self._last: Mapping[str, Any] = {}

    def tell(self, window: int, seconds: float) -> None:
        """See `Notices`."""
        self._last = {"window": window, "seconds": seconds}
        self.hear(self._rank, self._last)

    def told(self, window: int) -> Sequence[float] | None:
        """See `Notices`; what is older is forgotten."""
        self._known = {key: found for key, found in self._known.items() if key >= window}
        found = self._known.get(window, {})
        return [found[rank] for rank in range(self._size)] if len(found) == self._size else None

    def say(self) -> Mapping[str, Any]:
        """Fields of this rank's next message."""
        return self._last

    def hear(self, rank: int, fields: Mapping[str, Any]) -> None:
        """Those of a message of another."""
        if "window" in fields:
            self._known.setdefault(int(fields["window"]), {})[rank] = float(fields["seconds"])
