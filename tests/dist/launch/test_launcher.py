"""The launcher with real processes: what it gives them, how it ends them, what it says about it."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import CommunicationError, PacelineError
from paceline.launch import LaunchJob, launch
from tests.dist.launch.actors import ACTOR, act, alive, driving, until

pytestmark = [pytest.mark.capability("O1"), pytest.mark.timeout(240)]


def test_every_worker_gets_its_place(tmp_path: Path) -> None:
    assert act(tmp_path, "all=report", threads=2).exit_code == 0
    for rank in range(3):
        environ = json.loads((tmp_path / f"environ-{rank}").read_text())
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
        assert [environ[name] for name in names] == [str(rank), str(rank), "3", "3", "2", "2"]
        assert environ["MASTER_ADDR"] == "127.0.0.1"
        assert "PACELINE_STORE_FD" in environ and "PACELINE_LISTEN_FD" not in environ


def test_output_of_rank_0_passes_and_the_others_have_logs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs"
    act(tmp_path, "all=report", log_dir=logs)
    shown = capfd.readouterr()
    assert shown.out == "out of 0, terminal: False\n"
    assert shown.err == "err of 0\n"
    assert (logs / "rank-2.log").read_text() == "out of 2, terminal: False\nerr of 2\n"
    assert sorted(path.name for path in logs.iterdir()) == ["rank-1.log", "rank-2.log"]


def test_prefixed_output_shows_all_lines(tmp_path: Path) -> None:
    lines: list[str] = []
    job = LaunchJob((sys.executable, ACTOR, str(tmp_path), "all=report"), 2, output="prefixed")
    assert launch(job, log=lines.append).exit_code == 0
    assert lines == ["[rank 1] out of 1, terminal: False\n", "[rank 1] err of 1\n"]


def test_a_terminal_stays_a_terminal(tmp_path: Path) -> None:
    near, far = pty.openpty()
    try:
        with driving(tmp_path, "all=report", stdout=far) as launcher:
            launcher.wait()
            assert b"out of 0, terminal: True" in os.read(near, 1000)
    finally:
        os.close(near)
        os.close(far)


def test_a_worker_that_raises_is_shown_first_with_its_traceback(tmp_path: Path) -> None:
    outcome = act(tmp_path, "0=lose", "1=late_raise")
    assert outcome.exit_code == 1
    assert outcome.report.startswith("rank 1 raised ValueError: boom\n  Traceback")
    assert "in raise_value" in outcome.report
    assert "\nrank 0 raised CommunicationError: rank 1 is gone\n" in outcome.report
    assert outcome.report.splitlines()[-1] == "rank 2 was ended because of that; it was in wait (actor.py:23)"


def test_the_exit_code_is_that_of_the_error(tmp_path: Path) -> None:
    outcome = act(tmp_path, "0=raise_data")
    assert outcome.exit_code == 2
    assert "data.toml:3" in outcome.report


def test_a_worker_that_is_killed_is_blamed(tmp_path: Path) -> None:
    outcome = act(tmp_path, "0=lose", "1=late_kill")
    assert outcome.exit_code == 137
    assert outcome.report.startswith("rank 1 was killed by SIGKILL (out of memory?)\n")


def test_a_worker_that_just_leaves_shows_its_last_lines(tmp_path: Path) -> None:
    outcome = act(tmp_path, "1=bare+leave")
    assert outcome.exit_code == 7
    assert outcome.report.startswith("rank 1 ended with exit code 7\n  last words\n")


def test_nothing_is_left_after_a_failure(tmp_path: Path) -> None:
    outcome = act(tmp_path, "0=late_raise", "1=child+wait", "2=child+defy")
    assert [failure.global_rank for failure in outcome.failures] == [0, 1, 2]
    assert "rank 2 did not exit in time and was killed" in outcome.report
    for name in ("pid-1", "child-1", "pid-2", "child-2"):
        until(lambda name=name: not alive(tmp_path / name))


def test_children_of_a_worker_that_ended_well_are_not_left(tmp_path: Path) -> None:
    assert act(tmp_path, "all=child+report", num_processes=1).exit_code == 0
    until(lambda: not alive(tmp_path / "child-0"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_passed_on_and_workers_may_finish_the_step(
    tmp_path: Path, number: int, code: int
) -> None:
    with driving(tmp_path, "all=obey") as launcher:
        launcher.send_signal(number)
        launcher.wait()
    assert launcher.returncode == code
    assert (tmp_path / "report").read_text() == ""
    assert len(list(tmp_path.glob("finished-*"))) == 2


def test_the_second_signal_kills(tmp_path: Path) -> None:
    with driving(tmp_path, "0=child+defy", "1=defy", grace_seconds=1000) as launcher:
        launcher.send_signal(signal.SIGINT)
        until(lambda: len(list(tmp_path.glob("defied-*"))) == 2)
        launcher.send_signal(signal.SIGINT)
        launcher.wait()
    assert launcher.returncode == 130
    assert (tmp_path / "report").read_text().count("did not exit in time and was killed") == 2
    until(lambda: not any(alive(path) for path in tmp_path.glob("[pc]*-0")))


def test_grace_ends(tmp_path: Path) -> None:
    with driving(tmp_path, "0=obey", "1=defy", grace_seconds=4.0) as launcher:
        launcher.send_signal(signal.SIGTERM)
        launcher.wait()
    assert launcher.returncode == 143
    assert (tmp_path / "report").read_text() == "rank 1 did not exit in time and was killed\n"
    assert (tmp_path / "finished-0").exists()


def test_a_launcher_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    with driving(tmp_path, "0=child+defy", "1=child+wait") as launcher:
        numbers = [*tmp_path.glob("pid-*"), *tmp_path.glob("child-*")]
        assert len(numbers) == 4
        assert all(alive(path) for path in numbers)
        launcher.kill()
        launcher.wait()
        until(lambda: not any(alive(path) for path in numbers))


@pytest.mark.capability("N5", clause="a server and its launcher outlive workers")
def test_a_worker_that_dies_in_its_first_step_is_borne(tmp_path: Path) -> None:
    """The launcher may not have looked since; it said that a server trains it, and the server goes on."""
    outcome = act(tmp_path, "0=end_well", "1=kill_served", num_processes=2, servers=1, announces=True)
    assert outcome.exit_code == 0, outcome.report


def test_a_command_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(PacelineError, match="cannot start '/no/such/program'"):
        launch(LaunchJob(("/no/such/program",), 2))


def test_a_rendezvous_port_in_use_is_an_error_with_a_next_step() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        rendezvous = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(CommunicationError, match=r"(?s)in use.*choose another port"):
            launch(LaunchJob(("true",), 1, nodes=2, rendezvous=rendezvous))


def test_a_rendezvous_of_another_machine_is_an_error_with_a_next_step() -> None:
    with pytest.raises(CommunicationError, match="must run on the machine that has this address"):
        launch(LaunchJob(("true",), 1, nodes=2, rendezvous="192.0.2.77:29500"))


def test_the_launcher_does_not_load_torch() -> None:
    code = "import sys, paceline.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
