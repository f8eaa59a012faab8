"""kill -9 at any moment, in a save too: what is left is whole; a resumed run ends where it would have."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from paceline.checkpoint.catalog import CheckpointCatalog
from paceline.checkpoint.checkpoint_reader import load_checkpoint
from paceline.checkpoint.storage import StorageFolder
from paceline.data import KeyedOrder, LockstepWork
from tests import commands
from tests.commands import Command

ROOT = Path(__file__).parents[3]
STEPS = 24


def save_for_ever(folder: str) -> None:
    """Every tensor of step k holds k: a torn checkpoint would show. A process beside this one writes them."""
    from paceline.checkpoint import write_plan, writers
    from paceline.checkpoint.disk.writer_process import WriterProcess
    from paceline.checkpoint.writers import ProcessWriter
    from paceline.parallel.sharded_model import unsharded_model
    from paceline.state.train_state import TrainState
    from tests.unit.checkpoint.states import saver

    writers._MIN_PROCESS_BYTES, write_plan._MIN_FILE_BYTES = 0, 2**16
    writer = ProcessWriter(WriterProcess(dict(os.environ)), 1.0, print)
    torch.set_num_threads(1)
    model = torch.nn.Linear(300, 300)
    state = TrainState(unsharded_model(model), torch.optim.Adam(model.parameters(), lr=0.0))
    model(torch.zeros(300)).sum().backward()
    with saver(folder, state, newest=2, writer=writer) as one:
        state.step = one.catalog.whole[-1].step if one.catalog.whole else 0
        while True:
            state.step += 1
            one.settle()
            for tensor in state.tensors().values():
                tensor.detach().fill_(state.step)
            state.optimizer.step()
            for tensor in state.tensors().values():
                tensor.detach().fill_(state.step)
            one.save()


@pytest.mark.capability("N13", "N4")
def test_killed_at_random_there_is_always_a_whole_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["paceline.testing.rank_preload"])
    moments, last = random.Random(5), 0
    for _ in range(6):
        process = context.Process(target=save_for_ever, args=(str(tmp_path),))
        process.start()
        before = len(list(tmp_path.glob("step-*"))) and last
        expires = time.monotonic() + 120
        while (newest_step(tmp_path) or 0) <= before and time.monotonic() < expires:
            time.sleep(0.01)
        time.sleep(moments.uniform(0.0, 0.2))
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        shelf = CheckpointCatalog.read(StorageFolder(str(tmp_path)))
        newest = shelf.whole[-1]
        assert newest.step > last
        found = load_checkpoint(shelf.files, newest.name)
        assert found.scalars["step"] == newest.step
        assert all(bool((t == newest.step).all()) for t in found.tensors.values())
        last = newest.step


def newest_step(folder: Path) -> int | None:
    """By the manifests that are there, without looking further."""
    steps = [int(path.parent.name[5:13]) for path in folder.glob("step-*/manifest.json")]
    return max(steps, default=None)


# A job of several processes that is killed and goes on

TASK = """
import os, time
from pathlib import Path
import torch
from torch import nn
from paceline import Loss

class Source:
    def __init__(self, log): self.log = log
    def __len__(self): return 60
    def __getitem__(self, i):
        rank = os.environ.get("RANK", "0")
        with open(f"{self.log}.{rank}", "a") as file:
            file.write(f"{i}\\n")
        g = torch.Generator().manual_seed(i)
        x = torch.rand(6, generator=g)
        return x, x.sum()

def build(log):
    calls = []
    def loss(model, batch):
        if model.training:  # the checks before the first step evaluate
            calls.append(1)
        while len(calls) > 26 and Path(f"{log}.hold").exists():
            time.sleep(0.01)
        x, y = batch
        return Loss(((model(x).squeeze(-1) - y) ** 2).sum(), len(x))
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 1))
    return model, Source(log), loss
"""
RECIPE = """
task = "task.py:build"
steps = {steps}
run_dir = "{run}"
reproducible = true
[options]
log = "{log}"
[batch]
size = 8
shards = 4
[optimizer]
lr = 0.01
[checkpoint]
every_steps = 1
"""


def write_job(folder: Path) -> Path:
    folder.mkdir()
    (folder / "task.py").write_text(TASK)
    text = RECIPE.format(steps=STEPS, run=folder / "run", log=folder / "samples")
    (folder / "recipe.toml").write_text(text)
    return folder / "recipe.toml"


def start(*arguments: object, folder: Path = ROOT) -> Command:
    return commands.start(folder, "train", *arguments, OMP_NUM_THREADS="1")


def finish(process: Command, seconds: float = 240) -> None:
    _, said = process.communicate(timeout=seconds)
    assert process.returncode == 0, said


def kill_after(recipe: Path, step: int, pause: float) -> None:
    """kill -9 of a launcher when a checkpoint of `step` is there; its workers die with it.

    The job waits a few steps later, or it might be over on a machine that lets this process wait.
    """
    folder, hold = recipe.parent, recipe.parent / "samples.hold"
    hold.touch()
    process = start(recipe, "-n", 2, folder=folder)
    expires = time.monotonic() + 240
    while (newest_step(folder / "run" / "checkpoints") or 0) < step:
        assert process.poll() is None and time.monotonic() < expires
        time.sleep(0.01)
    time.sleep(pause)
    process.kill()
    process.communicate()
    while anybody_in(folder):
        assert time.monotonic() < expires
        time.sleep(0.01)
    hold.unlink()


def anybody_in(folder: Path) -> bool:
    """Whether a process still works in a folder."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if (process / "cwd").readlink() == folder:
                return True
    return False


def losses(run: Path) -> dict[int, float]:
    """By step; of a step that was done twice, the last."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["event"] == "step"}


def end(run: Path) -> dict[str, torch.Tensor]:
    files = StorageFolder(str(run / "checkpoints"))
    newest = CheckpointCatalog.read(files).whole[-1]
    assert newest.step == STEPS
    return dict(load_checkpoint(files, newest.name).tensors)


@pytest.mark.capability("N2", "M7", "I10", "Z10")
def test_a_job_that_is_killed_goes_on_with_the_same_samples(tmp_path: Path) -> None:
    """Reproducible: with the same bits, also under another number of processes."""
    whole, cut = write_job(tmp_path / "whole"), write_job(tmp_path / "cut")
    finish(start(whole, "-n", 2))
    kill_after(cut, 9, 0.02)
    alike, fewer = cut.parent / "run", cut.parent / "fewer"
    shutil.copytree(alike, fewer)
    finish(start("--resume", alike, "-n", 2))
    right = whole.parent / "run"
    assert all(torch.equal(end(alike)[name], t) for name, t in end(right).items())
    assert losses(alike) == losses(right) and losses(right).keys() == set(range(STEPS))
    for log in cut.parent.glob("samples.*"):
        log.unlink()
    before = newest_step(fewer / "checkpoints") or 0
    finish(start("--resume", fewer, "-n", 1))
    drawn = (cut.parent / "samples.0").read_text().split()
    assert drawn[2:] == samples_from(before)  # the checks before training load two
    assert losses(fewer) == losses(right)
    assert all(torch.equal(end(fewer)[name], t) for name, t in end(right).items())


def samples_from(step: int) -> list[str]:
    """What one process loads from a step to the end, by the order alone."""
    work = LockstepWork(KeyedOrder(60, 8, 1, shuffle=True, drop_last=False), 4, 1, 0, 1)
    return [
        str(i)
        for k in range(step, STEPS)
        for micro_batch in work.micro_batches(k)
        for i in micro_batch.indices
    ]
