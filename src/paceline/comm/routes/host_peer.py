"""Another rank of this host as a link knows it: a socket, and what was heard through it."""

from __future__ import annotations

import socket
from typing import NamedTuple

_LARGEST_BYTES = 4096  # of a message


class Signal(NamedTuple):
    """What a rank says to all others of the host, once.

    Args:
        phase: what has been done.
        number: to which sum, counted from 0 on every rank.
        label: of what; a rank that says another one is out of step.
    """

    phase: int
    number: int
    label: str

    def encode(self) -> bytes:
        """One line of a message."""
        return f"{self.phase} {self.number} {self.label}".encode()

    @classmethod
    def decode(cls, message: bytes) -> Signal:
        """The inverse of `encode`."""
        phase, number, label = message.decode().split(" ", 2)
        return cls(int(phase), int(number), label)


class Peer:
    """One rank at the other end of a socket, and what it has said."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.socket = rank, connection
        self.said: dict[tuple[int, int], str] = {}
        self.files: list[int] = []
        self.gone = False

    def read(self) -> bool:
        """Take one message, if there is one; whether there was."""
        try:
            data, files, _, _ = socket.recv_fds(self.socket, _LARGEST_BYTES, 1, socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionResetError):  # it left unheard; what it said before is still there
            return False
        except OSError:
            data, files = b"", []
        self.gone = not data
        self.files += files
        if data and not files:
            for line in data.split(b"\n"):
                signal = Signal.decode(line)
                self.said[signal.phase, signal.number] = signal.label
        return bool(data)
