"""The pytest plugin, in a pytest of its own: leaks fail by name, marks work, rows are reported."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.testing.leaks import take_snapshot
from tests.marks import soak_param

LEAKS = """
import os, subprocess, sys, threading, time
from pathlib import Path
import pytest
from paceline.testing import leaks

def test_variable():
    os.environ["PACELINE_LEAK"] = "1"

def test_variable_is_gone():
    assert "PACELINE_LEAK" not in os.environ

def test_removed_variable():
    del os.environ["PACELINE_KEPT"]

def test_removed_variable_is_back():
    assert os.environ["PACELINE_KEPT"] == "1"

over = threading.Event()

def test_resources():
    leaks._SETTLE_SECONDS = 0.3  # other tests that run now must not see it for long
    threading.Thread(target=over.wait, name="lazy").start()
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    (Path("/dev/shm") / f"paceline-leak-{os.getpid()}").touch()

def test_group():
    over.set()
    leaks._SETTLE_SECONDS = 100.0  # from here on nothing is a leak that ends by itself
    import torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def test_group_is_gone():
    import torch.distributed as dist
    assert not dist.is_initialized()

def test_what_ends_soon_is_no_leak():
    threading.Thread(target=time.sleep, args=(0.2,)).start()
    subprocess.Popen([sys.executable, "-c", "pass"])

def test_ranks_are_no_leak():
    from paceline.testing import run_ranks
    run_ranks(lambda cluster: None, 2)
"""

MARKS = """
import pytest

@pytest.mark.capability("Q9")
@pytest.mark.soak
def test_long():
    pass

@pytest.mark.capability("Q1", "Q2")
def test_good():
    pass

@pytest.mark.capability("Q2")
def test_bad():
    assert False

@pytest.mark.capability("Q1")
@pytest.mark.gpu
def test_gpu():
    import torch
    assert torch.cuda.is_available()

@pytest.mark.capability("Q3")
def test_torn(request):
    request.addfinalizer(lambda: 1 / 0)
"""


def run_pytest(folder: Path, text: str, *options: str, environ: dict[str, str] | None = None) -> str:
    """Run one test file with the plugin; what pytest printed."""
    (folder / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "paceline.testing.plugin", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-rA", "--strict-markers", *options, "test_it.py"],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout


def verdicts(printed: str) -> dict[str, set[str]]:
    """Which tests pytest's summary lists under which word."""
    found: dict[str, set[str]] = {"PASSED": set(), "FAILED": set(), "ERROR": set(), "SKIPPED": set()}
    for line in printed.splitlines():
        word, _, rest = line.partition(" ")
        if word in found:
            found[word].add(rest.partition("::")[2].split()[0] if "::" in rest else rest)
    return found


def test_leaks_fail_by_name_and_the_next_test_does_not_suffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_KEPT", "1")
    printed = run_pytest(tmp_path, LEAKS)
    for segment in Path("/dev/shm").glob("paceline-leak-*"):
        segment.unlink()
    found = verdicts(printed)
    assert found["ERROR"] == {"test_variable", "test_removed_variable", "test_resources", "test_group"}, (
        printed
    )
    assert found["FAILED"] == set()
    assert "environment variable PACELINE_LEAK" in printed
    assert "environment variable PACELINE_KEPT" in printed
    assert "thread 'lazy'" in printed
    assert "import time; time.sleep(1000)" in printed
    assert "shared memory /dev/shm/paceline-leak-" in printed
    assert "the default process group of torch.distributed" in printed


LOOKS = """
import multiprocessing, sys
from paceline.testing import leaks
leaks._SETTLE_SECONDS = 0.3
before = leaks.take_snapshot()
print("looked", flush=True)
sys.stdin.readline()
print(leaks.find_leaks(before), flush=True)
own = multiprocessing.get_context("forkserver").Lock()
print(leaks.find_leaks(before), flush=True)
"""


def test_a_semaphore_of_another_program_is_no_leak() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LOOKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin and child.stdout
        assert child.stdout.readline() == "looked\n"
        others = multiprocessing.get_context("forkserver").Lock()
        child.stdin.write("look again\n")
        child.stdin.flush()
        none, own = (child.stdout.readline().strip() for _ in range(2))
        del others
    assert none == "[]"
    assert own.startswith("['shared memory /dev/shm/sem.") and "," not in own


def test_a_program_that_has_no_words_yet_is_seen() -> None:
    """As between its start and its first instruction; a process that ends has no memory either."""
    with subprocess.Popen([""], executable="/bin/cat", stdin=subprocess.PIPE) as process:
        assert process.pid in take_snapshot().processes
        process.kill()
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process.pid not in take_snapshot().processes


@pytest.mark.parametrize("options", [soak_param(()), ("-n", "2")], ids=["one process", "two processes"])
def test_rows_are_reported_with_the_outcome_of_their_tests(options: tuple[str, ...], tmp_path: Path) -> None:
    report = tmp_path / "out" / "rows.json"
    hide_gpus = {"CUDA_VISIBLE_DEVICES": ""}
    printed = run_pytest(tmp_path, MARKS, f"--capability-report={report}", *options, environ=hide_gpus)
    assert "1 deselected" in printed or options
    assert "needs an NVIDIA GPU" in printed
    assert json.loads(report.read_text()) == {
        "Q1": [
            {"test": "test_it.py::test_good", "outcome": "passed"},
            {"test": "test_it.py::test_gpu", "outcome": "skipped"},
        ],
        "Q2": [
            {"test": "test_it.py::test_bad", "outcome": "failed"},
            {"test": "test_it.py::test_good", "outcome": "passed"},
        ],
        "Q3": [{"test": "test_it.py::test_torn", "outcome": "failed"}],
    }


def test_soak_runs_when_asked_and_a_stopped_run_says_what_did_not_run(tmp_path: Path) -> None:
    report = tmp_path / "rows.json"
    run_pytest(tmp_path, MARKS, "--soak", "-x", "-k", "not gpu", f"--capability-report={report}")
    rows = json.loads(report.read_text())
    assert rows["Q9"] == [{"test": "test_it.py::test_long", "outcome": "passed"}]
    assert rows["Q3"] == [{"test": "test_it.py::test_torn", "outcome": "not run"}]
