"""A script that ends what is left of a job when its launcher is gone, even if that was killed.

The launcher runs it as `python -I -S PATH`, so it uses the standard library alone. It reads lines from
standard
input: "+PID" for a session that began, "-PID" for one that has ended, "=FOLDER" for a folder to remove, and
"=" for none. When the input ends, as it does when the launcher dies, it kills the remaining sessions and
removes the folders. Invariant: it outlives its launcher only for that.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterable
from pathlib import Path


def session_members(session: int) -> list[int]:
    """Return the living processes of a session, in any process group; empty on systems without /proc."""
    return [pid for pid, state, owner in _processes() if owner == session and state not in "ZX"]


def _processes() -> Iterable[tuple[int, str, int]]:
    for process in Path("/proc").glob("[0-9]*"):  # a longer pattern fails for a process that is exiting
        try:
            # pid (name) state parent group session ...; the name can contain anything, even ")"
            text = (process / "stat").read_text(errors="replace")
        except OSError:
            continue  # it ended between the listing and the reading
        state, _, _, session = text.rpartition(")")[2].split()[:4]
        yield int(process.name), state, int(session)


def kill_session(session: int) -> None:
    """Kill all processes of the session that process `session` leads."""
    with contextlib.suppress(ProcessLookupError):  # its own process group is empty; others may not be
        os.killpg(session, signal.SIGKILL)
    for pid in session_members(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Keep the list of sessions until the input ends, then kill what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sessions: set[int] = set()
    folders: set[str] = set()
    for line in sys.stdin:
        if line.startswith("="):
            folders = folders | {line[1:-1]} if line[1:-1] else set()
            continue
        pid = int(line[1:])
        if line.startswith("+"):
            sessions.add(pid)
        else:
            sessions.discard(pid)
    for session in sessions:
        kill_session(session)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
