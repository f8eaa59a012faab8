"""Full disks, folders that cannot be written, streams that nobody reads: training goes on, and says so."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.checkpoint import Files, Shelf
from paceline.observe import JsonLines, TextLog
from tests.command_jobs import in_namespaces
from tests.hostile.jobs import end_of, prepare, start

pytestmark = [pytest.mark.capability("N13", "P2"), pytest.mark.timeout(240)]


def may_mount() -> bool:
    tool = shutil.which("unshare")
    return tool is not None and subprocess.run([tool, "-Urm", "true"], check=False).returncode == 0


mounts = pytest.mark.skipif(not may_mount(), reason="needs user namespaces")


class Disk:
    """Stands for `os.write` on a disk with room for so many bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room, self._write = room, os.write
        monkeypatch.setattr("paceline.observe.append.os.write", self.write)

    def write(self, file: int, data: bytes) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = self._write(file, data[: self.room])
        self.room -= count
        return count


@pytest.mark.parametrize("room", range(0, 400, 7))
def test_what_a_full_disk_did_not_take_is_written_later_once_and_in_order(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, said = Disk(monkeypatch, room), list[str]()
    sink = JsonLines(tmp_path / "metrics.jsonl", say=said.append)
    for step in range(10):
        sink.event("checkpoint", {"step": step, "path": "x"})
        if step == 7:
            disk.room = 10_000
    sink.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(10))
    assert len(said) == 1 and "No space left" in said[0] and "goes on" in said[0]


def test_a_log_that_is_never_written_ends_nothing_and_its_loss_is_told(tmp_path: Path) -> None:
    said: list[str] = []
    log = TextLog(tmp_path / "missing" / "log.txt", say=said.append)
    for i in range(3):
        log.write("info", f"line {i}")
    log.close()
    assert (
        len(said) == 2
        and "No such file" in said[0]
        and said[1] == "log.txt lacks 3 lines, which could not be written"
    )


def in_namespace(folder: Path, before: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A command after `before`, as root of a namespace of its own."""
    command = [*in_namespaces(f"{before} && exec "), sys.executable, "-m", "paceline", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)


@mounts
def test_training_ends_well_although_the_disk_of_its_log_is_full(tmp_path: Path) -> None:
    """The checkpoints are on another disk; the run folder has no room for a line."""
    prepare(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "kept").mkdir()
    fill = "mount -t tmpfs -o size=16k tmpfs run && (head -c 8k /dev/zero > run/ballast)"
    done = in_namespace(
        tmp_path,
        fill,
        *("train", "recipe.toml", "--set", f'checkpoint.folder="{tmp_path}/kept"', "--set", "steps=40"),
    )
    assert done.returncode == 0, done.stderr
    assert "cannot be written: No space left on device; the run goes on without it" in done.stderr
    assert "Traceback" not in done.stderr
    assert Shelf.look(Files(str(tmp_path / "kept"))).whole[-1].step == 40


@mounts
@pytest.mark.parametrize(
    ("before", "words", "code"),
    [
        ("mount -t tmpfs -o ro tmpfs run", ("train", "recipe.toml"), 3),
        (
            "mount -t tmpfs -o size=4k tmpfs run && (head -c 4k /dev/zero > run/x)",
            ("train", "recipe.toml"),
            3,
        ),
        (
            "mount --bind . . && mount -o remount,bind,ro . ; cd .",
            ("train", "recipe.toml", "--set", 'run_dir="other"'),
            3,
        ),
    ],
    ids=["read-only run folder", "full run folder", "read-only working directory"],
)
def test_a_run_folder_that_cannot_be_written_is_an_error_with_a_next_step(
    before: str, words: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    prepare(tmp_path)
    (tmp_path / "run").mkdir()
    done = in_namespace(tmp_path, f"cd {tmp_path} && {before} && cd {tmp_path}", *words)
    assert done.returncode == code, done.stderr
    assert "RunFolderError: cannot write the files of the run" in done.stderr and "next:" in done.stderr
    assert "Traceback" not in done.stderr


@mounts
def test_a_report_is_shown_although_its_page_cannot_be_written(tmp_path: Path) -> None:
    prepare(tmp_path)
    with start(tmp_path, "train", "recipe.toml") as process:
        assert end_of(process).code == 0
    read_only = f"mount --bind {tmp_path}/run {tmp_path}/run && mount -o remount,bind,ro {tmp_path}/run"
    done = in_namespace(tmp_path, read_only, "report", "run")
    assert done.returncode == 2, done.stderr
    assert "Finished" in done.stdout and "next:  choose another place: -o FILE" in done.stderr
    going_on = in_namespace(tmp_path, read_only, "train", "--resume", "run", "--set", "steps=8")
    assert going_on.returncode == 3 and "Read-only file system" in going_on.stderr, going_on.stderr


@pytest.mark.parametrize("to", ["/dev/full", "a pipe that is closed"])
def test_training_goes_on_when_nobody_can_read_what_it_says(to: str, tmp_path: Path) -> None:
    prepare(tmp_path)
    if to == "/dev/full":
        out = os.open(to, os.O_WRONLY)
    else:
        far_end, out = os.pipe()
        os.close(far_end)
    command = [sys.executable, "-m", "paceline", "train", "recipe.toml", "-n", "2"]
    done = subprocess.run(
        command, cwd=tmp_path, stdout=out, stderr=subprocess.PIPE, text=True, timeout=100, check=False
    )
    os.close(out)
    assert done.returncode == 0, done.stderr
    assert "standard output cannot be written" in done.stderr and "Traceback" not in done.stderr
    assert Shelf.look(Files(str(tmp_path / "run" / "checkpoints"))).whole[-1].step == 6


def test_a_command_that_only_shows_something_fails_when_it_cannot(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "paceline", "strategies"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1 and "error: the system refused: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
