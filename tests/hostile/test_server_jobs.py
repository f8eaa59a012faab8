"""A job with a server outlives its workers, by the command line too, and ends with its server."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from paceline.checkpoint.catalog import CheckpointCatalog
from paceline.checkpoint.checkpoint_reader import load_checkpoint
from paceline.checkpoint.storage import StorageFolder
from tests.command_jobs import start
from tests.hostile.jobs import end_of, train, until

pytestmark = [
    pytest.mark.capability("N5", clause="a server and its launcher outlive workers"),
    pytest.mark.timeout(240),
]
SERVED = '"servers=1 sync=server-async"'


def events(folder: Path, name: str) -> list[dict[str, object]]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == name]


@pytest.mark.parametrize(
    ("what", "deadline"), [("SIGKILL", 60), pytest.param("SIGSTOP", 4, marks=pytest.mark.soak)]
)
def test_a_job_goes_on_without_a_worker_that_is_lost_and_says_so(
    what: str, deadline: float, tmp_path: Path
) -> None:
    """It saves, writes the numbers of those that are left, and ends well. The signal comes in a step."""
    keys = {"batch__shards": 4, "options__pause": 0.02, "steps": 60, "checkpoint__every_steps": 10}
    keys |= {"options__what": f'"{what}"', "options__rank": 2, "runtime__deadline_seconds": deadline}
    with train(tmp_path, processes=4, strategy=SERVED, **keys) as process:
        end = end_of(process)
    assert end.code == 0, end.err
    assert "rank 2 was" in end.err and "; the server continues without it if it can" in end.err
    assert [record["rank"] for record in events(tmp_path, "lost")] == [2]
    assert CheckpointCatalog.read(StorageFolder(str(tmp_path / "run" / "checkpoints"))).whole[-1].step == 60
    assert {record["rank"] for record in events(tmp_path, "ranks")} >= {0, 1}


@pytest.mark.parametrize(
    ("what", "strategy", "left_out"),
    [
        ("die-in-evaluation", SERVED, 0),
        (
            "die-in-write",
            '"servers=1 sync=server-async codec=int8"',
            1,
        ),  # what it has not sent, nobody else has
        pytest.param("die-in-save", SERVED, 0, marks=pytest.mark.soak),
        pytest.param("die-in-save", '"servers=2 sync=server-async codec=int8"', 0, marks=pytest.mark.soak),
    ],
)
def test_a_job_goes_on_without_a_worker_that_is_lost_between_two_rounds(
    what: str, strategy: str, left_out: int, tmp_path: Path
) -> None:
    """Evaluations are whole, and so is every checkpoint; nobody waits for a deadline."""
    keys = {"batch__shards": 4, "options__what": f'"{what}"', "options__rank": 2, "checkpoint__keep": 9}
    keys |= {"evaluate__every_steps": 2, "evaluate__batch": 4, "runtime__deadline_seconds": 600}
    with train(tmp_path, processes=4, strategy=strategy, **keys) as process:
        end = end_of(process)
    assert end.code == 0, end.err
    assert "rank 2 was killed by SIGKILL" in end.err and "; the server continues without it" in end.err
    kept = CheckpointCatalog.read(StorageFolder(str(tmp_path / "run" / "checkpoints")))
    assert [one.step for one in kept.whole] == [2, 4, 6][left_out:] and not kept.broken
    assert [event["step"] for event in events(tmp_path, "checkpoint")] == [one.step for one in kept.whole]
    told = [str(event["text"]) for event in events(tmp_path, "warning")]
    assert sum("rank 2 was lost before it had written its part" in text for text in told) == left_out
    losses = {event["step"]: event["loss"] for event in events(tmp_path, "evaluation")}
    assert losses.keys() == {2, 4, 6}
    for one in kept.whole:
        assert losses[one.step] == pytest.approx(held_out_loss(kept.files, one.name), rel=1e-5)


def test_a_run_is_resumed_from_what_was_saved_after_a_worker_was_lost_in_that_save(tmp_path: Path) -> None:
    """By those that are left, it ends where the job ended that went on without the worker."""
    strategy, checkpoints = '"servers=1 sync=server"', tmp_path / "run" / "checkpoints"
    keys = {"batch__shards": 4, "options__what": '"die-in-write"', "options__rank": 3, "steps": 6}
    keys |= {"checkpoint__keep": 9, "checkpoint__every_steps": 2, "runtime__deadline_seconds": 600}
    with train(tmp_path, processes=4, strategy=strategy, **keys) as process:
        end = end_of(process)
    assert end.code == 0 and "rank 3 was killed by SIGKILL" in end.err, end.err
    first, *later = CheckpointCatalog.read(StorageFolder(str(checkpoints))).whole
    assert [one.step for one in (first, *later)] == [2, 4, 6]
    expected = load_checkpoint(StorageFolder(str(checkpoints)), later[-1].name).tensors
    for one in later:
        shutil.rmtree(checkpoints / one.name)
    with start(tmp_path, "train", "--resume", "run", "-n", "3") as process:
        end = end_of(process)
    assert end.code == 0, end.err
    kept = CheckpointCatalog.read(StorageFolder(str(checkpoints)))
    assert [one.step for one in kept.whole] == [2, 4, 6] and not kept.broken
    found = load_checkpoint(kept.files, kept.whole[-1].name).tensors
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name != "work/work":  # how many parts there were: a worker less
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)


def held_out_loss(files: StorageFolder, name: str) -> float:
    """The mean over the task's held-out samples, from the values in a checkpoint."""
    values, x = load_checkpoint(files, name).tensors, torch.linspace(0.0, 1.0, 128).view(32, 4)
    for layer in (0, 1):
        x = x @ values[f"model/{layer}.weight"].T + values[f"model/{layer}.bias"]
    return float((x**2).sum() / len(x))


def test_a_worker_that_is_lost_before_a_server_takes_over_ends_the_job(tmp_path: Path) -> None:
    """All are needed in every-step, though the job has a server later; nobody is told otherwise."""
    keys = {"batch__shards": 4, "options__pause": 0.02, "steps": 5000, "health__straggler_factor": 1000.0}
    strategy = '"servers=1 sync=every-step@straggler,server-async"'
    with train(tmp_path, processes=3, strategy=strategy, **keys) as process:
        until((tmp_path / "stepping-2").exists, process)
        os.kill(int((tmp_path / "building-2").read_text()), signal.SIGKILL)
        end = end_of(process)
    assert end.code == 137, end.err
    assert "rank 2 was killed by SIGKILL" in end.err and "continues without it" not in end.err


@pytest.mark.parametrize("rank", [0, 1])
def test_the_loss_of_a_server_ends_the_job(rank: int, tmp_path: Path) -> None:
    """Of one, and of the second of two, without which nothing can be updated."""
    strategy = SERVED if rank == 0 else SERVED.replace("servers=1", "servers=2")
    with train(tmp_path, processes=3, strategy=strategy, options__pause=0.02, steps=5000) as process:
        until((tmp_path / "stepping-2").exists, process)
        os.kill(int((tmp_path / f"building-{rank}").read_text()), signal.SIGKILL)
        end = end_of(process)
    assert end.code == 137, end.err
    assert f"rank {rank} was killed by SIGKILL" in end.err
