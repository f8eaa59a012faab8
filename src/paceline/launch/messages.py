"""Messages over a Unix socket: a JSON value, and open files with it.

Invariant: a message arrives whole or not at all.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

_LENGTH_BYTES = 8
_MOST_FILES = 8
_MOST_BYTES = 2**24


def send(connection: socket.socket, value: Any, files: Sequence[int] = ()) -> None:
    """Send a value; the other side gets copies of the open `files`."""
    text = json.dumps(value).encode()
    socket.send_fds(connection, [len(text).to_bytes(_LENGTH_BYTES, "big")], files)
    connection.sendall(text)


def receive(connection: socket.socket) -> tuple[Any, list[int]] | None:
    """Wait for a message; None if the other side is gone, or says what is none.

    Raises:
        TimeoutError: the socket has a time-out, and it has passed.
    """
    head, files, *_ = socket.recv_fds(connection, _LENGTH_BYTES, _MOST_FILES)
    length = int.from_bytes(head, "big") if len(head) == _LENGTH_BYTES else 0
    try:
        text = _read(connection, length) if length <= _MOST_BYTES else b""
        if text:
            return json.loads(text), files
    except (ValueError, RecursionError):
        pass  # what it says is no message: it is gone as a partner
    for file in files:
        os.close(file)
    return None


def expect(connection: socket.socket) -> tuple[Any, list[int]]:
    """Wait for a message that has to come.

    Raises:
        EOFError: the other side is gone.
        TimeoutError: as for `receive`.
    """
    message = receive(connection)
    if message is None:
        raise EOFError
    return message


def _read(connection: socket.socket, count: int) -> bytes:
    parts = []
    while count and (part := connection.recv(min(count, 1 << 20))):
        parts.append(part)
        count -= len(part)
    return b"" if count else b"".join(parts)
