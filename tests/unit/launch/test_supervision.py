"""The launcher looks at its workers every quarter of a second: who is stopped is named within three looks."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.job.launcher_reports import TRAINING, TRAINING_FOR_SERVER, enter_phase
from paceline.launch import supervision
from paceline.launch.job_spec import WorkerSpec
from paceline.launch.supervision import StuckWorkerMonitor
from paceline.launch.worker_process import SessionReaper, WorkerProcess, wait_for_end
from paceline.observe.process_info import is_stopped

pytestmark = pytest.mark.capability("N5", clause="a killed or stopped worker is seen in three intervals")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[list[WorkerProcess]]:
    """Three processes that sleep."""
    found = []
    with SessionReaper() as reaper:
        for rank in range(3):
            files = None, tmp_path / f"rank-{rank}.json", tmp_path / f"rank-{rank}.stack"
            process = subprocess.Popen(["sleep", "600"], start_new_session=True)
            found.append(WorkerProcess(WorkerSpec(rank, rank, ("sleep",), {}, {}, *files), process, reaper))
        yield found
        for one in found:
            one.process.kill()
            one.process.wait()


def send(one: WorkerProcess, number: signal.Signals) -> None:
    os.kill(one.pid, number)
    expires = time.monotonic() + 100
    while is_stopped(one.pid) != (number == signal.SIGSTOP):
        assert time.monotonic() < expires
        time.sleep(0.001)


def look(at: StuckWorkerMonitor, times: int, begin: int = 1) -> list[WorkerProcess]:
    """So many looks, an interval apart; those that must be ended at the last one."""
    return [at.late(i * supervision._CHECK_SECONDS) for i in range(begin, begin + times)][-1]


def test_a_stopped_worker_is_named_in_three_intervals_and_may_go_on(running: list[WorkerProcess]) -> None:
    told: list[str] = []
    at = StuckWorkerMonitor(running, 60.0, 0.0, told.append)
    assert look(at, 4) == [] and told == []
    send(running[1], signal.SIGSTOP)
    assert look(at, 3, 5) == []
    assert told == ["rank 1 is stopped by a signal (SIGSTOP?): it must continue within 60 s\n"]
    send(running[1], signal.SIGCONT)
    assert look(at, 3, 8) == []
    assert len(told) == 2 and told[1].startswith("rank 1 continues after 0.")
    send(running[1], signal.SIGSTOP)
    assert look(at, 3, 11) == [] and len(told) == 3, "it is told again"


def test_a_killed_worker_is_seen_without_a_look(running: list[WorkerProcess]) -> None:
    """Its end wakes the launcher, which would else sleep for long."""
    assert not any(one.poll() for one in running)
    running[1].process.kill()
    wait_for_end(running, 60.0)
    assert [one.poll() for one in running] == [False, True, False]


def test_who_stays_stopped_is_given_up_and_who_may_wait_is_waited_for(running: list[WorkerProcess]) -> None:
    told: list[str] = []
    send(running[0], signal.SIGSTOP)
    assert look(StuckWorkerMonitor(running, 1.0, 0.0, told.append), 5) == [running[0]]
    assert running[0].overdue == "was stopped by a signal (SIGSTOP?) for more than 1 s"
    assert look(StuckWorkerMonitor(running, math.inf, 0.0, told.append), 50) == []
    assert len(told) == 2 and told[1].endswith("the job waits for it\n")


def test_at_one_look_a_whole_job_may_be_going_on_again(running: list[WorkerProcess]) -> None:
    told: list[str] = []
    at = StuckWorkerMonitor(running, 60.0, 0.0, told.append)
    for one in running:
        send(one, signal.SIGSTOP)
    look(at, 1)
    for one in running:
        send(one, signal.SIGCONT)
    look(at, 3, 2)
    assert told == []


def test_time_in_which_the_launcher_was_stopped_does_not_count(running: list[WorkerProcess]) -> None:
    told: list[str] = []
    at = StuckWorkerMonitor(running, 60.0, 0.0, told.append)
    send(running[0], signal.SIGSTOP)
    look(at, 2)
    assert at.late(3600.0) == [] and len(told) == 1


def test_a_server_waits_a_short_time_for_one_stopped_worker_and_for_a_second_one_as_ever(
    running: list[WorkerProcess], tmp_path: Path
) -> None:
    """Rank 0 is the server, and one that is stopped has the time of any rank."""
    for rank in range(3):
        enter_phase(tmp_path, rank, TRAINING_FOR_SERVER)
    for stopped, seconds in (([1], 10), ([0], 60), ([1, 2], 60)):
        told: list[str] = []
        at = StuckWorkerMonitor(running, 60.0, 0.0, told.append, servers=1)
        for rank in stopped:
            send(running[rank], signal.SIGSTOP)
        looks = [look(at, 1, i) for i in range(1, 46)]
        assert looks[-1] == ([running[1]] if seconds == 10 else []) and looks[30] == []
        assert told[0].endswith(f"it must continue within {seconds} s\n")
        for rank in stopped:
            send(running[rank], signal.SIGCONT)
            running[rank].overdue = ""


@pytest.mark.capability("N5", clause="a rank that is stopped while others wait")
def test_a_stopped_rank_has_ten_seconds_while_another_one_trains_and_a_stopped_job_any_time(
    running: list[WorkerProcess], tmp_path: Path
) -> None:
    """A job that is stopped as a whole, and a rank whose phase is not known, are waited for as ever."""
    for rank in range(3):
        enter_phase(tmp_path, rank, TRAINING)
    for stopped, seconds, nodes in (([1], 10, 1), ([0, 2], 10, 1), ([0, 1, 2], 60, 1), ([0, 1, 2], 10, 2)):
        told: list[str] = []
        at = StuckWorkerMonitor(running, 60.0, 0.0, told.append, nodes=nodes)
        for rank in stopped:
            send(running[rank], signal.SIGSTOP)
        looks = [look(at, 1, i) for i in range(1, 46)]
        assert looks[-1] == ([running[rank] for rank in stopped] if seconds == 10 else []), (stopped, nodes)
        assert looks[30] == [] and told[0].endswith(f"it must continue within {seconds} s\n")
        for rank in stopped:
            send(running[rank], signal.SIGCONT)
            running[rank].overdue = ""
