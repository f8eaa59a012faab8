"""A line between two ends of TCP that breaks, that loses answers, or is gone for a while."""

from __future__ import annotations

import random
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

_STEP = 1 << 14


@dataclass
class _Line:
    """One connection: what it lets through, until it breaks."""

    near: socket.socket
    far: socket.socket
    most: int  # bytes from the caller before it breaks
    deaf_after: int  # bytes from the caller after which no answer gets back
    passed: int = 0
    answered: int = 0
    threads: list[threading.Thread] = field(default_factory=list)

    def end(self) -> None:
        for end in (self.near, self.far):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class BadLine:
    """Listens at `port`, and hands on what is said there to another port of this host, badly.

    Args:
        to: where it hands on to.
        breaks: connections that break; those after them hold.
        seed: of where they do.
        most: bytes that a connection lets through at most.
    Attributes:
        num_broken: how many did.
    """

    def __init__(self, to: int, *, breaks: int = 0, seed: int = 0, most: int = 300_000) -> None:
        self._to, self._breaks, self._most = to, breaks, most
        self._rng = random.Random(seed)
        self._open = threading.Event()
        self._open.set()
        self._lines: list[_Line] = []
        self.num_broken = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.let_through()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join()
        for line in self._lines:
            line.end()
            for thread in line.threads:
                thread.join()

    def block(self) -> None:
        """Nothing gets through from now on, in either direction, and nobody is told."""
        self._open.clear()

    def let_through(self) -> None:
        """What has waited goes on."""
        self._open.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._open.wait()
                far = socket.create_connection(("127.0.0.1", self._to))
                bad = len(self._lines) < self._breaks
                most = self._rng.randrange(4_000, self._most) if bad else 1 << 62
                deaf_after = self._rng.randrange(3_000, most) if self._rng.random() < 0.5 else 1 << 62
                line = _Line(near, far, most, deaf_after)
                self._lines.append(line)
                for work in (self._there, self._back):
                    line.threads.append(threading.Thread(target=work, args=(line,), daemon=True))
                    line.threads[-1].start()

    def _there(self, line: _Line) -> None:
        with suppress(OSError):
            while data := line.near.recv(_STEP):
                self._open.wait()
                line.far.sendall(data)
                line.passed += len(data)
                if line.passed >= line.deaf_after:
                    time.sleep(0.1)  # what was said arrives, and its answer is lost
                    break
                if line.passed >= line.most:
                    break
        self.num_broken += line.passed >= min(line.most, line.deaf_after)
        line.end()

    def _back(self, line: _Line) -> None:
        with suppress(OSError):
            while data := line.far.recv(_STEP):
                self._open.wait()
                if line.passed < line.deaf_after:
                    line.near.sendall(data)
        line.end()
