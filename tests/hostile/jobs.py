"""Jobs that are disturbed where their options say, each in a folder of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests import command_jobs
from tests.command_jobs import start
from tests.commands import Command

TASK = """
import atexit, os, signal, time
from pathlib import Path
import torch
from torch import nn
from paceline import Cluster, Loss, Task

HERE = Path(__file__).parent
RANK = Cluster.from_env().global_rank

def reached(what):
    hidden = HERE / f".{what}-{RANK}"
    try:
        hidden.write_text(str(os.getpid()))
        hidden.rename(HERE / f"{what}-{RANK}")  # who sees the file sees all of it
    except OSError:
        pass  # the folder is read-only

def freeze():
    reached("frozen")
    os.kill(os.getpid(), signal.SIGSTOP)

def linger(seconds):
    reached("leaving")
    time.sleep(seconds)

def build(rank=-1, what="", seconds=0.0, pause=0.0, width=0):
    reached("building")
    calls = []
    if what == "build" and rank == RANK:
        time.sleep(seconds)
    if what == "freeze" and rank == RANK:
        freeze()
    if what == "die-in-save" and rank == RANK:
        from paceline.checkpoint.saver import CheckpointSaver
        CheckpointSaver.save = lambda saver: os.kill(os.getpid(), signal.SIGKILL)
    if what == "die-in-write" and rank == RANK:
        from paceline.checkpoint import saver
        saver.write_part = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
    if what == "die-in-evaluation" and rank == RANK:
        from paceline.session import evaluation
        evaluation._run_blocks = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
    if what == "freeze-at-end" and rank == RANK:
        atexit.register(freeze)
    if what == "linger":
        atexit.register(linger, seconds)
        time.sleep(seconds)
    def loss(model, batch):
        if model.training:  # the checks before the first step evaluate
            calls.append(1)
        if model.training and len(calls) == 1:
            reached("stepping")
            if what in ("SIGKILL", "SIGSTOP") and rank == RANK:
                os.kill(os.getpid(), signal.Signals[what])
        while what == "wait" and calls and not (HERE / "go").exists():
            time.sleep(0.01)
        time.sleep(pause)
        return Loss((model(batch) ** 2).sum(), len(batch))
    large = [nn.Linear(width, width)] if width else []
    model = nn.Sequential(nn.Linear(4, width or 4), *large, nn.Linear(width or 4, 1))
    held_out = torch.linspace(0.0, 1.0, 128).view(32, 4) if what.startswith("die") else None
    return Task(model, torch.rand(64, 4), loss, held_out=held_out)
"""


@dataclass(frozen=True)
class End:
    """How a command ended."""

    code: int
    out: str
    err: str


def prepare(folder: Path) -> None:
    command_jobs.prepare(folder, TASK)


def train(folder: Path, *, processes: int = 2, **options: object) -> Command:
    """A job; options are keys of the recipe, "__" for the dot."""
    prepare(folder)
    changes = [f"{key.replace('__', '.')}={value}" for key, value in options.items()]
    words = [word for change in changes for word in ("--set", change)]
    return start(folder, "train", "recipe.toml", "-n", str(processes), *words)


def end_of(process: Command, seconds: float = 200.0) -> End:
    out, err = process.communicate(timeout=seconds)
    return End(process.returncode, out, err)


def until(condition: Callable[[], bool], process: Command) -> None:
    expires = time.monotonic() + 200
    while True:
        ended = process.poll() is not None  # before the look: what it did last counts
        if condition():
            return
        assert not ended, process.communicate()
        assert time.monotonic() < expires
        time.sleep(0.02)
