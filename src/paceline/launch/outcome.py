"""How a job ended on this node: the failure of each worker, the cause, and the report for the user.

A worker is diagnosed from its exit code, its own error report, its log and its last known position.
Invariants: a failure that is a consequence (a lost connection, an end by the launcher) is never named as the
cause while a better one is known. A worker that ended well, or that obeyed a signal from the user, has not
failed.
"""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.errors import DeadlineError
from paceline.launch.process_inspection import read_position
from paceline.launch.shutdown import ShutdownPlan
from paceline.launch.worker_guard import ErrorReport, advise_after_signal, explain_address_space
from paceline.launch.worker_process import WorkerProcess

STOPPED_EXIT_CODE = 143
"""Exit code of a worker that saved and stopped on request, which is no failure: 128 + SIGTERM."""

_LINE_LENGTH = 160

_EXIT_CODES: dict[int, int] = {signal.SIGINT: 128 + signal.SIGINT, signal.SIGHUP: 128 + signal.SIGHUP}

FailureKind = Literal["signal", "error", "connection", "stopped", "left"]


@dataclass(frozen=True)
class WorkerFailure:
    """One worker that did not end well.

    Args:
        global_rank: its rank.
        kind: "signal": killed, but not by the launcher; "error": raised, aborted or exited with a code that
            is not 0; "connection": an error that says that another rank is gone; "stopped": ended by the
            launcher; "left": it was asked to stop before the first step, and did.
        when: seconds since the epoch.
        headline: one line that says what happened.
        exit_code: what the launcher returns if this is the cause.
        details: a traceback, or the last lines of its log; may be empty.
    """

    global_rank: int
    kind: FailureKind
    when: float
    headline: str
    exit_code: int
    details: str = ""


@dataclass(frozen=True)
class LaunchOutcome:
    """How the job ended on this node.

    Args:
        exit_code: 0, that of the cause, or 128 + signal for a worker that a signal killed; 143 if the workers
            were asked to stop, saved and exited; or, if the launcher itself received a signal, 130 (Ctrl-C),
            143 (SIGTERM, SIGUSR1) or 129 (SIGHUP).
        failures: the cause first; empty if all workers ended well or stopped on request.
        report: the text for the user; empty if there is nothing to report.
    """

    exit_code: int
    failures: tuple[WorkerFailure, ...]
    report: str


def summarize_failures(
    failures: Sequence[WorkerFailure],
    *,
    stop_signal: int | None = None,
    stopped: bool = False,
    nodes: int = 1,
    logs: str = "",
    lost: Sequence[str] = (),
) -> LaunchOutcome:
    """Order the failures, choose the exit code, write the report.

    Args:
        stop_signal: the signal that the launcher received and passed on; None: none.
        stopped: workers were asked to stop by something other than this launcher, and did.
        nodes: number of nodes of the job; with more than one, the cause can be elsewhere.
        logs: the folder with the output of the workers, if it is kept.
        lost: a line for each other node that could not be reached when the first worker failed.
    """
    ordered = tuple(sorted(failures, key=_cause_order))
    if stop_signal is not None:
        # workers that stop can lose each other; only failures that are no consequence are worth a report
        causes = tuple(failure for failure in ordered if failure.kind in ("signal", "error"))
        shown = causes + tuple(failure for failure in ordered if failure.kind == "stopped")
        report = render_report(shown, nodes, logs, lost)
        obeyed = _EXIT_CODES.get(stop_signal, STOPPED_EXIT_CODE)
        return LaunchOutcome(causes[0].exit_code if causes else obeyed, causes, report)
    if any(failure.kind == "left" for failure in ordered):  # the other workers only missed it
        ordered = tuple(failure for failure in ordered if failure.kind in ("signal", "error"))
    code = ordered[0].exit_code if ordered else STOPPED_EXIT_CODE * stopped
    return LaunchOutcome(code, ordered, render_report(ordered, nodes, logs, lost))


def _cause_order(failure: WorkerFailure) -> tuple[int, float, int]:
    weight = {"signal": 0, "error": 1, "connection": 2, "stopped": 3, "left": 4}[failure.kind]
    return weight, failure.when, failure.global_rank


def render_report(
    failures: Sequence[WorkerFailure], nodes: int = 1, logs: str = "", lost: Sequence[str] = ()
) -> str:
    """Return the text for the user: the first failure in full, and one line for each other worker."""
    if not failures:
        return ""
    first, *others = failures
    lines = [f"rank {first.global_rank} {first.headline}"]
    lines += [f"  {line}".rstrip() for line in first.details.splitlines()]
    lines += _next_steps(first, others, nodes, lost)
    lines += [shorten_line(f"rank {other.global_rank} {other.headline}") for other in others]
    if logs:
        lines.append(f"logs: {logs}")
    return "\n".join(lines) + "\n"


def _next_steps(
    first: WorkerFailure, others: Sequence[WorkerFailure], nodes: int, lost: Sequence[str]
) -> list[str]:
    """Return where to look, if the first failure is a lost connection and thus only a consequence."""
    if first.kind != "connection":
        return []
    if lost:
        return [f"  cause: {line}" for line in lost]
    unresponsive = [str(other.global_rank) for other in others if other.kind == "stopped"]
    if unresponsive:
        return [f"  next:  look at rank {', '.join(unresponsive)}, which did not respond"]
    return ["  next:  look at the other nodes: no rank of this node failed earlier"] if nodes > 1 else []


