"""`python -m tests.hostile.kill_trials FOLDER NUMBER...`: signals to processes of jobs, and what is left.

It runs in namespaces of its own (`OWN`), where every process, port, segment and folder is a job's, or that of
the fork server from which all of them have their workers. After each trial it prints one line of JSON. It
asserts nothing: that is `test_kill_matrix`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import cycle, product
from pathlib import Path

from paceline.cli.study_runs import TRAIN_MODULES
from paceline.launch import fork_server
from paceline.launch.fork_client import FORK_SERVER_VARIABLE
from tests.command_jobs import start
from tests.commands import Command
from tests.hostile.jobs import prepare
from tests.hostile.leftovers import children_of, left_of, name_of, text_of, things

OWN = (
    *("unshare", "-Urmnip", "--fork", "--kill-child", "--mount-proc", "sh", "-c"),
    'mount -t tmpfs tmpfs /dev/shm && ip link set lo up && "$@"',
    "sh",
)
"""Words before a command that make namespaces for it: users, mounts, network, segments and processes."""

STEPS, DEADLINE_SECONDS, PATIENCE_SECONDS = 40, 4, 200.0
_WIDTH = 4096
"""Of a layer whose state is 200 MB, half of it on each of two ranks."""
TARGETS = ("rank 0", "last rank", "launcher", "fork server", "reaper", "loader worker", "writer")
_OF_RANKS = ("loader worker", "writer")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGSEGV, signal.SIGSTOP)
MOMENTS = ("start", "build", "step", "save", "end")
STRATEGIES = (
    "replicas=2",
    "replicas=2 route=native",
    "shard=2 zero=3",
    "servers=1 sync=server-async",
    "pipeline=2",
    "replicas=2 sync=diloco:4",
    "replicas=2 codec=int8",
)


@dataclass(frozen=True)
class Trial:
    """One job and one signal."""

    target: str
    number: signal.Signals
    moment: str
    strategy: str


def trials(seed: int = 7) -> list[Trial]:
    """Every signal to every target at every moment, with the strategies in turn; in an order of chance.

    What cannot be is left out: there are no loader workers before a step, nor under a server, and the process
    that writes checkpoints beside a training comes with the first save.
    """
    moments = dict.fromkeys(TARGETS, MOMENTS) | {"loader worker": ("step", "save"), "writer": ("save",)}
    places = [
        (target, number, moment)
        for target, number, moment in product(TARGETS, SIGNALS, MOMENTS)
        if moment in moments[target]
    ]
    often = [place for place in places if place[0] in ("rank 0", "last rank", "writer")]
    again = [place for place in often if place[2] != "start"]
    chance = random.Random(seed)
    order = [*chance.sample(places, len(places)), *chance.sample(again, len(again))]
    turn = cycle(STRATEGIES)
    return [Trial(*place, _strategy(place[0], turn)) for place in order]


def _strategy(target: str, turn: cycle[str]) -> str:
    found = next(turn)
    return next(turn) if target == "loader worker" and "servers" in found else found


@dataclass
class Found:
    """What a trial came to: whether its process was there to be hit, how the job ended, and what was left."""

    trial: Trial
    hit: bool = False
    code: int | None = None
    seconds: float = 0.0
    left: dict[str, list[str]] = field(default_factory=dict)
    err: str = ""

    def line(self) -> str:
        return json.dumps(asdict(self))


def attempt(trial: Trial, folder: Path, server: str) -> Found:
    """Start a job, wait for the moment, send the signal, and wait for the end."""
    prepare(folder)
    pid = int((Path(server) / "pid").read_text())
    before, found = things(folder, pid), Found(trial)
    begun = time.monotonic()
    process = start(folder, *_words(trial), **{FORK_SERVER_VARIABLE: server})
    try:
        if _await(trial.moment, process, folder):
            found.hit = _hit(trial, process.pid, pid)
        _, found.err = process.communicate(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        found.err = "it did not end"
        process.kill()
        process.communicate()
    found.code, found.seconds = process.returncode, time.monotonic() - begun
    found.left = left_of(folder, pid, before)
    return found


def _words(trial: Trial) -> list[str]:
    served = "servers" in trial.strategy
    stands = trial.number == signal.SIGSTOP and trial.target in ("rank 0", "last rank", *_OF_RANKS)
    settings = {
        "steps": STEPS,
        "options.pause": 0.02,
        "options.what": '"linger"',
        "options.seconds": 0.5,
        "runtime.deadline_seconds": DEADLINE_SECONDS if stands else PATIENCE_SECONDS,  # nobody is just slow
        "checkpoint.grace_seconds": 5,
        "loader.workers": int(trial.target == "loader worker"),
    }
    if trial.target == "writer":  # it writes what is large, in the background
        settings |= {"options.width": _WIDTH, "checkpoint.mode": '"background"', "checkpoint.every_steps": 20}
    changes = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return ["train", "recipe.toml", "-n", str(3 if served else 2), "--strategy", trial.strategy, *changes]


def _await(moment: str, process: Command, folder: Path) -> bool:
    """Wait for the moment; False if the job has ended before."""
    drafts = folder / "run" / "checkpoints"
    signs: dict[str, Callable[[], object]] = {
        "start": lambda: _ranks().get(0),
        "build": (folder / "building-0").exists,
        "step": lambda: [*folder.glob("stepping-*")],  # the server of a job makes no steps
        "save": lambda: [d for d in drafts.glob("step-*") if not (d / "manifest.json").exists()],
        "end": (folder / "leaving-0").exists,
    }
    expires = time.monotonic() + PATIENCE_SECONDS
    while not signs[moment]():
        if process.poll() is not None or time.monotonic() > expires:
            return False
        time.sleep(0.001)
    return True


def _hit(trial: Trial, launcher: int, server: int) -> bool:
    for pid in _pids(launcher, server, trial.target)[:1]:
        with suppress(ProcessLookupError):
            os.kill(pid, trial.number)
            if trial.number == signal.SIGSTOP and trial.target == "launcher":
                time.sleep(1.0)  # nobody watches the launcher: who has stopped it lets it go on
                os.kill(pid, signal.SIGCONT)
            return True
    return False


def _pids(launcher: int, server: int, target: str) -> list[int]:
    """The processes that are meant."""
    ranks = _ranks()
    if target == "launcher":
        return [launcher]
    if target == "reaper":
        return [pid for pid in children_of(launcher) if "reaper" in name_of(Path(f"/proc/{pid}"))]
    if target == "fork server":  # the part of it that is this launcher's
        return children_of(server)
    if target in _OF_RANKS:  # a rank of these jobs has no other children
        return [pid for rank in ranks.values() for pid in children_of(rank)]
    return [ranks[rank] for rank in ([0] if target == "rank 0" else sorted(ranks)[-1:]) if rank in ranks]


def _ranks() -> dict[int, int]:
    """The processes of the ranks, which a fork server has named. Their children have their names too."""
    named = [(path, text_of(path / "comm")) for path in Path("/proc").glob("[0-9]*")]
    found = [(int(name[5:]), int(path.name)) for path, name in named if name.startswith("rank ")]
    return dict(sorted(found, reverse=True))


def _await_rest(pid: int) -> None:
    """Until a server has loaded what it loads at its start: a file that it reads then is not left behind."""
    expires, spent = time.monotonic() + PATIENCE_SECONDS, ""
    while time.monotonic() < expires:
        before, spent = spent, " ".join(text_of(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[11:13])
        if spent == before:
            return
        time.sleep(1.0)


def main(folder: Path, chosen: Sequence[int]) -> None:
    with fork_server(TRAIN_MODULES) as variables:
        every = trials()
        _await_rest(int((Path(variables[FORK_SERVER_VARIABLE]) / "pid").read_text()))
        for number in chosen:
            place = folder / str(number)
            sys.stdout.write(attempt(every[number], place, variables[FORK_SERVER_VARIABLE]).line() + "\n")
            sys.stdout.flush()
            shutil.rmtree(place)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [*map(int, sys.argv[2:])])
