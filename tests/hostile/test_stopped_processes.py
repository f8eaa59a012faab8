"""Processes that are slow, stopped or frozen: the job ends at its deadlines, and the right rank is named."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from paceline.job.cluster import process_environment
from paceline.launch.fork_client import FORK_SERVER_VARIABLE, fork_server
from paceline.launch.outcome import diagnose_worker, has_stopped, summarize_failures
from paceline.launch.shutdown import SETUP_GRACE_SECONDS, ShutdownPlan, ShutdownTimeouts
from tests.hostile.jobs import end_of, prepare, start, train, until
from tests.unit.launch.test_outcome import looks
from tests.unit.launch.workers import ended

pytestmark = pytest.mark.timeout(240)


def report_of(err: str) -> str:
    """What the launcher says at the end, without what the ranks but the first have said before."""
    return "".join(line for line in err.splitlines(keepends=True) if not line.startswith("[rank "))


@pytest.mark.soak
def test_a_task_may_take_longer_to_build_than_the_deadline_of_a_wait(tmp_path: Path) -> None:
    with train(
        tmp_path, options__what="build", options__rank=1, options__seconds=7, runtime__deadline_seconds=4
    ) as process:
        end = end_of(process)
    assert end.code == 0, end.err


@pytest.mark.soak
def test_a_rank_may_take_longer_to_start_than_the_deadline_of_a_wait(tmp_path: Path) -> None:
    """Its Python does, as one that loads PyTorch from a slow disk."""
    (tmp_path / "sitecustomize.py").write_text(
        'import os, time\ntime.sleep(7 if os.environ.get("RANK") == "1" else 0)\n'
    )
    prepare(tmp_path)
    words = ("train", "recipe.toml", "-n", "2", "--set", "runtime.deadline_seconds=4")
    with start(tmp_path, *words, PYTHONPATH=str(tmp_path), **{FORK_SERVER_VARIABLE: "none"}) as process:
        end = end_of(process)
    assert end.code == 0, end.err


def test_a_task_that_is_not_built_in_time_is_named_with_its_rank(tmp_path: Path) -> None:
    with train(
        tmp_path,
        options__what="build",
        options__rank=1,
        options__seconds=60,
        runtime__setup_deadline_seconds=2,
    ) as process:
        end = end_of(process)
    assert end.code == 4, end.err
    assert "rank 0 raised DeadlineError: rank 1 has not built the task within 2 s" in end.err
    # a launcher that hears of rank 0 late gives rank 1 up by itself
    why = "(was ended because of that|did not finish in time while building the task)"
    assert re.search(rf"rank 1 {why}; it was in build \(task\.py", end.err), end.err


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_rank_that_is_stopped_in_the_set_up_is_named(rank: int, tmp_path: Path) -> None:
    with train(tmp_path, options__what="freeze", options__rank=rank, runtime__deadline_seconds=3) as process:
        end = end_of(process)
    assert end.code == 4, end.err
    notice, _, report = report_of(end.err).partition("\n")
    assert notice.startswith(f"rank {rank} is stopped by a signal"), end.err
    text = f"rank {rank} was stopped by a signal (SIGSTOP?) for more than 3 s while building the task"
    assert report.startswith(text), end.err


def test_a_rank_that_is_stopped_after_the_others_have_ended_is_named(tmp_path: Path) -> None:
    with train(
        tmp_path, options__what="freeze-at-end", options__rank=1, runtime__deadline_seconds=3
    ) as process:
        end = end_of(process)
    assert end.code == 4, end.err
    text = "rank 1 was stopped by a signal (SIGSTOP?) for more than 3 s while leaving"
    assert report_of(end.err).partition("\n")[2].startswith(text), end.err


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak)])
def test_a_request_to_stop_ends_a_set_up_although_a_rank_is_stopped(
    number: signal.Signals, tmp_path: Path
) -> None:
    with train(tmp_path, options__what="freeze", options__rank=0) as process:
        until((tmp_path / "frozen-0").exists, process)
        process.send_signal(number)
        end = end_of(process)
    assert end.code == {signal.SIGTERM: 143, signal.SIGINT: 130}[number], end.err
    assert "stopped before the first step" in end.err or "did not exit in time" in end.err


def test_before_the_first_step_a_request_to_stop_has_two_seconds_and_later_the_grace_time() -> None:
    stop = ShutdownPlan(ShutdownTimeouts(1.0, 3.0, 30.0), begun=False)
    stop.on_signal(signal.SIGTERM, 100.0)
    assert SETUP_GRACE_SECONDS < 2
    assert looks(stop, 100.0, 101.625) == {100.0: "terminate", 101.5: "kill"}
    late = ShutdownPlan(ShutdownTimeouts(1.0, 3.0, 30.0), begun=False)
    late.on_signal(signal.SIGTERM, 100.0)
    assert looks(late, 100.0, 100.5) == {100.0: "terminate"}
    late.on_begin(100.5)
    assert looks(late, 100.5, 130.625) == {130.5: "kill"}


@pytest.mark.capability("O1", "N7")
def test_a_rank_that_the_launcher_ended_in_its_set_up_has_not_left_on_request(tmp_path: Path) -> None:
    """The rank that says SetupStoppedError does so because the other one has failed."""
    stop = ShutdownPlan(ShutdownTimeouts(1.0, 3.0, 30.0))
    stop.on_failure(0.0)
    lost = ended(tmp_path, 0, 4, "CommunicationError", "rank 1 is gone", connection=True)
    told = ended(tmp_path, 1, 143, "SetupStoppedError", "stopped before the first step", told=True)
    failures = [failure for one in (lost, told) if (failure := diagnose_worker(one, stop)) is not None]
    outcome = summarize_failures(failures, stopped=any(map(has_stopped, (lost, told))))
    assert outcome.exit_code == 4
    assert outcome.report.startswith("rank 0 raised CommunicationError: rank 1 is gone")


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.soak
@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.soak), "later"])
def test_a_fork_server_that_is_stopped_costs_a_start_and_nothing_else(when: str, tmp_path: Path) -> None:
    """Stopped before, workers start anew; stopped later, their ends are seen all the same."""
    inherited = {name: value for name, value in process_environment().items() if name != FORK_SERVER_VARIABLE}
    with fork_server(environ=inherited) as variables:
        server = int((Path(variables[FORK_SERVER_VARIABLE]) / "pid").read_text())
        if when == "before":
            os.kill(server, signal.SIGSTOP)
        prepare(tmp_path)
        words = ("train", "recipe.toml", "-n", "2", "--set", "options.what=wait")
        with start(tmp_path, *words, **variables) as process:
            if when == "later":
                until((tmp_path / "stepping-1").exists, process)
                (service,) = children_of(server)
                os.kill(service, signal.SIGSTOP)
            (tmp_path / "go").touch()
            end = end_of(process)
    assert end.code == 0, end.err
    assert not [path for path in (tmp_path / "tmp").iterdir() if path.name.startswith("paceline-")]
    assert when == "before" or not Path(f"/proc/{service}").exists()
