"""The door of a store that is called from other nodes: who shows that it knows the key comes in.

Invariant: nothing is read from a caller that has not, but its greeting (`paceline.guests`). Where the job
encrypts, nothing else is said before the connection does (`paceline.tls`).
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from paceline.errors import CommunicationError
from paceline.guests import HELLO_SECONDS, VISITORS, Guests

_LOOK_SECONDS = 0.25
_MOST_LETTERS, _MOST_TOLD = 300, 20


class Door:
    """Keeps a listening socket.

    Args:
        token: the key of the job.
        adopt: takes the number and the connection of one that came in.
        has_come: whether a number is in already.
        say: is told of members with another key, once each.
        tls: whether connections are encrypted.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        adopt: Callable[[int, socket.socket], None],
        has_come: Callable[[int], bool],
        say: Callable[[str], object],
        *,
        tls: bool = False,
    ) -> None:
        self._listener, self._adopt, self._say = listener, adopt, say
        self._guests = Guests(listener, token, range(2 * VISITORS), has_come, tls=tls)
        self._bring_in = Securing(token, adopt, has_come, say) if tls else adopt
        self._told: set[int] = set()

    def keep(self, closing: Callable[[], bool]) -> None:
        """Until it is closing."""
        try:
            while not closing():
                self._guests.hear(_LOOK_SECONDS)
                for number in [*self._guests.found]:
                    self._bring_in(number, self._guests.found.pop(number))
                self._tell()
        finally:
            self._guests.close()
            self._listener.close()

    def _tell(self) -> None:
        wrong = {number % VISITORS: what for number, what in self._guests.unfit.items()}
        for number in sorted(wrong.keys() - self._told)[: _MOST_TOLD - len(self._told)]:
            self._told.add(number)
            self._say(turned_away(f"Rank {number} has {wrong[number]} than this job"))


class Securing:
    """Encrypts the connections of those that have come in, each in a thread of its own: nobody waits for one.

    Args:
        token, adopt, has_come, say: as for `Door`.
    """

    def __init__(
        self,
        token: str,
        adopt: Callable[[int, socket.socket], None],
        has_come: Callable[[int], bool],
        say: Callable[[str], object],
    ) -> None:
        from paceline.tls import Certificate

        self._token, self._adopt, self._has_come, self._say = token, adopt, has_come, say
        self._certificate = Certificate.make()

    def __call__(self, number: int, connection: socket.socket) -> None:
        threading.Thread(
            target=self._secure, args=(number, connection), daemon=True, name="paceline-store-tls"
        ).start()

    def _secure(self, number: int, connection: socket.socket) -> None:
        from paceline.tls import secure_called

        try:
            line = secure_called(connection, self._certificate, self._token, number, HELLO_SECONDS)
        except CommunicationError as error:
            self._say(turned_away(error.what))
            return
        except OSError:
            return  # it has hung up, or says nothing: it calls again, or its own deadline ends it
        if self._has_come(number):
            line.close()
        else:
            self._adopt(number, line)


def turned_away(what: str) -> str:
    """A short line, whatever a stranger has written into it."""
    plain = "".join(letter if letter.isprintable() else "?" for letter in what[:_MOST_LETTERS])
    return f"turned away: {plain}\n"
