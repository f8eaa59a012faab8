"""The script that runs a command inside a host: `enter.py LAB JSON COMMAND...`, with the standard library
alone.

JSON: {"pid": first process of the host, "kinds": namespaces to enter, "cores": [...], "cgroups": [...]}.
Invariant: the command ends when this process does, gets its signals, and determines its exit status.
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
    """Enter namespaces of a process; the working directory keeps its path."""
    directory = os.getcwd()  # noqa: PTH109, pathlib would double what an entry costs
    # All handles first: after entering mnt, /proc is that of the host.
    handles = {kind: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in kinds}
    for kind, handle in handles.items():
        if _libc.setns(handle, 0) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot enter the {kind} namespace of process {pid}: {os.strerror(code)}")
        os.close(handle)
    if "mnt" in kinds:
        os.chdir(directory)


def run(command: list[str]) -> int:
    """Run the command as a child and forward signals to it; return its status as of `os.wait`."""
    # setns(pid) applies to children only, so this process stays outside of the process namespace.
    child = os.fork()
    if child == 0:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        execute(command)
    for number in _FORWARDED:
        signal.signal(number, lambda number, _: os.kill(child, number))
    return os.waitpid(child, 0)[1]


def execute(command: list[str]) -> None:
    """Replace this process by the command."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def main(arguments: list[str]) -> int:
    """Apply limits, enter the namespaces, and run the command."""
    options, command = json.loads(arguments[1]), arguments[2:]
    # Before the namespaces: control groups and cores are those of the machine.
    for folder in options["cgroups"]:
        with open(f"{folder}/cgroup.procs", "w", encoding="ascii") as stream:  # noqa: PTH123
            stream.write(str(os.getpid()))
    if options["cores"]:
        os.sched_setaffinity(0, options["cores"])
    enter(options["pid"], options["kinds"])
    if "pid" not in options["kinds"]:
        execute(command)
    status = run(command)
    # Ends by the same signal, so that the lab sees the status of the command.
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
        os.kill(os.getpid(), os.WTERMSIG(status))
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
