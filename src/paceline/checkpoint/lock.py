"""The lock of a folder: one job at a time writes to it, and a dead owner does not hold it.

On a file system it is the kernel's lock (flock), which ends with its process, and which NFS 4 carries from
host to host. A store without locks, and a host whose locks others do not see, is watched: an owner writes a
new number every few seconds, so an owner whose number stands still is dead.

Invariant: a process that is known to live never loses its lock.
Not done here: two jobs that reach an object store in the same second can both see it empty; the one that
later finds the name of the other reports it.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from paceline.checkpoint.storage import StorageFolder
from paceline.checkpoint.strict_json import parse
from paceline.errors import CheckpointError
from paceline.observe.process_info import process_start_ticks

LOCK_FILE = "lock"
_HEARTBEAT_SECONDS = 5.0
_WATCH_SECONDS = 20.0
_POLL_SECONDS = 0.5
_MAX_RECORD_BYTES = 4096

LogFunction = Callable[[str], object]


class FolderLock:
    """A folder that belongs to this process until `release`.

    Args:
        files: the folder.
        log: called while another owner is watched.
        watch_seconds: how long to watch an owner that cannot be checked.
        heartbeat_seconds: time between two numbers.
    Raises:
        CheckpointError: another live process owns it, or the folder cannot be written.
    """

    def __init__(
        self,
        files: StorageFolder,
        log: LogFunction,
        *,
        watch_seconds: float = _WATCH_SECONDS,
        heartbeat_seconds: float = _HEARTBEAT_SECONDS,
    ) -> None:
        self._files, self._log, self._heartbeat_seconds = files, log, heartbeat_seconds
        self._record = {**_own_record(), "owner": secrets.token_hex(8)}
        self._beat = 0
        self._handle = self._acquire_kernel_lock()
        self._refuse_live_owner(watch_seconds)
        # The kernel's lock holds without the record, for example on a full disk; other locks are the record.
        with suppress(OSError) if self._handle is not None else nullcontext():
            self._write()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._write_heartbeats, name="run-folder-lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Release the folder."""
        self._released.set()
        self._thread.join()
        with suppress(OSError):  # if it stays, its number stands still, which means the same
            self._files.remove(LOCK_FILE)
        if self._handle is not None:
            os.close(self._handle)

    def _acquire_kernel_lock(self) -> int | None:
        """Return the open file that holds the kernel's lock; None: the folder has no such locks."""
        path = self._files.local_path(LOCK_FILE)
        if path is None:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
            handle = os.open(path, flags, 0o666)
            if (locked := self._locked(handle)) is None:
                return None
            if locked and _is_file(handle, path):  # otherwise its last owner has just removed it
                return handle
            os.close(handle)

    def _locked(self, handle: int) -> bool | None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise self._locked_error(self._read()) from None
        except OSError:  # the file system has none
            os.close(handle)
            return None
        return True

    def _refuse_live_owner(self, watch_seconds: float) -> None:
        record = self._read()
        if not record or (self._handle is not None and record.get("boot") == self._record["boot"]):
            return  # no owner, or one on this kernel that has ended, as its lock is free
        is_visible = _is_visible_from_here(record, self._record)
        if (
            is_visible
            and process_start_ticks(_int_or_zero(record.get("pid"))) == _int_or_zero(record.get("start")) != 0
        ):
            raise self._locked_error(record)
        # An owner on this kernel that is not among the visible processes has ended, so nothing is watched.
        expires = time.monotonic() + (0 if is_visible else watch_seconds)
        if not is_visible:
            self._log(
                f"watching for {watch_seconds:g} s whether {_describe_owner(record)} still writes to"
                f" {self._files.url}"
            )
        while time.monotonic() < expires:
            time.sleep(min(_POLL_SECONDS, watch_seconds))
            if (new_record := self._read()) != record:
                if not new_record:
                    return  # it has released the folder
                raise self._locked_error(new_record)

    def _write_heartbeats(self) -> None:
        while not self._released.wait(self._heartbeat_seconds):
            try:
                # Under the kernel's lock there is no second owner; without it another one may have won the
                # race.
                other = {} if self._handle is not None else self._read()
                if other.get("owner", self._record["owner"]) != self._record["owner"]:
                    self._log(f"{self._locked_error(other)}")
                    return
                self._write()
            except OSError:
                continue  # a full disk does not end this owner; the next number may get through

    def _write(self) -> None:
        self._beat += 1
        self._put(json.dumps({**self._record, "beat": self._beat}).encode())

    def _put(self, data: bytes) -> None:
        if self._handle is None:
            self._files.publish(LOCK_FILE, data)
            return
        # In place: the lock belongs to this very file, and a rename would leave it on the old one.
        os.pwrite(self._handle, data.ljust(_MAX_RECORD_BYTES // 4), 0)

    def _read(self) -> Mapping[str, Any]:
        try:
            data = self._files.read(LOCK_FILE)
            record = parse(data[:_MAX_RECORD_BYTES]) if data.strip() else {}
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    def _locked_error(self, owner: Mapping[str, Any]) -> CheckpointError:
        return CheckpointError(
            f"another job is writing to this folder: {_describe_owner(owner)}",
            where=self._files.url,
            next_step="wait until it ends or stop it, or choose another run_dir or checkpoint.folder",
        )


def _is_file(handle: int, path: Path) -> bool:
    """Return whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _own_record() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "start": process_start_ticks(os.getpid()),
        "boot": _read_text("/proc/sys/kernel/random/boot_id"),
        "processes": _read_link("/proc/self/ns/pid"),
    }


def _is_visible_from_here(owner: Mapping[str, Any], reader: Mapping[str, Any]) -> bool:
    """Return whether the processes of an owner are visible here: same kernel, same process namespace."""
    return bool(reader["boot"]) and all(owner.get(key) == reader[key] for key in ("boot", "processes"))


def _describe_owner(owner: Mapping[str, Any]) -> str:
    if not owner:
        return "an unknown process"
    return f"process {_int_or_zero(owner.get('pid'))} on {str(owner.get('host'))[:80]}"


def _int_or_zero(value: Any) -> int:
    return value if type(value) is int else 0


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _read_link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""