def shorten_line(line: str) -> str:
    """Truncate a line that is too long for a report."""
    return line if len(line) <= _LINE_LENGTH else line[: _LINE_LENGTH - 3] + "..."


def signal_headline(number: int) -> str:
    """Return a headline for a worker that a signal ended, and the likely reason if one is known."""
    hints: dict[int, str] = {signal.SIGKILL: " (out of memory?)", signal.SIGBUS: " (no space in /dev/shm?)"}
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"was killed by {name}{hints.get(number, '')}"


STOPPED_HEADLINE = "was stopped by a signal (SIGSTOP?)"
"""The headline of a worker that was killed because a signal had stopped it for too long."""
_LOG_LINES = 30
_STUCK_ADVICE = "next:  find out what that process waits for; --resume RUN continues from the last checkpoint"
_LOST_SERVER_ADVICE = (
    "next:  find out what ended it; --resume RUN continues, and PACELINE_FORK_SERVER=none avoids fork servers"
)
_STOPPED_CODES = (-signal.SIGTERM, 128 + signal.SIGTERM, 128 + signal.SIGINT)


def has_failed(worker: WorkerProcess, shutdown: ShutdownPlan) -> bool:
    """Return whether the other workers must end because of this one; not if all are ending anyway."""
    return worker.process.returncode not in (0, STOPPED_EXIT_CODE) and shutdown.signal is None


def has_stopped(worker: WorkerProcess) -> bool:
    """Return whether a worker was asked to stop by something other than the launcher, saved and exited."""
    return worker.process.returncode == STOPPED_EXIT_CODE and not worker.killed and not worker.was_signalled


def diagnose_worker(worker: WorkerProcess, shutdown: ShutdownPlan) -> WorkerFailure | None:
    """Return how a worker failed; None if it did not."""
    code = worker.process.returncode
    report = ErrorReport.load(worker.spec.error_file)
    if worker.overdue:
        # A stop is no mistake of the program: another process in its place would not be stopped.
        kind: FailureKind = "signal" if worker.overdue.startswith(STOPPED_HEADLINE) else "error"
        headline = f"{worker.overdue}, and was killed"
        return _make_failure(worker, kind, headline, DeadlineError.exit_code, _STUCK_ADVICE)
    # a worker that exits because the launcher ended the job after a failure was not asked to stop by a user
    left_after_failure = (
        report is not None
        and report.exit_code == STOPPED_EXIT_CODE
        and worker.was_signalled
        and shutdown.signal is None
    )
    if report is not None and not left_after_failure:
        return failure_from_report(worker.spec.global_rank, report)
    if code is None or worker.killed or (worker.was_signalled and code in _STOPPED_CODES):
        return _stopped_failure(worker, shutdown)
    return None if code == 0 or has_stopped(worker) else _exit_failure(worker, code)


def failure_from_report(global_rank: int, report: ErrorReport) -> WorkerFailure:
    """Return the failure of a worker that reported its own exception."""
    kind: FailureKind = "connection" if report.connection else "error"
    return WorkerFailure(
        global_rank,
        "left" if report.exit_code == STOPPED_EXIT_CODE else kind,
        report.when,
        report.headline,
        report.exit_code,
        report.details,
    )


def _stopped_failure(worker: WorkerProcess, shutdown: ShutdownPlan) -> WorkerFailure | None:
    if shutdown.signal is not None and not worker.killed and worker.process.returncode is not None:
        return None
    position = read_position(worker.spec.stack_file)
    headline = "did not exit in time and was killed" if worker.killed else "was ended because of that"
    if worker.process.returncode is None:
        headline = f"cannot be killed (process {worker.pid})"
    return _make_failure(worker, "stopped", headline + (f"; it was in {position}" if position else ""), 1)


def _exit_failure(worker: WorkerProcess, code: int) -> WorkerFailure:
    details = _last_lines(worker.spec.log_file)
    limit = explain_address_space(code, resource.getrlimit(resource.RLIMIT_AS)[0])
    if limit is not None:
        headline = f"{signal_headline(-code) if code < 0 else f'ended with exit code {code}'}: {limit.what}"
        return _make_failure(worker, "error", headline, limit.exit_code, f"next:  {limit.next_step}")
    if code > 0:
        return _make_failure(worker, "error", f"ended with exit code {code}", code, details)
    if worker.fork_server_died:
        return _make_failure(
            worker, "signal", "was ended, because its fork server is gone", 128 - code, _LOST_SERVER_ADVICE
        )
    # a process aborts itself, often because another rank is gone, so the time decides which one is the cause
    kind: FailureKind = "error" if code == -signal.SIGABRT else "signal"
    advice = advise_after_signal(-code)
    return _make_failure(worker, kind, signal_headline(-code), 128 - code, f"{details}\n{advice}".strip("\n"))


def _make_failure(
    worker: WorkerProcess, kind: FailureKind, headline: str, exit_code: int, details: str = ""
) -> WorkerFailure:
    when = worker.ended_at or time.time()
    return WorkerFailure(worker.spec.global_rank, kind, when, headline, exit_code, details)


def _last_lines(path: Path | None) -> str:
    if path is None or not path.exists():
        return ""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:])
