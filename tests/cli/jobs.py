"""A job in a folder of its own, that fails or is interrupted where its recipe says; and how it ended."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.catalog import CheckpointCatalog
from paceline.checkpoint.storage import StorageFolder
from tests import command_jobs
from tests.commands import Command
from tests.dist.launch.test_signals import worker

TASK = """
import os, signal, time
from pathlib import Path
import fsspec, torch
from fsspec.implementations.local import LocalFileSystem
from torch import nn
from paceline import Cluster, Loss, Task

HERE = Path(__file__).parent
RANK = Cluster.from_env().global_rank

def reach(seconds=0.0):
    (HERE / "reached").touch()
    while not (HERE / "sent").exists():
        time.sleep(0.01)
    time.sleep(seconds)

class Slow(LocalFileSystem):
    protocol = "slow"

    def _open(self, path, mode="rb", **options):
        if "w" in mode and "step-00000004" in path:
            reach(1.5)
        return super()._open(path, mode, **options)

fsspec.register_implementation("slow", Slow)

def fail(how):
    if how == "raises":
        raise ValueError("the 5th call")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "not-finite":
        return float("nan")
    if how == "memory":
        torch.empty(2**45)
    return 1.0

class HeldOut(list):
    def __getitem__(self, index):
        reach(0.03)
        return super().__getitem__(index)

def build(what="", pause=0.0):
    calls = []
    if what == "build":
        reach(60)
    def loss(model, batch):
        time.sleep(pause)
        factor = 1.0
        if model.training:  # the checks before the first step evaluate
            calls.append(1)
            if what == "training" and len(calls) == 10:
                reach()
            if RANK == 1 and len(calls) == 5:
                factor = fail(what)
        return Loss((model(batch) ** 2).sum() * factor, len(batch))
    data = torch.rand(64, 40000 if what == "shared" else 4)
    held_out = HeldOut(data) if what == "evaluation" else None
    return Task(nn.Linear(data.shape[1], 1), data, loss, held_out=held_out)
"""


@dataclass(frozen=True)
class End:
    """How a job ended, its run folder, and what it left there and in temporary files but torch's cache."""

    code: int
    out: str
    err: str
    checkpoints: list[int]
    broken: list[str]
    temporary: list[str]
    steps: int
    run: Path


def start(folder: Path, *arguments: str, prefix: str = "") -> Command:
    """A job of 60 steps; `prefix` is what a shell does before it, in namespaces of its own."""
    command_jobs.prepare(folder, TASK)
    words = ("train", "recipe.toml", "--set", "steps=60", *arguments)
    return command_jobs.start(folder, *words, before=command_jobs.in_namespaces(prefix) if prefix else ())


def end_of(process: Command, folder: Path) -> End:
    out, err = process.communicate(timeout=600)
    shelf = CheckpointCatalog.read(StorageFolder(str(folder / "run" / "checkpoints")))
    whole = [kept.step for kept in shelf.whole]
    left = [path.name for path in (folder / "tmp").iterdir() if not path.name.startswith("torchinductor")]
    return End(process.returncode, out, err, whole, [*shelf.broken], left, steps_done(folder), folder / "run")


def steps_done(folder: Path) -> int:
    path = folder / "run" / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()  # the last one may be under way
    return sum(json.loads(line)["event"] == "step" for line in lines)


def has_handlers(folder: Path) -> bool:
    """Does rank 0 catch SIGUSR1? Then it has begun to set up."""
    try:
        status = Path(f"/proc/{worker(folder, 0)}/status").read_text()
    except (AssertionError, OSError):
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)
