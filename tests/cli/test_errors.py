"""What goes wrong in a job, as a user sees it: one message, an exit code, and nothing left behind or lost.

The jobs of this file run side by side, once; the tests look at how they ended. See docs/errors.md.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.observe.metrics_schema import find_schema_errors
from paceline.report import read_run, summarize_run
from paceline.testing.leaks import find_leaks, take_snapshot
from tests.cli.jobs import End, end_of, has_handlers, start
from tests.ports import free_port

# Jobs that fail at the fifth call of the loss in training on rank 1, in the fifth step

FAILURES = {
    "raises": (1, "rank 1 raised ValueError: the 5th call", "task.py"),
    "killed": (137, "rank 1 was killed by SIGKILL (out of memory?)", "next:  if the kernel log"),
    "not-finite": (
        5,
        "raised NumericError: the loss is nan in step 4: on rank 1 the loss is nan and",
        "next:  lower optimizer.lr",
    ),
    "memory": (7, "rank 1 raised MemoryLimitError: out of memory: ", "next:  use fewer processes"),
}


def fails(folder: Path, what: str) -> End:
    words = ("--set", f"options.what={what}", "--set", "elastic.mode=off")
    with start(folder, "-n", "2", *words) as process:
        return end_of(process, folder)


# Jobs that get Ctrl-C in a phase

PHASES = {
    "rendezvous": (),
    "build": (),
    "training": ("-n", "2", "--set", "options.pause=0.05"),
    "saving": ("--set", "checkpoint.folder=slow://{}/run/checkpoints", "--set", "checkpoint.mode=background"),
    "evaluation": ("--set", "steps=6"),
}


def is_there(phase: str, folder: Path) -> bool:
    """In its phase a job waits until the signal is sent."""
    return has_handlers(folder) if phase == "rendezvous" else (folder / "reached").exists()


def interrupted(folder: Path, phase: str) -> End:
    more = [word.format(folder) for word in PHASES[phase]]
    if phase == "rendezvous":
        more = ["--insecure", "--nodes", "2", "--rendezvous", f"127.0.0.1:{free_port()}"]
    with start(folder, "--set", f"options.what={phase}", *more) as process:
        expires = time.monotonic() + 480
        while not is_there(phase, folder):
            assert process.poll() is None and time.monotonic() < expires, process.communicate()
            time.sleep(0.02)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        (folder / "sent").touch()
        return end_of(process, folder)


# Others

SHM = {
    "shared": "mount -t tmpfs -o size=64k tmpfs /dev/shm && exec ",
    "absent": "mkdir dev && mount -t tmpfs tmpfs dev && ln -s /proc/self/fd dev/fd"
    " && for name in null zero urandom; do touch dev/$name && mount --bind /dev/$name dev/$name; done"
    " && mount --rbind dev /dev && exec ",
}


def has_little_shared_memory(folder: Path, what: str) -> End:
    options = ("--set", "options.what=shared", "--set", "loader.workers=1")
    with start(folder, *options, prefix=SHM[what]) as process:
        return end_of(process, folder)


def has_namespaces() -> bool:
    tool = shutil.which("unshare")
    return tool is not None and subprocess.run([tool, "-Urm", "true"], check=False).returncode == 0


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, End]:
    """All jobs, a few at a time."""
    jobs: dict[str, Callable[[Path, str], End]] = dict.fromkeys(FAILURES, fails)
    jobs |= dict.fromkeys(PHASES, interrupted)
    jobs |= dict.fromkeys(SHM, has_little_shared_memory) if has_namespaces() else {}
    folder, before = tmp_path_factory.mktemp("jobs"), take_snapshot()
    with ThreadPoolExecutor(3) as pool:
        found = {name: pool.submit(job, folder / name, name) for name, job in jobs.items()}
        ended = {name: future.result() for name, future in found.items()}
    assert find_leaks(before) == []
    return ended


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("what", FAILURES)
def test_a_worker_that_fails_ends_the_job_and_is_named_first(what: str, ends: dict[str, End]) -> None:
    code, first, further = FAILURES[what]
    end = ends[what]
    assert end.code == code, end.err
    report = [line for line in end.err.splitlines() if line.startswith("rank ")]
    assert first in report[0] and further in end.err, end.err
    # that of the task alone: Paceline's own errors have none, and those of other ranks are one line
    assert end.err.count("Traceback") == (what in ("raises", "memory")), end.err
    assert end.checkpoints == [2, 4] and not end.broken and not end.temporary


@pytest.mark.timeout(1600)
@pytest.mark.capability("P2")
@pytest.mark.parametrize("what", ["raises", "killed"])
def test_the_failure_is_in_the_records_of_the_run(what: str, ends: dict[str, End]) -> None:
    run, said = read_run(ends[what].run), FAILURES[what][1].removeprefix("rank 1 ")
    assert run.error is not None and (run.status, run.error["rank"]) == ("failed", 1)
    for name in ("metrics.jsonl", "log.txt", "report.html"):
        assert said in (ends[what].run / name).read_text(), name
    assert find_schema_errors(run.error) == [] and summarize_run(run)[0].startswith("Failed after ")


@pytest.mark.timeout(1600)
@pytest.mark.capability("N7")
@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c(phase: str, ends: dict[str, End]) -> None:
    end = ends[phase]
    assert end.code == 130, end.err
    assert not end.broken and not end.temporary
    if phase in ("rendezvous", "build"):
        assert end.err == "stopped before the first step: there was nothing to save\n"
        assert not end.checkpoints
    else:
        assert end.err == "" and "resume:     paceline train --resume run" in end.out
        assert end.checkpoints[-1] == end.steps >= 3


@pytest.mark.timeout(1600)
@pytest.mark.skipif(not has_namespaces(), reason="needs unshare and user namespaces, for a small /dev/shm")
def test_shared_memory_that_is_too_small(ends: dict[str, End]) -> None:
    assert ends["shared"].code == 7, ends["shared"].err
    assert "rank 0 raised MemoryLimitError: this host is out of shared memory" in ends["shared"].err
    assert "next:  enlarge /dev/shm" in ends["shared"].err and not ends["shared"].temporary


@pytest.mark.timeout(1600)
@pytest.mark.skipif(not has_namespaces(), reason="needs unshare and user namespaces, to leave out /dev/shm")
def test_a_container_without_shared_memory_is_named_where_loaders_need_it(
    ends: dict[str, End],
) -> None:
    assert ends["absent"].code == 7, ends["absent"].err
    assert "rank 0 raised MemoryLimitError: this container has no /dev/shm" in ends["absent"].err
    assert "next:  mount it" in ends["absent"].err and "Traceback" not in ends["absent"].err


def test_a_missing_recipe(tmp_path: Path) -> None:
    (tmp_path / "digits.toml").touch()
    command = [sys.executable, "-m", "paceline", "train", "digit.toml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert "cannot read the recipe" in done.stderr and "did you mean digits.toml?" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["digits.toml"]
