"""A signal to any one rank: all ranks save the same step and leave with 143; a second one ends at once."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.checkpoint.catalog import CheckpointCatalog
from paceline.checkpoint.checkpoint_reader import load_checkpoint
from paceline.checkpoint.storage import StorageFolder
from paceline.session.stop_signals import SAME_REQUEST_SECONDS
from tests import commands
from tests.commands import Command

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.capability("N7")

TASK = """
import os, time
from pathlib import Path
import torch
from torch import nn
from paceline import Loss
from paceline.session.stop_signals import StopRequest

RANK = int(os.environ.get("RANK", "0"))
request = StopRequest.request

def told(self, now):
    found = request(self, now)
    Path(f"asked-{RANK}").touch()
    return found

def build(pause):
    StopRequest.request = told
    def loss(model, batch):
        time.sleep(pause * (RANK + 1))
        while Path("hold").exists():
            Path(f"held-{RANK}").touch()
            time.sleep(0.01)
        return Loss((model(batch) ** 2).sum(), len(batch))
    return nn.Linear(4, 1), torch.rand(64, 4), loss
"""
RECIPE = """
task = "task.py:build"
steps = 100000
run_dir = "run"
[options]
pause = {pause}
[batch]
size = 8
shards = 2
"""


def start(folder: Path, pause: float) -> Command:
    (folder / "task.py").write_text(TASK)
    (folder / "recipe.toml").write_text(RECIPE.format(pause=pause))
    return commands.start(folder, "train", "recipe.toml", "-n", 2)


def steps_done(folder: Path) -> list[int]:
    path = folder / "run" / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()  # the last one may be under way
    return [record["step"] for record in map(json.loads, lines) if record["event"] == "step"]


def until(condition: Callable[[], bool], process: Command) -> None:
    expires = time.monotonic() + 240
    while not condition():
        assert process.poll() is None and time.monotonic() < expires
        time.sleep(0.02)


def worker(folder: Path, rank: int) -> int:
    """The process of a rank of the job in a folder; a fork server names what it forks."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            here = (process / "cwd").readlink() == folder
            name = (process / "comm").read_text().strip()
            environ = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if here and (name == f"rank {rank}" or f"RANK={rank}".encode() in environ):
            return int(process.name)
    raise AssertionError(f"rank {rank} does not run")


def stop_and_look(folder: Path, rank: int, number: signal.Signals) -> None:
    with start(folder, 0.005) as process:
        until(lambda: len(steps_done(folder)) >= 3, process)
        os.kill(worker(folder, rank), number)
        _, said = process.communicate(timeout=160)
    assert process.returncode == 143, said
    assert said == ""
    shelf = CheckpointCatalog.read(StorageFolder(str(folder / "run" / "checkpoints")))
    step = max(steps_done(folder)) + 1
    assert [kept.step for kept in shelf.whole] == [step]
    manifest = load_checkpoint(shelf.files, shelf.whole[0].name).manifest
    reports = [shelf.files.read(f"{shelf.whole[0].name}/rank-{r:05d}.json") for r in range(2)]
    assert [json.loads(report)["scalars"]["step"] for report in reports] == [step, step]
    assert manifest.origin.world_size == 2


@pytest.mark.parametrize(("rank", "number"), [(1, signal.SIGTERM), (0, signal.SIGUSR1)])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(
    rank: int, number: signal.Signals, tmp_path: Path
) -> None:
    stop_and_look(tmp_path, rank, number)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_twenty_of_twenty(tmp_path: Path) -> None:
    for i in range(20):
        folder = tmp_path / str(i)
        folder.mkdir()
        stop_and_look(folder, i % 2, (signal.SIGTERM, signal.SIGUSR1)[i // 2 % 2])


def test_a_second_signal_ends_at_once_and_nothing_that_was_saved_is_lost(tmp_path: Path) -> None:
    with start(tmp_path, 0.005) as process:
        until(lambda: len(steps_done(tmp_path)) >= 3, process)
        (tmp_path / "hold").touch()
        until((tmp_path / "held-1").exists, process)
        pid = worker(tmp_path, 1)
        os.kill(pid, signal.SIGTERM)
        until((tmp_path / "asked-1").exists, process)
        time.sleep(SAME_REQUEST_SECONDS + 0.1)
        assert process.poll() is None  # it is in a step without end
        os.kill(pid, signal.SIGTERM)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert said.startswith("rank 1 ended with exit code 130")
    assert not list((tmp_path / "run").glob("checkpoints/*/manifest.json"))  # the step was not waited for
