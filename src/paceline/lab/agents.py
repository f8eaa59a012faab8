"""The command of each host while it runs: its lines with the host's name in front, its end, its exit code.

Invariant: a line is shown whole and once, and nothing here waits for a host without a limit.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from paceline.lab.namespaces import Space
from paceline.lab.processes import members, signal_all

_LAST_LINES_SECONDS = 5.0

Say = Callable[[str], object]


class Agent:
    """A command that runs inside a host.

    Args:
        space: of the host.
        argv: the command.
        environ: its whole environment.
        say: is given one line at a time, with the host's name in front and its end.
        cores, cgroups: see `Space.command`.
    """

    def __init__(
        self,
        space: Space,
        argv: Sequence[str],
        environ: Mapping[str, str],
        say: Say,
        *,
        cores: Sequence[int] = (),
        cgroups: Sequence[str] = (),
        directory: Path | None = None,
    ) -> None:
        self.host = space.name
        self.lines: list[str] = []
        self.ended_at: float | None = None
        self._space, self._say = space, say
        self._process = _start(space.command(argv, cores=cores, cgroups=cgroups), environ, directory)
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
        return bool(members(self._space.first)) or self.poll()

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.returncode

    def poll(self) -> bool:
        """Whether it has ended."""
        if self.ended_at is None and self._process.poll() is not None:
            self.ended_at = time.monotonic()
            signal_all(members(self._space.first), signal.SIGKILL)  # what it left behind
        return self.ended_at is not None

    def terminate(self) -> None:
        """Ask it to end."""
        if not self.poll():
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it, with everything that runs in its host."""
        signal_all(members(self._space.first), signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self.poll()

    def close(self) -> None:
        """Take its last lines."""
        self._reader.join(_LAST_LINES_SECONDS)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()


def _start(argv: Sequence[str], environ: Mapping[str, str], directory: Path | None) -> subprocess.Popen[str]:
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
