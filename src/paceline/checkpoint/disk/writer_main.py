"""The process that writes checkpoint files at idle priority while another one trains.

Its standard input is a socket to the training process. It receives memory, and then files to write out of it;
it replies with their checksums or an error.

Invariant: it ends when the training process ends, also in the middle of a file. A thread without privileges
can lower its priority but not raise it again. So threads with low priority write until the training waits;
then new threads, which still have full priority, write the rest.

Source: SCHED_IDLE of sched(7) of Linux; the disk also serves such a thread's blocks after those of others.
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
_LOWEST_PRIORITY = 19


class _WriterService:
    """The connection to the training process, and the present batch of files."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._memory = memoryview(b"")
        self._batch = _WriteBatch([], self._reply)

    def serve(self) -> None:
        """Serve requests until the training process closes the connection."""
        while True:
            text, files, _, _ = socket.recv_fds(self._connection, MAX_MESSAGE_BYTES, 1)
            if not text:
                return
            request = json.loads(text)
            if files:
                self._map(files[0])
            if "files" in request:
                contents = [(path, self._memory[begin:end]) for path, begin, end in request["files"]]
                self._batch = _WriteBatch(contents, self._reply)
                self._batch.begin()
            if request["hurry"]:
                self._batch.hurry()

    def _map(self, file: int) -> None:
        """Map the received memory in place of the previous one."""
        self._memory = memoryview(mmap.mmap(file, os.fstat(file).st_size, access=mmap.ACCESS_READ))
        os.close(file)

    def _reply(self, message: dict[str, Any]) -> None:
        self._connection.send(json.dumps(message).encode())


class _WriteBatch:
    """Files that are written together, one thread each: while one waits for the disk, another hashes.

    Args:
        contents: path and bytes of each file.
        reply: called once, when all files are written or have failed.
    """

    def __init__(
        self, contents: Sequence[tuple[str, memoryview]], reply: Callable[[dict[str, Any]], None]
    ) -> None:
        self._writes = [HashedFileWrite(path, content) for path, content in contents]
        self._reply, self._num_left, self._lock = reply, len(contents), Lock()
        self._is_hurried, self._threads = False, list[Thread]()
        self._error: OSError | None = None

    def begin(self) -> None:
        """Write at low priority."""
        self._start(self._write_at_low_priority)

    def hurry(self) -> None:
        """Write what is left at the priority of the caller."""
        if not self._is_hurried:
            self._is_hurried = True
            for thread in self._threads:
                # A thread cannot raise its priority again, so it ends after its block, and a new one
                # continues.
                thread.join()
            self._start(self._write)

    def _start(self, work: Callable[[HashedFileWrite], None]) -> None:
        todo = [write for write in self._writes if not write.done]
        self._threads = [Thread(target=work, args=[write], daemon=True) for write in todo]
        for thread in self._threads:
            thread.start()

    def _write_at_low_priority(self, write: HashedFileWrite) -> None:
        _lower_thread_priority()
        self._write(write, lambda: not self._is_hurried)

    def _write(self, write: HashedFileWrite, goes_on: Callable[[], bool] = lambda: True) -> None:
        while goes_on() and not write.done:
            self._step(write)
        if write.done:
            self._count()

    def _step(self, write: HashedFileWrite) -> None:
        try:
            write.step()
        except OSError as error:
            self._error = error

    def _count(self) -> None:
        """Count one file less; the last one sends the reply."""
        with self._lock:
            self._num_left -= 1
            if self._num_left:
                return
        error = self._error
        if error is None:
            self._reply({"checksums": [write.checksum() for write in self._writes]})
        else:
            self._reply({"errno": error.errno, "strerror": error.strerror, "path": error.filename})


def _lower_thread_priority() -> None:
    """Run this thread only while no other thread wants the CPU."""
    os.setpriority(os.PRIO_PROCESS, 0, _LOWEST_PRIORITY)  # on Linux of the calling thread
    with contextlib.suppress(OSError):  # a sandbox can forbid it; the nice value remains
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main() -> None:
    """Write files for the process that started this one, whose id is the last argument."""
    threading.excepthook = lambda error: os._exit(1)  # the training process notices the closed connection
    # These signals are for the training process, which can still save.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == int(sys.argv[-1]):
        with socket.socket(fileno=0) as connection, contextlib.suppress(OSError):
            _WriterService(connection).serve()
    os._exit(0)  # threads that still write are not needed
