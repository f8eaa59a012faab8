"""A hundred times kill -9 at a random moment, and each time on again: the same bits in the end. `make soak`.

Ten seconds or less for each on two idle cores. Change `NUM_KILLS` for a shorter or a longer run.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.checkpoint.catalog import CheckpointCatalog
from paceline.checkpoint.checkpoint_reader import load_checkpoint
from paceline.checkpoint.storage import StorageFolder
from tests.dist.launch.actors import without_fork_server

NUM_KILLS = 100
STEPS_PER_KILL = 30
ROOT = Path(__file__).parents[2]
DEADLINE_SECONDS = 120.0
TASK = """
import time
import torch
from torch import nn
from paceline import Loss

def build():
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(480, 32, generator=generator)

    def loss(model, batch):
        time.sleep(0.01)  # so that a kill finds a run that is somewhere in its middle
        return Loss((model(batch).squeeze(-1) - batch.sum(1)).square().sum(), len(batch))

    model = nn.Sequential(
        nn.Linear(32, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(256, 256), nn.Linear(256, 1),
    )
    return model, list(x), loss
"""
RECIPE = """
task = "task.py:build"
steps = {steps}
run_dir = "{run}"
strategy = "replicas=2 codec=int8"
[batch]
size = 16
shards = 4
[optimizer]
lr = 0.01
[schedule]
decay = "cosine"
[checkpoint]
every_steps = 1
"""


def write_job(folder: Path, steps: int) -> Path:
    folder.mkdir()
    (folder / "task.py").write_text(TASK)
    (folder / "recipe.toml").write_text(RECIPE.format(steps=steps, run=folder / "run"))
    return folder / "recipe.toml"


def start(log: Path, *arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "paceline", "train", *map(str, arguments), "-n", "2"]
    environ = {**without_fork_server(), "OMP_NUM_THREADS": "1"}  # its ranks are not the launcher's children
    with log.open("wb") as said:
        return subprocess.Popen(command, stdout=said, stderr=said, cwd=ROOT, env=environ)


def finish(log: Path, *arguments: object) -> None:
    assert start(log, *arguments).wait(3600) == 0, log.read_text()


def workers_of(launcher: int) -> list[int]:
    """Process ids of the ranks that a launcher has started."""
    found, waiting = [], [launcher]
    while waiting:
        pid = waiting.pop()
        with suppress(OSError):
            waiting += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
            found += [pid] if b"\0RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes() else []
    return found


def wait_until(what: Callable[[], object]) -> None:
    expires = time.monotonic() + DEADLINE_SECONDS
    while not what():
        assert time.monotonic() < expires
        time.sleep(0.002)


def drafts(checkpoints: Path) -> set[str]:
    """Checkpoints that are being written, or were when they were killed."""
    return {path.name for path in checkpoints.glob("step-*") if not (path / "manifest.json").exists()}


def whole(checkpoints: Path) -> set[str]:
    return {path.parent.name for path in checkpoints.glob("step-*/manifest.json")}


def kill(job: subprocess.Popen[bytes], checkpoints: Path, moment: str, chance: random.Random) -> str:
    """kill -9 of the launcher or of a rank. Returns what was hit."""
    known, left = whole(checkpoints), drafts(checkpoints)
    if moment == "start":
        time.sleep(chance.uniform(0.0, 3.0))
    else:
        wait_until(lambda: job.poll() is not None or whole(checkpoints) - known)
        time.sleep(chance.uniform(0.0, 0.3))
        if moment == "save":
            wait_until(lambda: job.poll() is not None or drafts(checkpoints) - left)
    assert job.poll() is None, "the run has ended before it was killed: raise STEPS_PER_KILL"
    workers = workers_of(job.pid)
    victim = chance.choice([job.pid, *workers])
    with suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
    assert job.wait(DEADLINE_SECONDS) != 0
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    return "launcher" if victim == job.pid else "rank"


def end(run: Path, steps: int) -> dict[str, Tensor]:
    files = StorageFolder(str(run / "checkpoints"))
    newest = CheckpointCatalog.read(files).whole[-1]
    assert newest.step == steps
    return dict(load_checkpoint(files, newest.name).tensors)


def kill_again_and_again(folder: Path, num_kills: int) -> Counter[str]:
    """The run that is killed ends with the bits of the run that is not. Returns how often what was hit."""
    chance, hit, steps = random.Random(7), Counter[str](), STEPS_PER_KILL * num_kills
    calm, killed = write_job(folder / "calm", steps), write_job(folder / "killed", steps)
    run = killed.parent / "run"
    for _ in range(num_kills):
        begun = bool(whole(run / "checkpoints"))
        if not begun:  # it left nothing to go on from, and a run never writes over another
            shutil.rmtree(run, ignore_errors=True)
        moment = chance.choice(["start", "step", "save"]) if begun else "step"
        job = start(folder / "said.txt", *(("--resume", run) if begun else (killed,)))
        hit[kill(job, run / "checkpoints", moment, chance)] += 1
        hit["inside a save"] += bool(drafts(run / "checkpoints"))
    finish(folder / "said.txt", "--resume", run)
    finish(folder / "said.txt", calm)
    right = end(calm.parent / "run", steps)
    assert {name.partition("/")[0] for name in right} == {"model", "optimizer", "residual"}
    found = end(run, steps)
    assert found.keys() == right.keys()
    assert [name for name, t in right.items() if not torch.equal(found[name], t)] == []
    return hit


@pytest.mark.soak
@pytest.mark.capability("N2", "N4", "N13")
@pytest.mark.timeout(7200)
def test_a_run_that_is_killed_at_random_ends_with_the_same_bits(tmp_path: Path) -> None:
    hit = kill_again_and_again(tmp_path, NUM_KILLS)
    assert hit["launcher"] + hit["rank"] == NUM_KILLS
    assert min(hit["launcher"], hit["rank"], hit["inside a save"]) > 0, hit
