"""The commands of the hosts: the command line of each, and the process that runs it and collects its output.

A companion stays in a host while commands come and go.

`paceline train R -n 4` starts four processes on one machine; on four hosts it starts one on each. So `-n`
counts the processes of all hosts, as the degrees of a strategy do, and every host gets its part with the
options that the nodes of a real cluster get. Any other command runs unchanged on every host.

Invariant: every line of output is passed on once and whole, and no wait for a host is without a limit.
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

from paceline.errors import LabError, RecipeError
from paceline.lab.namespaces import HostNamespaces, host_pids, read_json_line, signal_all

_READ_END_SECONDS = 5.0

LineCallback = Callable[[str], object]


class HostProcess:
    """A command that runs inside a host.

    Args:
        space: the namespaces of the host.
        argv: the command.
        environ: its whole environment.
        on_line: receives each line of output as "[host] ..." with its newline.
        cores, cgroups: as for `HostNamespaces.command`.
        directory: its working directory; None for that of this process.
        companions: processes of the host that are not of this command, and stay.
    """

    def __init__(
        self,
        space: HostNamespaces,
        argv: Sequence[str],
        environ: Mapping[str, str],
        on_line: LineCallback,
        *,
        cores: Sequence[int] = (),
        cgroups: Sequence[str] = (),
        directory: Path | None = None,
        companions: Sequence[int] = (),
    ) -> None:
        self.host = space.name
        self._companions = companions
        self.lines: list[str] = []
        self.ended_at: float | None = None
        self._space, self._on_line = space, on_line
        self._process = _start_process(space.command(argv, cores=cores, cgroups=cgroups), environ, directory)
        self._reader = threading.Thread(target=self._read, name=f"lab-{self.host}")
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))
            with suppress(BrokenPipeError):  # the reader is gone, but the host goes on
                self._on_line(f"[{self.host}] {self.lines[-1]}\n")

    @property
    def has_entered(self) -> bool:
        """Return whether the command runs inside its host, or has already ended."""
        return bool(self._pids()) or self.poll()

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while it runs, negative for the signal that ended it."""
        return self._process.returncode

    def poll(self) -> bool:
        """Return whether the command has ended; end the processes that it left behind."""
        if self.ended_at is None and self._process.poll() is not None:
            self.ended_at = time.monotonic()
            signal_all(self._pids(), signal.SIGKILL)
        return self.ended_at is not None

    def terminate(self) -> None:
        """Send SIGTERM to the command."""
        if not self.poll():
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the command and every process of its host."""
        signal_all(self._pids(), signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self.poll()

    def _pids(self) -> list[int]:
        return [pid for pid in host_pids(self._space.first) if pid not in self._companions]

    def close(self) -> None:
        """Wait for the last lines of output."""
        # With a limit, since whoever else has the pipe open would keep the thread waiting.
        self._reader.join(_READ_END_SECONDS)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()


class HostCompanion:
    """A process that stays in a host while commands come and go, such as a server that they use.

    It is ready when it has written one line of JSON: an object with the variables that commands of the host
    get from then on. It ends with its standard input.

    Args:
        space, argv, environ, cores, cgroups: as for `HostProcess`.
    Attributes:
        variables: those of its line.
        pids: its processes so far, by their numbers outside.
    Raises:
        LabError: it has ended, or has written something else.
    """

    def __init__(
        self,
        space: HostNamespaces,
        argv: Sequence[str],
        environ: Mapping[str, str],
        *,
        cores: Sequence[int] = (),
        cgroups: Sequence[str] = (),
    ) -> None:
        self._process = subprocess.Popen(
            space.command(argv, cores=cores, cgroups=cgroups),
            env=dict(environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self.variables: Mapping[str, str] = read_json_line(self._process)
        except ValueError:
            self.variables = {}
        self.pids = host_pids(space.first)
        if not self.variables:
            self.end()
            raise LabError(f"{' '.join(argv)} did not start in a host of the lab", where=space.name)

    def end(self) -> None:
        """End its standard input, and wait until it has ended."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(_READ_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _start_process(
    argv: Sequence[str], environ: Mapping[str, str], directory: Path | None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        argv,
        env=dict(environ),
        cwd=directory,
        # Several hosts cannot share one terminal.
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


_RENDEZVOUS_PORT = 29500  # always free: the first host has a network of its own
_JOB_COMMANDS = {
    ("train",): False,
    ("verify",): False,
    ("run",): True,
    ("bench", "link"): False,
    ("bench", "comm"): False,
}
"""The commands that start a job; True if words after the script are its own arguments."""
_PROCESSES_OPTIONS = ("-n", "--processes")


def spread_over_hosts(command: Sequence[str], addresses: Sequence[str]) -> list[list[str]]:
    """Return the command line of each host, in the order of the addresses.

    Args:
        command: as a user types it on one machine.
        addresses: IPv4 addresses of the hosts; the first is the rendezvous.
    Raises:
        RecipeError: the processes cannot be divided evenly, or the command is empty.
    """
    if not command:
        raise RecipeError(
            "the command is empty", next_step="put it after --, for example -- paceline train RECIPE"
        )
    if command[0] != "paceline":
        return [list(command) for _ in addresses]
    base = [sys.executable, "-m", "paceline"]
    words = list(command[1:])
    name = next((name for name in _JOB_COMMANDS if tuple(words[: len(name)]) == name), None)
    if name is None:
        return [[*base, *words] for _ in addresses]
    arguments = _divide_processes(words[len(name) :], len(addresses), script=_JOB_COMMANDS[name])
    nodes = ["--nodes", str(len(addresses)), "--rendezvous", f"{addresses[0]}:{_RENDEZVOUS_PORT}"]
    return [[*base, *name, *nodes, "--node-rank", str(i), *arguments] for i in range(len(addresses))]


def _divide_processes(words: list[str], num_hosts: int, *, script: bool) -> list[str]:
    """Return the arguments with `-n` divided by the number of hosts; unchanged without `-n`."""
    index = 0
    while index < len(words):
        if words[index] in _PROCESSES_OPTIONS and index + 1 < len(words):
            return [
                *words[: index + 1],
                str(_processes_per_host(words[index + 1], num_hosts)),
                *words[index + 2 :],
            ]
        if script and not words[index].startswith("--"):
            break  # the script, or -m
        # Before a script every option has a value; in other commands any word can be -n.
        index += 2 if script else 1
    return words


def _processes_per_host(text: str, num_hosts: int) -> int:
    if not text.isdigit() or int(text) % num_hosts or int(text) == 0:
        raise RecipeError(
            f"-n {text} cannot be divided evenly among {num_hosts} hosts",
            next_step=f"-n counts the processes of all hosts: choose a multiple of {num_hosts}",
        )
    return int(text) // num_hosts
