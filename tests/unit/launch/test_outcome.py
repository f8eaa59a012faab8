"""Which rank is blamed, with which exit code, in which words; and when workers are ended."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from paceline.launch.outcome import LaunchOutcome, WorkerFailure, signal_headline, summarize_failures
from paceline.launch.shutdown import ShutdownPlan, ShutdownTimeouts
from paceline.launch.supervision import ToleratedLosses
from tests.unit.launch.workers import ended

LOST = WorkerFailure(0, "connection", 1.0, "raised CommunicationError: rank 2 is gone", 4, "lost traceback")
RAISED = WorkerFailure(2, "error", 2.0, "raised ValueError: boom", 1, "Traceback\nValueError: boom")
LATER = WorkerFailure(1, "error", 3.0, "raised KeyError: 'x'", 1, "other traceback")
KILLED = WorkerFailure(3, "signal", 9.0, "was killed by SIGKILL (out of memory?)", 137)
ENDED = WorkerFailure(1, "stopped", 4.0, "was ended because of that; it was in load (data.py:3)", 1)


@pytest.mark.capability("O1")
def test_the_cause_comes_first_in_full_and_the_others_in_one_line() -> None:
    outcome = summarize_failures([LOST, LATER, RAISED], logs="/logs")
    assert outcome.exit_code == 1
    assert outcome.report == (
        "rank 2 raised ValueError: boom\n"
        "  Traceback\n"
        "  ValueError: boom\n"
        "rank 1 raised KeyError: 'x'\n"
        "rank 0 raised CommunicationError: rank 2 is gone\n"
        "logs: /logs\n"
    )


def test_a_killed_rank_is_blamed_although_others_spoke_earlier() -> None:
    outcome = summarize_failures([LOST, RAISED, KILLED])
    assert outcome.failures[0] is KILLED
    assert outcome.exit_code == 137


def test_without_failures_there_is_nothing_to_say() -> None:
    assert summarize_failures([]) == summarize_failures([], nodes=2, logs="/logs")
    assert (summarize_failures([]).exit_code, summarize_failures([]).report) == (0, "")


def test_a_lost_connection_points_at_the_silent_rank_or_at_the_other_nodes() -> None:
    assert "look at rank 1, which did not respond" in summarize_failures([LOST, ENDED]).report
    assert "look at the other nodes" in summarize_failures([LOST], nodes=2).report
    assert "next:" not in summarize_failures([LOST]).report


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGHUP, 129)],
)
def test_told_to_stop_lost_connections_are_no_failures(number: int, code: int) -> None:
    outcome = summarize_failures([LOST], stop_signal=number)
    assert (outcome.exit_code, outcome.failures, outcome.report) == (code, (), "")


@pytest.mark.capability("N7")
def test_workers_that_were_asked_to_stop_saved_and_left() -> None:
    assert summarize_failures([], stopped=True).exit_code == 143
    assert summarize_failures([LOST], stopped=True).exit_code == 4
    left = WorkerFailure(1, "left", 0.5, "raised SetupStoppedError: stopped before the first step", 143)
    assert summarize_failures([LOST, left], stopped=True) == LaunchOutcome(143, (), "")
    assert summarize_failures([left, RAISED], stopped=True).failures == (RAISED,)


def test_told_to_stop_a_real_error_still_counts() -> None:
    outcome = summarize_failures([LOST, RAISED], stop_signal=signal.SIGTERM)
    assert (outcome.exit_code, outcome.failures) == (1, (RAISED,))


def test_told_to_stop_a_rank_that_had_to_be_killed_is_named() -> None:
    outcome = summarize_failures([ENDED], stop_signal=signal.SIGTERM)
    assert (outcome.exit_code, outcome.failures) == (143, ())
    assert outcome.report.startswith("rank 1 was ended")


def test_long_lines_are_cut() -> None:
    long = WorkerFailure(5, "connection", 5.0, "raised X: " + "a" * 500, 1)
    assert max(len(line) for line in summarize_failures([RAISED, long]).report.splitlines()) <= 160


def test_signals_have_names_and_hints() -> None:
    assert signal_headline(signal.SIGKILL) == "was killed by SIGKILL (out of memory?)"
    assert signal_headline(signal.SIGSEGV) == "was killed by SIGSEGV"
    assert signal_headline(99) == "was killed by signal 99"


def make_stop() -> ShutdownPlan:
    return ShutdownPlan(ShutdownTimeouts(1.0, 3.0, 10.0))


def looks(stop: ShutdownPlan, begin: float, end: float) -> dict[float, str]:
    """What is done when, by a launcher that looks eight times a second."""
    times = [begin + i / 8 for i in range(round((end - begin) * 8))]
    return {now: action for now in times if (action := stop.due(now)) != "wait"}


def test_after_a_failure_the_others_may_settle_then_obey_then_are_killed() -> None:
    stop = make_stop()
    stop.on_failure(100.0)
    assert looks(stop, 100.0, 104.25) == {101.0: "terminate", 104.0: "kill", 104.125: "kill"}


def test_later_failures_do_not_move_the_plan() -> None:
    stop = make_stop()
    stop.on_failure(100.0)
    assert looks(stop, 100.0, 101.0) == {}
    stop.on_failure(100.9)
    assert looks(stop, 101.0, 104.125) == {101.0: "terminate", 104.0: "kill"}


def test_a_signal_is_passed_on_at_once_and_the_second_kills() -> None:
    stop = make_stop()
    stop.on_signal(signal.SIGINT, 50.0)
    assert looks(stop, 50.0, 60.0) == {50.0: "terminate"}
    stop.on_signal(signal.SIGINT, 59.95)
    assert stop.due(60.0) == "kill"
    assert stop.signal == signal.SIGINT


def test_time_in_which_the_launcher_stood_still_is_nobodys_grace() -> None:
    """Else what all of a machine that was asleep had to do in a second would be over when it wakes up."""
    stop = make_stop()
    stop.on_failure(100.0)
    assert looks(stop, 100.0, 100.5) == {}
    assert looks(stop, 3600.0, 3604.0) == {3600.375: "terminate", 3603.375: "kill"} | {
        3603.375 + i / 8: "kill" for i in range(5)
    }
    asked = make_stop()
    asked.on_signal(signal.SIGINT, 50.0)
    assert looks(asked, 50.0, 51.0) == {50.0: "terminate"}
    asked.on_signal(signal.SIGINT, 3600.0)
    assert asked.due(3600.0) == "kill", "the second one kills at once all the same"


@pytest.mark.capability("N7")
def test_when_one_has_left_the_others_have_the_grace_time() -> None:
    stop = make_stop()
    stop.on_worker_left(100.0)
    assert looks(stop, 100.0, 105.0) == {}
    stop.on_worker_left(105.0)
    assert looks(stop, 105.0, 110.125) == {110.0: "kill"}


def test_nothing_happens_without_a_reason() -> None:
    assert make_stop().due(1e9) == "wait"


def test_the_end_of_a_server_is_no_loss_that_it_outlives(tmp_path: Path) -> None:
    """The twin is the same end of a worker while the server lives."""
    for server_is_gone in (True, False):
        said: list[str] = []
        shutdown, lost = ShutdownPlan(ShutdownTimeouts()), list[int]()
        server, worker = ended(tmp_path, 0, -9), ended(tmp_path, 1, 4, "CommunicationError", connection=True)
        losses = ToleratedLosses([server, worker], 1, said.append, lost.append)
        if server_is_gone:
            assert not losses.tolerates(server, shutdown)
            shutdown.on_failure(0.0)
        assert losses.tolerates(worker, shutdown) is not server_is_gone
        assert len(said) == len(lost) == (not server_is_gone)
    assert said[0].endswith("; if the server is alive, it continues without it\n")


def test_a_job_that_has_lost_all_its_workers_has_failed(tmp_path: Path) -> None:
    """The twin: one of them has ended well, so the others are losses that do not count."""
    for last in (4, 0):
        workers = [ended(tmp_path, 0, 4), ended(tmp_path, 1, last)]
        losses = ToleratedLosses(workers, 0, lambda text: None, lambda rank: None)
        losses._lost += workers if last else workers[:1]
        assert list(losses.judged_workers(workers)) == (workers if last else workers[1:])
