"""Jobs of actors, and what tests ask about them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from paceline.job.cluster import process_environment
from paceline.launch import LaunchJob, LaunchOutcome, launch, script_command
from paceline.launch.fork_client import FORK_SERVER_VARIABLE, NO_FORK_SERVER
from paceline.launch.shutdown import ShutdownTimeouts

ACTOR = str(Path(__file__).with_name("actor.py"))
DRIVER = str(Path(__file__).with_name("driver.py"))


ANEW = (sys.executable, ACTOR)
FORKED = script_command(ACTOR)
"""How actors start: as processes of their own, or, where there is a fork server, by it."""


def act(
    folder: Path,
    *actions: str,
    num_processes: int = 3,
    start: tuple[str, ...] = ANEW,
    environ: Mapping[str, str] | None = None,
    **options: object,
) -> LaunchOutcome:
    """Launch actors in this process; the report is in the outcome."""
    command = (*start, str(folder), *actions)
    quick = ShutdownTimeouts(settle_seconds=0.8, kill_seconds=0.5, grace_seconds=5.0)
    job = LaunchJob(command, num_processes, timeouts=quick, **options)  # type: ignore[arg-type]
    return launch(job, environ=environ, log=lambda _: None)


def alive(path: Path) -> bool:
    """Is the process whose number is in the file alive? A zombie is not."""
    try:
        stat = Path(f"/proc/{path.read_text()}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def without_fork_server() -> dict[str, str]:
    """The environment of a command whose workers are started anew."""
    return {**process_environment(), FORK_SERVER_VARIABLE: NO_FORK_SERVER}


def as_users_have_it() -> dict[str, str]:
    """An environment that does not say where forked workers come from."""
    return {name: value for name, value in process_environment().items() if name != FORK_SERVER_VARIABLE}


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; the time-out of the test is the deadline."""
    while not condition():
        time.sleep(0.02)


@contextmanager
def driving(
    folder: Path,
    *actions: str,
    num_processes: int = 2,
    start: tuple[str, ...] = ANEW,
    stdout: int | None = None,
    **options: object,
) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher as a process of its own, with all its workers ready."""
    command = [*start, str(folder), *actions]
    job = json.dumps({"command": command, "num_processes": num_processes, **options})
    with (folder / "report").open("w") as report:
        launcher = subprocess.Popen([sys.executable, DRIVER, job], stdout=stdout, stderr=report)
    try:
        until(lambda: len(list(folder.glob("pid-*"))) == num_processes or launcher.poll() is not None)
        yield launcher
    finally:
        launcher.kill()
        launcher.wait()
