"""What the table `[debug]` of a recipe asks for, around every round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

from paceline.comm import Collective, Net
from paceline.comm.races import RaceDetector, WatchedCollective
from paceline.observe import Stats
from paceline.recipe.debug import DebugRecipe


class Debugging:
    """Checks of one session.

    Args:
        wanted: which.
        net: whose bytes are held against their closed forms.
    """

    def __init__(self, wanted: DebugRecipe, net: Net) -> None:
        self._wanted, self._net = wanted, net
        self._detector = RaceDetector() if wanted.races else None

    def watched(self, path: Collective) -> Collective:
        """The collective, whose tensors are watched where races are looked for."""
        return path if self._detector is None else WatchedCollective(path, self._detector)

    def rounds(self, rounds: Iterator[Stats]) -> Iterator[Stats]:
        """The same rounds.

        Raises:
            CommunicationError: a tensor was touched while it was under way, or bytes are not those of the
                form.
        """
        if self._detector is None and not self._wanted.bytes:
            return rounds
        return self._watched_rounds(rounds)

    def _watched_rounds(self, rounds: Iterator[Stats]) -> Iterator[Stats]:
        while True:
            with self._detector or nullcontext():
                stats = next(rounds, None)
            if stats is None:
                return
            if self._wanted.bytes:
                self._net.ledger.require_forms()
            yield stats
