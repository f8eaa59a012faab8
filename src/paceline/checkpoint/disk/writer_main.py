"""The process that writes beside a training: it takes of the processor what nobody else wants.

Its standard input is a socket to the process that trains. It is sent memory, and then files to write out of
it; it answers with their checksums or an error. Invariant: it ends when that process ends, also in the middle
of a file.

A thread can give its priority away and, without rights, never takes it back. So threads that have given it
away write, until the training waits for them: then others, which have kept it, write the rest.

Source: SCHED_IDLE of sched(7) of Linux; the disk takes such a thread's blocks after those of others, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from threading import Lock, Thread
from typing import Any

from paceline.checkpoint.disk.direct_write import HashedFileWrite

MAX_MESSAGE_BYTES = 2**16
_PR_SET_PDEATHSIG = 1
_LEAST_NICE = 19


class _WriterService:
    """What is written now, and for whom."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._memory = memoryview(b"")
        self._order = _WriteBatch([], self._answer)

    def serve(self) -> None:
        """Do what is asked for until the other side has gone."""
        while True:
            text, files, _, _ = socket.recv_fds(self._connection, MAX_MESSAGE_BYTES, 1)
            if not text:
                return
            asked = json.loads(text)
            if files:
                self._map(files[0])
            if "files" in asked:
                contents = [(path, self._memory[begin:end]) for path, begin, end in asked["files"]]
                self._order = _WriteBatch(contents, self._answer)
                self._order.begin()
            if asked["hurry"]:
                self._order.hurry()

    def _map(self, file: int) -> None:
        """Take the memory that was sent in place of the one before."""
        self._memory = memoryview(mmap.mmap(file, os.fstat(file).st_size, access=mmap.ACCESS_READ))
        os.close(file)

    def _answer(self, said: dict[str, Any]) -> None:
        self._connection.send(json.dumps(said).encode())


class _WriteBatch:
    """Files that are written together, each by a thread: while one waits for the disk, another hashes.

    Args:
        contents: a path and the bytes of each.
        answer: is told once, when all are written or have failed.
    """

    def __init__(
        self, contents: Sequence[tuple[str, memoryview]], answer: Callable[[dict[str, Any]], None]
    ) -> None:
        self._writings = [HashedFileWrite(path, content) for path, content in contents]
        self._answer, self._left, self._lock = answer, len(contents), Lock()
        self._hurried, self._threads = False, list[Thread]()
        self._error: OSError | None = None

    def begin(self) -> None:
        """Write beside whatever else runs."""
        self._start(self._write_beside)

    def hurry(self) -> None:
        """Write what is left with the priority of the caller; nothing if nothing is left."""
        if not self._hurried:
            self._hurried = True
            for thread in self._threads:
                thread.join()
            self._start(self._write)

    def _start(self, work: Callable[[HashedFileWrite], None]) -> None:
        todo = [writing for writing in self._writings if not writing.done]
        self._threads = [Thread(target=work, args=[writing], daemon=True) for writing in todo]
        for thread in self._threads:
            thread.start()

    def _write_beside(self, writing: HashedFileWrite) -> None:
        _lower_thread_priority()
        self._write(writing, lambda: not self._hurried)

    def _write(self, writing: HashedFileWrite, goes_on: Callable[[], bool] = lambda: True) -> None:
        while goes_on() and not writing.done:
            self._step(writing)
        if writing.done:
            self._count()

    def _step(self, writing: HashedFileWrite) -> None:
        try:
            writing.step()
        except OSError as error:
            self._error = error

    def _count(self) -> None:
        """One file less; the last one answers."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        error = self._error
        if error is None:
            self._answer({"checksums": [writing.checksum() for writing in self._writings]})
        else:
            self._answer({"errno": error.errno, "strerror": error.strerror, "path": error.filename})


def _lower_thread_priority() -> None:
    """Let this thread run only where nobody else wants to."""
    os.setpriority(os.PRIO_PROCESS, 0, _LEAST_NICE)  # of the thread that calls
    with contextlib.suppress(OSError):  # a sandbox may forbid it; then it is only nice
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main() -> None:
    """Write for the process that started this one, whose id is the last argument."""
    threading.excepthook = lambda error: os._exit(1)  # whoever waits for an answer learns of it
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they ask the training, which may save yet
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == int(sys.argv[-1]):
        with socket.socket(fileno=0) as connection, contextlib.suppress(OSError):
            _WriterService(connection).serve()
    os._exit(0)  # a thread may be writing for nobody
