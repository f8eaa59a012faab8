"""Runs a command inside a host: `enter.py LAB JSON COMMAND...`, on the standard library alone.

JSON: {"pid": the host's first process, "kinds": namespaces to enter, "cores": [...], "cgroups": [...]}.
Invariant: the command ends when this process does, gets its signals, and its exit is this process's exit.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_libc = ctypes.CDLL(None, use_errno=True)


def enter(pid: int, kinds: list[str]) -> None:
    """Join namespaces of a process; the working directory stays what it was by name."""
    here = os.getcwd()  # noqa: PTH109, pathlib would double what an entry costs
    handles = {kind: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in kinds}
    for kind, handle in handles.items():
        if _libc.setns(handle, 0) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot enter the {kind} namespace of process {pid}: {os.strerror(code)}")
        os.close(handle)
    if "mnt" in kinds:
        os.chdir(here)


def run(command: list[str]) -> int:
    """Be the command's parent, outside of the process namespace; its exit status as `os.wait` gives it."""
    child = os.fork()
    if child == 0:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        execute(command)
    for number in _FORWARDED:
        signal.signal(number, lambda number, _: os.kill(child, number))
    return os.waitpid(child, 0)[1]


def execute(command: list[str]) -> None:
    """Become the command."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def main(arguments: list[str]) -> int:
    """Set limits, enter, run."""
    options, command = json.loads(arguments[1]), arguments[2:]
    for folder in options["cgroups"]:
        with open(f"{folder}/cgroup.procs", "w", encoding="ascii") as stream:  # noqa: PTH123
            stream.write(str(os.getpid()))
    if options["cores"]:
        os.sched_setaffinity(0, options["cores"])
    enter(options["pid"], options["kinds"])
    if "pid" not in options["kinds"]:
        execute(command)
    status = run(command)
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
        os.kill(os.getpid(), os.WTERMSIG(status))
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
