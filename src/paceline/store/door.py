"""The door of a store that is called from other nodes: who shows that it knows the key comes in.

Invariant: nothing is read from a caller that has not, but its greeting (`paceline.guests`).
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from paceline.guests import VISITORS, Guests

_LOOK_SECONDS = 0.25
_MOST_LETTERS, _MOST_TOLD = 300, 20


class Door:
    """Keeps a listening socket.

    Args:
        token: the key of the job.
        adopt: takes the number and the connection of one that came in.
        has_come: whether a number is in already.
        say: is told of members with another key, once each.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        adopt: Callable[[int, socket.socket], None],
        has_come: Callable[[int], bool],
        say: Callable[[str], object],
    ) -> None:
        self._listener, self._adopt, self._say = listener, adopt, say
        self._guests = Guests(listener, token, range(2 * VISITORS), has_come)
        self._told: set[int] = set()

    def keep(self, closing: Callable[[], bool]) -> None:
        """Until it is closing."""
        try:
            while not closing():
                self._guests.hear(_LOOK_SECONDS)
                for number in [*self._guests.found]:
                    self._adopt(number, self._guests.found.pop(number))
                self._tell()
        finally:
            self._guests.close()
            self._listener.close()

    def _tell(self) -> None:
        wrong = {number % VISITORS for number in self._guests.wrong_keys}
        for number in sorted(wrong - self._told)[: _MOST_TOLD - len(self._told)]:
            self._told.add(number)
            self._say(turned_away(f"Rank {number} has another token than this job"))


def turned_away(what: str) -> str:
    """A short line, whatever a stranger has written into it."""
    plain = "".join(letter if letter.isprintable() else "?" for letter in what[:_MOST_LETTERS])
    return f"turned away: {plain}\n"
