"""A process beside the training writes the same checkpoints, and is replaced when it is lost."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint import publish, write_plan, writers
from paceline.checkpoint.checkpoint_reader import load_checkpoint
from paceline.checkpoint.disk.writer_process import WriterProcess
from paceline.checkpoint.publish import FullDiskPatience
from paceline.checkpoint.saver import CheckpointSaver
from paceline.checkpoint.storage import StorageFolder
from paceline.checkpoint.writers import ProcessWriter
from paceline.errors import CheckpointError
from paceline.parallel.sharded_model import unsharded_model
from paceline.state.train_state import TrainState
from tests.unit.checkpoint.states import change, holds, make_state, save, saver

pytestmark = pytest.mark.capability("N4")


@pytest.fixture(autouse=True)
def every_save_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "_MIN_PROCESS_BYTES", 0)
    monkeypatch.setattr(write_plan, "_MIN_FILE_BYTES", 64)


@contextmanager
def beside(url: object, state: TrainState, **changes: Any) -> Iterator[tuple[CheckpointSaver, list[str]]]:
    """A saver with a process, and what it warns of."""
    process, told = WriterProcess(dict(os.environ)), list[str]()
    writer = ProcessWriter(process, changes.pop("seconds", 20.0), told.append)
    with saver(url, state, writer=writer, **changes) as one:
        yield one, told


def grown(width: int) -> TrainState:
    model = torch.nn.Linear(width, 4)
    state = TrainState(unsharded_model(model), torch.optim.Adam(model.parameters(), lr=0.1))
    model(torch.ones(2, width)).sum().backward()
    state.optimizer.step()
    return state


def test_its_checkpoints_are_those_of_threads(tmp_path: Path) -> None:
    """Also while parameters, moments and statistics change, and whether or not it hurries."""
    state, manifests = make_state(), []
    with beside(tmp_path / "process", state, newest=9) as (one, told):
        for hurries in (False, True, False):
            one.save()
            change(state, one.settle)
            while one.busy and not hurries:
                time.sleep(0.01)
            one.finish()
            state.step += 1
    again = make_state()
    for kept in one.catalog.whole:
        name = save(tmp_path / "threads", again, newest=9)
        change(again)
        again.step += 1
        manifests += [
            (load_checkpoint(StorageFolder(str(tmp_path / place)), kept.name).manifest)
            for place in ("process", "threads")
        ]
        assert name == kept.name
    assert told == [] and len(manifests) == 6
    for found, right in zip(manifests[::2], manifests[1::2], strict=True):
        assert found.files == right.files and found.state_sha256 == right.state_sha256
        assert len(found.files) == 4


def test_a_state_that_grows_has_new_memory(tmp_path: Path) -> None:
    process = WriterProcess(dict(os.environ))
    for step, width in enumerate([8, 5000, 300]):
        state = grown(width)
        state.step = step
        with saver(tmp_path, state, writer=ProcessWriter(process, 20.0, pytest.fail), newest=9) as one:
            assert holds(tmp_path, (one.save(), one.finish())[0], state)


def test_a_process_that_is_killed_is_replaced(
    started: list[subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training writes what it was to write, says so, and the next save has a new one."""
    state = make_state()
    with beside(tmp_path, state, newest=9) as (one, told):
        for save_number in range(3):
            state.step += 1
            name = one.save()
            if save_number == 1:
                started[-1].kill()
                started[-1].wait()
                one.settle()
            one.finish()
            assert holds(tmp_path, name, state)
            assert started[-1].poll() == (-signal.SIGKILL if save_number == 1 else None)
    assert len(told) <= 1, "it may have ended with its work done"
    write = WriterProcess.write

    def write_after_a_kill(process: WriterProcess, *given: Any) -> list[str]:
        started[-1].kill()
        started[-1].wait()
        return write(process, *given)

    monkeypatch.setattr(WriterProcess, "write", write_after_a_kill)
    with beside(tmp_path / "other", state) as (one, told):
        name = one.save()
        one.finish()
        assert holds(tmp_path / "other", name, state)
        assert len(told) == 1 and "has ended" in told[0] and "training process writes this save" in told[0]


def test_a_process_that_is_stopped_is_replaced(
    started: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """Nobody may wait for it without end. One that goes on soon, as after Ctrl-Z of a whole job, is kept."""
    state = make_state()
    with beside(tmp_path, state, newest=9) as (one, told):
        one.save()
        one.finish()
        (stopped,) = started
        state.step += 1
        stopped.send_signal(signal.SIGSTOP)
        name = one.save()
        one.finish()
        assert holds(tmp_path, name, state) and stopped.returncode == -signal.SIGKILL
        assert len(told) == 1 and "was stopped by a signal" in told[0]
        state.step += 1
        name = one.save()
        one.finish()
        assert holds(tmp_path, name, state) and len(started) == 2 and len(told) == 1


def test_one_that_cannot_be_started_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    state = make_state()
    with beside(tmp_path / "c", state) as (one, told):
        name = one.save()
        one.finish()
    assert holds(tmp_path / "c", name, state)
    assert len(told) == 1 and "cannot be started" in told[0]


def fill(files: StorageFolder, times: int) -> None:
    """So many files come to lie on a disk that is full."""
    make_room, left = files.make_room, [None] * times

    def make(name: str) -> str:
        path = make_room(name)
        if name.endswith(".safetensors") and left:
            left.pop()
            Path(path).symlink_to("/dev/full")
        return path

    files.make_room = make


@pytest.mark.capability("N13")
def test_a_full_disk_is_an_error_or_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "_RETRY_SECONDS", 0.01)
    state, told = make_state(1), list[str]()
    with beside(tmp_path, state, newest=9) as (one, lost):
        name = one.save()
        one.finish()
        state.step = 2
        fill(one.catalog.files, 1)
        one.save()
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            one.finish()
        assert "step-00000002" in caught.value.where and "full_disk_seconds" in caught.value.next_step
        assert list((tmp_path / "step-00000002").iterdir()) == []
    assert holds(tmp_path, name, make_state(1)) and lost == []
    with beside(tmp_path, state, patience=FullDiskPatience(20.0, told.append)) as (one, lost):
        fill(one.catalog.files, 2)
        name = one.save()
        one.finish()
        assert holds(tmp_path, name, state)
    assert len(told) == 1 and "full" in told[0] and lost == []
