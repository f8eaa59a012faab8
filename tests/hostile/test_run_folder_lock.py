"""Two jobs on one run folder: the second is told who is first; the folder of another user needs trust."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from paceline.checkpoint.catalog import CheckpointCatalog
from paceline.checkpoint.lock import LOCK_FILE, FolderLock
from paceline.checkpoint.storage import StorageFolder
from paceline.errors import CheckpointError
from tests.commands import Command
from tests.hostile.jobs import end_of, prepare, start, train, until
from tests.unit.checkpoint.states import load, make_state, save, saver

pytestmark = pytest.mark.capability("N13")
HOLD = """
import sys, time
from pathlib import Path
from paceline.checkpoint.lock import FolderLock
from paceline.checkpoint.storage import StorageFolder
lock = FolderLock(StorageFolder(sys.argv[1]), print)
Path(sys.argv[1], "held").touch()
time.sleep(600)
"""


def hold(folder: Path) -> Command:
    """Another process that has the lock of a folder."""
    (folder / "hold.py").write_text(HOLD)
    process = Command(["paceline.launch", str(folder / "hold.py"), str(folder)], folder, {})
    until((folder / "held").exists, process)
    return process


@pytest.mark.parametrize(
    ("words", "code"),
    [(("train", "--resume", "run"), 3), pytest.param(("train", "recipe.toml"), 2, marks=pytest.mark.soak)],
)
def test_a_second_job_is_refused_and_who_resumes_is_told_host_and_process(
    words: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    with train(tmp_path, options__pause=0.2, steps=100000) as first:
        until((tmp_path / "run" / "checkpoints" / "step-00000002" / "manifest.json").exists, first)
        recipe = (tmp_path / "run" / "recipe.toml").read_bytes()
        with start(tmp_path, *words, "--set", "steps=4") as second:
            end = end_of(second)
        assert end.code == code, end.err
        owner = json.loads((tmp_path / "run" / LOCK_FILE).read_text())
        owned = f"another job is writing to this folder: process {owner['pid']} on {socket.gethostname()}"
        text, step = (
            (owned, "wait until it ends") if code == 3 else ("'run' already holds a run", "resume it")
        )
        assert text in end.err and f"next:  {step}" in end.err
        assert (tmp_path / "run" / "recipe.toml").read_bytes() == recipe
        first.send_signal(signal.SIGTERM)
        assert end_of(first).code == 143
    assert not (tmp_path / "run" / LOCK_FILE).exists()


def test_a_job_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    with hold(tmp_path) as other:
        with pytest.raises(CheckpointError, match=f"process {other.pid} on"):
            FolderLock(StorageFolder(str(tmp_path)), print)
        other.kill()
        other.wait()
    FolderLock(StorageFolder(str(tmp_path)), print).release()
    assert not (tmp_path / LOCK_FILE).exists()


class Unlockable(StorageFolder):
    """A folder as an object store is: without the kernel's locks."""

    def local_path(self, name: str) -> Path | None:
        return None


def test_without_locks_of_the_kernel_a_living_process_is_known_and_a_dead_one_too(tmp_path: Path) -> None:
    lock = FolderLock(Unlockable(str(tmp_path)), print)
    with pytest.raises(CheckpointError, match=f"process {os.getpid()} on"):
        FolderLock(Unlockable(str(tmp_path)), print)
    left = json.loads((tmp_path / LOCK_FILE).read_text())
    lock.release()
    assert not (tmp_path / LOCK_FILE).exists()
    (tmp_path / LOCK_FILE).write_text(
        json.dumps({**left, "start": 1})
    )  # the number belongs to another by now
    FolderLock(Unlockable(str(tmp_path)), print).release()


@pytest.mark.parametrize("beats", [True, False])
def test_an_owner_on_another_host_is_watched(beats: bool, tmp_path: Path) -> None:
    said: list[str] = []
    if beats:
        theirs = FolderLock(Unlockable(str(tmp_path)), print, heartbeat_seconds=0.05)
        theirs._record["boot"] = theirs._record["host"] = "elsewhere"
        expires = time.monotonic() + 60.0
        while "elsewhere" not in (tmp_path / LOCK_FILE).read_text() and time.monotonic() < expires:
            time.sleep(0.01)  # until its next heartbeat
        with pytest.raises(CheckpointError, match="on elsewhere"):
            FolderLock(Unlockable(str(tmp_path)), said.append, watch_seconds=30.0)
        theirs.release()
    else:
        (tmp_path / LOCK_FILE).write_text(
            json.dumps({"host": "elsewhere", "pid": 5, "boot": "x", "owner": "y"})
        )
        FolderLock(Unlockable(str(tmp_path)), said.append, watch_seconds=0.3).release()
    assert "process 5 on elsewhere" in said[0] if not beats else "on elsewhere" in said[0]


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 5000, '{"pid": "x", "host": [1]}', "\x00" * 9000])
def test_a_lock_that_is_damaged_is_taken(text: str, tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text(text)
    FolderLock(StorageFolder(str(tmp_path)), print, watch_seconds=0.1).release()


def test_nothing_that_is_published_is_ever_written_again(tmp_path: Path) -> None:
    """Without a lock, as a library may be used: two savers of one folder."""
    state = make_state(2)
    with saver(tmp_path, state) as late:
        published = save(tmp_path, make_state(2, seed=1))
        before = {path.name: path.read_bytes() for path in (tmp_path / published).iterdir()}
        assert late.save() != published
        late.finish()
        assert len(CheckpointCatalog.read(StorageFolder(str(tmp_path))).whole) == 2
        with pytest.raises(CheckpointError, match="is there already"):
            late.catalog.publish(published, load(tmp_path, published).manifest)
    assert {path.name: path.read_bytes() for path in (tmp_path / published).iterdir()} == before


def test_a_resume_before_the_first_checkpoint_begins_at_step_0_and_says_so(tmp_path: Path) -> None:
    prepare(tmp_path)
    with train(tmp_path, checkpoint__every_steps=0, options__pause=0.2, steps=100000) as process:
        metrics = tmp_path / "run" / "metrics.jsonl"
        until(lambda: metrics.exists() and '"step"' in metrics.read_text(), process)
        process.kill()
        process.communicate()
    with start(tmp_path, "train", "--resume", "run", "-n", "2", "--set", "steps=4") as process:
        end = end_of(process)
    assert end.code == 0, end.err
    assert "this run has no checkpoint yet, so it starts at step 0" in end.out
    assert CheckpointCatalog.read(StorageFolder(str(tmp_path / "run" / "checkpoints"))).whole[-1].step == 4


@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder to another user")
def test_the_run_of_another_user_asks_for_trust(tmp_path: Path) -> None:
    prepare(tmp_path)
    with start(tmp_path, "train", "recipe.toml") as process:
        assert end_of(process).code == 0
    for words in (("train", "--resume", "run", "--set", "steps=8"), ("verify", "run", "--steps", "1")):
        (tmp_path / "building-0").unlink()
        os.chown(tmp_path / "run" / "recipe.toml", 65534, 65534)
        with start(tmp_path, *words) as process:
            end = end_of(process)
        assert end.code == 2 and "the run belongs to another user (65534)" in end.err, end.err
        assert not (tmp_path / "building-0").exists(), "its code was run"
        with start(tmp_path, *words, "--trust") as process:
            end = end_of(process)
        assert end.code == 0, end.err
