"""Full disks, folders that cannot be written, streams that nobody reads: training goes on, and says so."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from paceline.checkpoint.catalog import CheckpointCatalog
from paceline.checkpoint.storage import StorageFolder
from paceline.observe import JsonLinesSink, TextLogSink
from tests.hostile.jobs import prepare
from tests.marks import soak_param
from tests.mounted import Mounted, run_mounted

pytestmark = [pytest.mark.capability("N13", "P2"), pytest.mark.timeout(240)]


def may_mount() -> bool:
    tool = shutil.which("unshare")
    return tool is not None and subprocess.run([tool, "-Urm", "true"], check=False).returncode == 0


Ends = dict[str, subprocess.CompletedProcess[str]]
mounts = pytest.mark.skipif(not may_mount(), reason="needs user namespaces")


class Disk:
    """Stands for `os.write` on a disk with room for so many bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room, self._write = room, os.write
        monkeypatch.setattr("paceline.observe.file_writing.os.write", self.write)

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
    sink = JsonLinesSink(tmp_path / "metrics.jsonl", warn=said.append)
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
    log = TextLogSink(tmp_path / "missing" / "log.txt", warn=said.append)
    for i in range(3):
        log.write("info", f"line {i}")
    log.close()
    assert (
        len(said) == 2
        and "No such file" in said[0]
        and said[1] == "lost 3 lines of log.txt that could not be written"
    )


SUM = str(Path(__file__).parents[2] / "recipes" / "sum.toml")
READ_ONLY = "mount --bind {0} {0} && mount -o remount,bind,ro {0}"
TRAIN = ("train", "recipe.toml")
ON_SMALL = ("train", SUM, "-n", "1", "--set", "run_dir=small/run", "--set", "runtime.threads=1")
JOBS = {  # the name of a folder, a script that mounts something in it ({0} is its path), and a command there
    "full log": (
        "a",
        "mkdir kept && mount -t tmpfs -o size=16k tmpfs run && head -c 8k /dev/zero > run/ballast",
        (*TRAIN, "--set", "checkpoint.folder=kept", "--set", "steps=40"),
    ),
    "read-only run folder": ("b", "mount -t tmpfs -o ro tmpfs run", TRAIN),
    "full run folder": ("c", "mount -t tmpfs -o size=4k tmpfs run && head -c 4k /dev/zero > run/x", TRAIN),
    "read-only working directory": ("d", READ_ONLY, (*TRAIN, "--set", "run_dir=other")),
    "disk that the metrics fill": (
        "e",
        "mkdir small && mount -t tmpfs -o size=200k tmpfs small",
        (*ON_SMALL, "--set", "steps=1500"),
    ),
    "read-only disk": ("f", "mkdir small && mount -t tmpfs -o ro tmpfs small", ON_SMALL),
    "trained": ("g", "", TRAIN),
    "report": ("g", READ_ONLY.replace("{0}", "{0}/run"), ("report", "run")),
    "resume": ("g", "", ("train", "--resume", "run", "--set", "steps=8")),
}


FURTHER = ("read-only run folder", "read-only working directory", "disk that the metrics fill")


def run_jobs(place: Path, names: Collection[str]) -> Ends:
    """How the commands ended on their disks."""
    jobs = {}
    for name, (where, before, words) in JOBS.items():
        if name not in names:
            continue
        folder = place / where
        prepare(folder)
        (folder / "run").mkdir(exist_ok=True)
        jobs[name] = Mounted(str(folder), before.format(folder), words)
    return run_mounted(jobs)


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """Run the cases of the suite once, side by side."""
    return run_jobs(tmp_path_factory.mktemp("disks"), JOBS.keys() - {*FURTHER})


@pytest.fixture(scope="module")
def further_ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """Run the cases that only `make soak` has, once."""
    return run_jobs(tmp_path_factory.mktemp("disks"), FURTHER)


@mounts
def test_training_ends_well_although_the_disk_of_its_log_is_full(ends: Ends) -> None:
    """The checkpoints are on another disk; the run folder has no room for a line."""
    done = ends["full log"]
    assert done.returncode == 0, done.stderr
    assert "cannot write" in done.stderr
    assert ": No space left on device; the run goes on without it" in done.stderr
    assert "Traceback" not in done.stderr
    assert CheckpointCatalog.read(StorageFolder(f"{done.args}/kept")).whole[-1].step == 40


@mounts
@pytest.mark.parametrize("disk", [soak_param(FURTHER[0]), "full run folder", soak_param(FURTHER[1])])
def test_a_run_folder_that_cannot_be_written_is_an_error_with_a_next_step(
    disk: str, request: pytest.FixtureRequest
) -> None:
    done = request.getfixturevalue("further_ends" if disk in FURTHER else "ends")[disk]
    assert done.returncode == 3, done.stderr
    assert "RunFolderError: cannot write the files of the run" in done.stderr and "next:" in done.stderr
    assert "Traceback" not in done.stderr


@mounts
@pytest.mark.capability("N1")
@pytest.mark.parametrize(
    "disk, what",
    [
        soak_param(FURTHER[2], "cannot write a checkpoint: [Errno 28] No space left on device"),
        ("read-only disk", "cannot write the files of the run: Read-only file system"),
    ],
)
def test_a_disk_that_takes_nothing_is_one_error_with_a_next_step(
    disk: str, what: str, request: pytest.FixtureRequest
) -> None:
    """The metrics alone fill the disk: training goes on until a checkpoint is due at its end."""
    done = request.getfixturevalue("further_ends" if disk in FURTHER else "ends")[disk]
    assert done.returncode == 3, done.stderr
    assert what in done.stderr and "next:" in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) < 8


@mounts
def test_a_report_is_shown_although_its_page_cannot_be_written(ends: Ends) -> None:
    assert ends["trained"].returncode == 0, ends["trained"].stderr
    done = ends["report"]
    assert done.returncode == 2, done.stderr
    assert "Finished" in done.stdout and "next:  choose another file: -o FILE" in done.stderr
    going_on = ends["resume"]
    assert going_on.returncode == 3 and "Read-only file system" in going_on.stderr, going_on.stderr


@pytest.mark.parametrize("to", ["/dev/full", soak_param("a pipe that is closed")])
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
    assert "cannot write to standard output" in done.stderr and "Traceback" not in done.stderr
    assert CheckpointCatalog.read(StorageFolder(str(tmp_path / "run" / "checkpoints"))).whole[-1].step == 6


def test_a_command_that_only_shows_something_fails_when_it_cannot(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "paceline", "strategies"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1 and "error: a system call failed: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
