"""The side of the training: memory that it fills, and the process that writes files out of it.

Invariant: the memory has no name, and the process ends with the one that started it, so neither can be left
behind.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

import xxhash

from paceline.checkpoint.disk.writer_main import MAX_MESSAGE_BYTES

_PROGRAM = (
    "import sys; sys.path[:0] = sys.argv[1:-1]; from paceline.checkpoint.disk.writer_main import main; main()"
)
_PACKAGE_ROOTS = [str(Path(file).parents[depth]) for file, depth in ((__file__, 3), (xxhash.__file__, 1))]
"""Where the two packages lie that the process needs; it looks for no others."""
_VARIABLES = ("PATH", "LD_LIBRARY_PATH")  # what a Python may need to start; the rest is the training's
_EXIT_SECONDS = 5.0
_POLL_SECONDS = 0.5
"""Between two looks whether it still runs."""


class WriterLostError(Exception):
    """The process that writes has ended, or could not be started."""


def can_use_writer_process() -> bool:
    """Whether this system has memory without a name, and threads that stand back."""
    return hasattr(os, "memfd_create") and hasattr(os, "SCHED_IDLE")


class WriterProcess:
    """A process that writes files; it is started at the first one.

    Args:
        environ: of this process.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = {name: environ[name] for name in _VARIABLES if name in environ}
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = Lock()
        self._hurry = False
        self._memory = -1
        self._told = -1

    def memory(self, num_bytes: int) -> mmap.mmap:
        """New memory for what is to be written, in place of the one before; zeros.

        Raises:
            OSError: there is not so much.
        """
        file = os.memfd_create("paceline-checkpoint")
        try:
            os.ftruncate(file, num_bytes)
            found = mmap.mmap(file, num_bytes)
        except OSError:
            os.close(file)
            raise
        self._forget_memory()
        self._memory = file
        return found

    def begin(self) -> None:
        """Files from here on are not waited for, until `hurry`; starts the process if there is none.

        Raises:
            WriterLostError: it cannot be started.
        """
        self._hurry = False
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._start()

    def write(self, files: Sequence[tuple[str, int, int]], patience_seconds: float) -> list[str]:
        """Write parts of the memory to files; called by one thread at a time.

        Args:
            files: of each the path, and where in the memory it begins and ends.
            patience_seconds: after which it is waited for, and hurries.
        Returns:
            The checksum of each file; all are on the disk.
        Raises:
            OSError: the disk refused.
            WriterLostError: the process has ended or is stopped; the files are not complete.
        """
        try:
            with self._lock:
                self._send({"files": files})
            self._wait_for_reply(patience_seconds)
            said = self._connection.recv(MAX_MESSAGE_BYTES)
        except (BrokenPipeError, ConnectionResetError):
            said = b""
        if not said:
            raise WriterLostError("the process that writes checkpoints has ended")
        answer = json.loads(said)
        if "checksums" in answer:
            return list(map(str, answer["checksums"]))
        raise OSError(answer["errno"], answer["strerror"], answer["path"])

    def hurry(self) -> None:
        """The training waits: write with its own priority what is under way, and what comes until `begin`."""
        with self._lock:
            if not self._hurry and self._process is not None:
                self._hurry = True
                with suppress(OSError):  # it has ended, which `write` notices
                    self._send({})

    def close(self) -> None:
        """End the process; what it was writing is lost."""
        self._end()
        self._forget_memory()

    def _wait_for_reply(self, patience_seconds: float) -> None:
        """Return when it has answered or ended; it hurries once the patience is spent."""
        hurries, stopped = time.monotonic() + patience_seconds, False
        while not select.select([self._connection], [], [], _POLL_SECONDS)[0]:
            if time.monotonic() >= hurries:
                self.hurry()
            before, stopped = stopped, self._is_stopped()
            if before and stopped:  # once may be a job that was stopped as a whole, and goes on
                self._end()
                raise WriterLostError("the process that writes checkpoints was stopped by a signal")

    def _is_stopped(self) -> bool:
        """Whether a signal has stopped it; whoever has ended is noticed by its connection."""
        assert self._process is not None
        flags = os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT
        with suppress(ChildProcessError):
            found = os.waitid(os.P_PID, self._process.pid, flags)
            return found is not None and found.si_code == os.CLD_STOPPED
        return False

    def _end(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait(_EXIT_SECONDS)
                self._connection.close()
                self._process, self._told = None, -1

    def _forget_memory(self) -> None:
        if self._memory >= 0:
            os.close(self._memory)
        self._memory = self._told = -1

    def _start(self) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [sys.executable, "-I", "-S", "-X", "utf8", "-c", _PROGRAM, *_PACKAGE_ROOTS, str(os.getpid())]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    words,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=self._environ,
                )
        except OSError as error:
            self._connection.close()
            raise WriterLostError(
                f"the process that writes checkpoints cannot be started: {error}"
            ) from error

    def _send(self, asked: Mapping[str, Any]) -> None:
        files = [self._memory] if self._told != self._memory else []
        socket.send_fds(self._connection, [json.dumps({**asked, "hurry": self._hurry}).encode()], files)
        self._told = self._memory
