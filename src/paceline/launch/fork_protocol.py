"""The messages between launcher and fork server, and the context that both must share.

A message over the Unix socket is a JSON value with open files. The context is what a process inherits from
its parent, apart from arguments, folder and open files. Invariants: a message arrives whole or not at all.
Processes with equal contexts would run the same command in the same way, so a forked worker can replace a
started one.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import paceline

_LENGTH_BYTES = 8
_MAX_FILES = 8
_MAX_BYTES = 2**24


def send_message(connection: socket.socket, value: Any, files: Sequence[int] = ()) -> None:
    """Send a value; the receiver gets copies of the open `files`."""
    text = json.dumps(value).encode()
    socket.send_fds(connection, [len(text).to_bytes(_LENGTH_BYTES, "big")], files)
    connection.sendall(text)


def receive_message(connection: socket.socket) -> tuple[Any, list[int]] | None:
    """Wait for a message; None if the sender is gone or sends something else.

    Raises:
        TimeoutError: the time-out of the socket has passed.
    """
    head, files, *_ = socket.recv_fds(connection, _LENGTH_BYTES, _MAX_FILES)
    length = int.from_bytes(head, "big") if len(head) == _LENGTH_BYTES else 0
    try:
        text = _read(connection, length) if length <= _MAX_BYTES else b""
        if text:
            return json.loads(text), files
    except (ValueError, RecursionError):
        pass  # not a message: the sender is treated as gone
    for file in files:
        os.close(file)
    return None


def expect_message(connection: socket.socket) -> tuple[Any, list[int]]:
    """Wait for a message that must come.

    Raises:
        EOFError: the sender is gone.
        TimeoutError: as for `receive_message`.
    """
    message = receive_message(connection)
    if message is None:
        raise EOFError
    return message


def _read(connection: socket.socket, count: int) -> bytes:
    chunks = []
    while count and (chunk := connection.recv(min(count, 1 << 20))):
        chunks.append(chunk)
        count -= len(chunk)
    return b"" if count else b"".join(chunks)


# set again for every job, or read when they are needed and not at the start of a process; of HOME see
# `_home_at_start`
_JOB_VARIABLES = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "MKL_NUM_THREADS"),
        *("HOME", "PWD", "OLDPWD", "SHLVL", "_", "COLUMNS", "LINES", "TMPDIR", "TEMP", "TMP"),
    }
)
_JOB_VARIABLE_PREFIXES = ("PACELINE_", "PYTEST_", "KMP_", "TORCHINDUCTOR_")  # the last two are set by imports
_STATUS = (
    *("Uid", "Gid", "Groups", "Umask", "CapEff", "Seccomp", "NoNewPrivs"),
    *("Cpus_allowed_list", "SigIgn", "SigBlk"),
)


_SITE = import_module("site")  # for mypy, tools/site.py would be the module of this name


def process_context(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the context of a process that this one would start with the variables `environ`; Linux only.

    Variables that a forked process gets in time are left out.
    """
    process = Path("/proc/self")
    status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines())
    return {
        **{f"${name}": value for name, value in environ.items() if not _is_job_variable(name)},
        **{name: status.get(name, "") for name in _STATUS},
        **{f"namespace {link.name}": str(link.readlink()) for link in (process / "ns").iterdir()},
        # one interpreter has several names (python, python3); one of several virtual environments its prefix
        "python": os.path.realpath(sys.executable),
        "prefix": sys.prefix,
        "home": _home_at_start(environ),
        "package": str(paceline.__file__),
        "root": str((process / "root").readlink()),
        "cgroup": (process / "cgroup").read_text(),
        "limits": (process / "limits").read_text(),
        "priority": str(os.nice(0)),
        "killed first": (process / "oom_score_adj").read_text(),
    }


def _home_at_start(environ: Mapping[str, str]) -> str:
    """Return HOME if a process reads files below it when it starts and imports; empty if it has none there.

    These are the user's site-packages and the configuration of fsspec. tests/dist/launch/test_fork_server.py
    searches all that is imported for others.
    """
    home = environ.get("HOME", "")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = Path(home) / ".local" / "lib" / version / "site-packages"
    is_read = (_SITE.ENABLE_USER_SITE and packages.is_dir()) or (Path(home) / ".config" / "fsspec").is_dir()
    return home if is_read else ""


def _is_job_variable(name: str) -> bool:
    return name in _JOB_VARIABLES or name.startswith(_JOB_VARIABLE_PREFIXES)
