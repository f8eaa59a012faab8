"""The training side of the writer process: memory that the training fills, and the process that writes files
out of it.

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
"""Folders of the two packages that the process needs; with -I and -S it searches no others."""
_VARIABLES = ("PATH", "LD_LIBRARY_PATH")  # needed to start Python; other variables belong to the training
_EXIT_SECONDS = 5.0
_POLL_SECONDS = 0.5
"""Time between two checks that the process still runs."""


class WriterLostError(Exception):
    """The writer process has ended, or could not be started."""


def can_use_writer_process() -> bool:
    """Return whether this system has anonymous memory files and idle scheduling."""
    return hasattr(os, "memfd_create") and hasattr(os, "SCHED_IDLE")


class WriterProcess:
    """A process that writes files; it is started when the first save begins.

    Args:
        environ: of this process.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = {name: environ[name] for name in _VARIABLES if name in environ}
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = Lock()
        self._hurry = False
        self._memory = -1
        self._sent_memory = -1

    def memory(self, num_bytes: int) -> mmap.mmap:
        """Return new zeroed memory for the files of a save, in place of the previous memory.

        Raises:
            OSError: there is not enough memory.
        """
        file = os.memfd_create("paceline-checkpoint")
        try:
            os.ftruncate(file, num_bytes)
            new_memory = mmap.mmap(file, num_bytes)
        except OSError:
            os.close(file)
            raise
        self._forget_memory()
        self._memory = file
        return new_memory

    def begin(self) -> None:
        """Start a save at low priority; start the process if there is none.

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
            files: path of each file, and its begin and end in the memory.
            patience_seconds: time after which the process gets full priority.
        Returns:
            The checksum of each file; all are on the disk.
        Raises:
            OSError: the write failed.
            WriterLostError: the process has ended or was stopped; the files are not complete.
        """
        try:
            with self._lock:
                self._send({"files": files})
            self._wait_for_reply(patience_seconds)
            reply = self._connection.recv(MAX_MESSAGE_BYTES)
        except (BrokenPipeError, ConnectionResetError):
            reply = b""
        if not reply:
            raise WriterLostError("the checkpoint writer process has ended")
        answer = json.loads(reply)
        if "checksums" in answer:
            return list(map(str, answer["checksums"]))
        raise OSError(answer["errno"], answer["strerror"], answer["path"])

    def hurry(self) -> None:
        """Write the save in progress at full priority, because the training waits; holds until `begin`."""
        with self._lock:
            if not self._hurry and self._process is not None:
                self._hurry = True
                with suppress(OSError):  # the process has ended, which `write` notices
                    self._send({})

    def close(self) -> None:
        """End the process; what it was writing is lost."""
        self._end()
        self._forget_memory()

    def _wait_for_reply(self, patience_seconds: float) -> None:
        """Return when the process has replied or ended; raise its priority after `patience_seconds`."""
        hurries, stopped = time.monotonic() + patience_seconds, False
        while not select.select([self._connection], [], [], _POLL_SECONDS)[0]:
            if time.monotonic() >= hurries:
                self.hurry()
            before, stopped = stopped, self._is_stopped()
            if before and stopped:  # once can be a job that was stopped as a whole and continues
                self._end()
                raise WriterLostError("the checkpoint writer process was stopped by a signal")

    def _is_stopped(self) -> bool:
        """Return whether a signal has stopped the process; its end shows in the connection."""
        assert self._process is not None
        flags = os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT
        with suppress(ChildProcessError):
            memory = os.waitid(os.P_PID, self._process.pid, flags)
            return memory is not None and memory.si_code == os.CLD_STOPPED
        return False

    def _end(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait(_EXIT_SECONDS)
                self._connection.close()
                self._process, self._sent_memory = None, -1

    def _forget_memory(self) -> None:
        if self._memory >= 0:
            os.close(self._memory)
        self._memory = self._sent_memory = -1

    def _start(self) -> None:
        self._connection, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [
            sys.executable,
            "-I",
            "-S",
            "-X",
            "utf8",
            "-c",
            _PROGRAM,
            *_PACKAGE_ROOTS,
            str(os.getpid()),
        ]
        try:
            with child_end:
                self._process = subprocess.Popen(
                    command,
                    stdin=child_end.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=self._environ,
                )
        except OSError as error:
            self._connection.close()
            raise WriterLostError(f"the checkpoint writer process cannot be started: {error}") from error

    def _send(self, request: Mapping[str, Any]) -> None:
        files = [self._memory] if self._sent_memory != self._memory else []
        socket.send_fds(self._connection, [json.dumps({**request, "hurry": self._hurry}).encode()], files)
        self._sent_memory = self._memory
