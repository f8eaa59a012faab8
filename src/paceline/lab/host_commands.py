"""The command of each host while it runs: its lines with the host's name in front, its end, its exit code.

Invariant: a line is shown whole and once, and nothing here waits for a host without a limit.

What each host is told to run: the command of one machine, spread over the hosts. Pure.

`paceline train R -n 4` starts four processes on one machine; on four hosts the same four processes are one a
host. So -n counts all processes here, as a strategy's own count does, and every host gets its part with the
options that a real cluster's nodes are given. Any other command runs on every host as it is.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from paceline.errors import RecipeError
from paceline.lab.namespaces import HostNamespaces, host_pids, signal_all

_READ_END_SECONDS = 5.0

LineCallback = Callable[[str], object]


class HostProcess:
    """A command that runs inside a host.

    Args:
        space: of the host.
        argv: the command.
        environ: its whole environment.
        say: is given one line at a time, with the host's name in front and its end.
        cores, cgroups: see `HostNamespaces.command`.
    """

    def __init__(
        self,
        space: HostNamespaces,
        argv: Sequence[str],
        environ: Mapping[str, str],
        say: LineCallback,
        *,
        cores: Sequence[int] = (),
        cgroups: Sequence[str] = (),
        directory: Path | None = None,
    ) -> None:
        self.host = space.name
        self.lines: list[str] = []
        self.ended_at: float | None = None
        self._space, self._say = space, say
        self._process = _start_process(space.command(argv, cores=cores, cgroups=cgroups), environ, directory)
        self._reader = threading.Thread(target=self._read, name=f"lab-{self.host}")
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))
            with suppress(BrokenPipeError):  # nobody listens any more; the host goes on
                self._say(f"[{self.host}] {self.lines[-1]}\n")

    @property
    def has_entered(self) -> bool:
        """Whether the command is in its host, or has been."""
        return bool(host_pids(self._space.first)) or self.poll()

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.returncode

    def poll(self) -> bool:
        """Whether it has ended."""
        if self.ended_at is None and self._process.poll() is not None:
            self.ended_at = time.monotonic()
            signal_all(host_pids(self._space.first), signal.SIGKILL)  # what it left behind
        return self.ended_at is not None

    def terminate(self) -> None:
        """Ask it to end."""
        if not self.poll():
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it, with everything that runs in its host."""
        signal_all(host_pids(self._space.first), signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self.poll()

    def close(self) -> None:
        """Take its last lines."""
        self._reader.join(_READ_END_SECONDS)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()


def _start_process(
    argv: Sequence[str], environ: Mapping[str, str], directory: Path | None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        argv,
        env=dict(environ),
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


_RENDEZVOUS_PORT = 29500  # in the first host's own network, so nobody else can have it
_JOB_COMMANDS = {("train",): False, ("verify",): False, ("run",): True, ("bench", "link"): False}
"""The commands that start a job; True: what follows the script belongs to the script."""
_PROCESSES_OPTIONS = ("-n", "--processes")


def spread_over_hosts(command: Sequence[str], addresses: Sequence[str]) -> list[list[str]]:
    """The argument vector of each host, in the order of the addresses.

    Args:
        command: as a user types it on one machine.
        addresses: of the hosts; the job meets at the first.
    Raises:
        RecipeError: the processes cannot be shared out evenly, or the command is empty.
    """
    if not command:
        raise RecipeError(
            "there is no command to run", next_step="put it after --, for example -- paceline train RECIPE"
        )
    if command[0] != "paceline":
        return [list(command) for _ in addresses]
    base = [sys.executable, "-m", "paceline"]
    words = list(command[1:])
    name = next((name for name in _JOB_COMMANDS if tuple(words[: len(name)]) == name), None)
    if name is None:
        return [[*base, *words] for _ in addresses]
    own = _share_processes(words[len(name) :], len(addresses), script=_JOB_COMMANDS[name])
    meeting = ["--nodes", str(len(addresses)), "--rendezvous", f"{addresses[0]}:{_RENDEZVOUS_PORT}"]
    return [[*base, *name, *meeting, "--node-rank", str(i), *own] for i in range(len(addresses))]


def _share_processes(words: list[str], num_hosts: int, *, script: bool) -> list[str]:
    """The words with the number of processes of one host; without -n, what the command takes by itself."""
    place = 0
    while place < len(words):
        if words[place] in _PROCESSES_OPTIONS and place + 1 < len(words):
            return [
                *words[: place + 1],
                str(_processes_per_host(words[place + 1], num_hosts)),
                *words[place + 2 :],
            ]
        if script and not words[place].startswith("--"):
            break  # the script, or -m
        place += 2 if script else 1
    return words


def _processes_per_host(text: str, num_hosts: int) -> int:
    if not text.isdigit() or int(text) % num_hosts or int(text) == 0:
        raise RecipeError(
            f"-n {text} processes cannot be shared evenly by {num_hosts} hosts",
            next_step=f"-n counts the processes of all hosts: a multiple of {num_hosts}",
        )
    return int(text) // num_hosts
