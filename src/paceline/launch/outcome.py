"""How a job ended on this node, and what to tell the user: the rank that failed first, first. Pure.

Invariant: a failure that another one caused (a lost connection, an end by the launcher) is never named
as the cause while a better one is known.

What became of one worker, from its exit code, its own report, its log and where it was last seen.

Invariant: a worker that ended well, or that obeyed a signal that the user sent, is no failure.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.errors import DeadlineError
from paceline.launch.process_inspection import read_position
from paceline.launch.shutdown import ShutdownPlan
from paceline.launch.worker_guard import ErrorReport, advise_after_signal
from paceline.launch.worker_process import WorkerProcess

STOPPED_EXIT_CODE = 143
"""Of a worker that was asked to stop, has saved and left: no failure. 128 + SIGTERM, as shells say it."""

_LINE_LENGTH = 160

_EXIT_CODES: dict[int, int] = {signal.SIGINT: 128 + signal.SIGINT, signal.SIGHUP: 128 + signal.SIGHUP}

FailureKind = Literal["signal", "error", "connection", "stopped", "left"]


@dataclass(frozen=True)
class WorkerFailure:
    """One worker that did not end well.

    Args:
        global_rank: whose.
        kind: "signal": killed, not by the launcher; "error": raised, aborted or exited with a code that
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
        exit_code: 0, the cause's, 128 + signal for a worker that a signal killed; 143 if the workers were
            asked to stop, saved and left; or, when the launcher itself was told to stop, 130 (Ctrl-C),
            143 (SIGTERM, SIGUSR1) or 129 (SIGHUP).
        failures: the cause first; empty if all went well or stopped as they were told.
        report: for the user; empty if there is nothing to report.
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
        stop_signal: the signal that the launcher got and passed on, if it did.
        stopped: workers were asked to stop by someone else, and obeyed.
        nodes: of the job; with more than one, the cause may be elsewhere.
        logs: the folder with the output of the workers, if it is kept.
        lost: a line for each other node that could not be reached when the first worker failed.
    """
    ordered = tuple(sorted(failures, key=_cause_order))
    if stop_signal is not None:
        # Told to stop, workers may lose each other; only what is wrong in itself is worth a report.
        own = tuple(failure for failure in ordered if failure.kind in ("signal", "error"))
        shown = own + tuple(failure for failure in ordered if failure.kind == "stopped")
        report = render_report(shown, nodes, logs, lost)
        obeyed = _EXIT_CODES.get(stop_signal, STOPPED_EXIT_CODE)
        return LaunchOutcome(own[0].exit_code if own else obeyed, own, report)
    if any(failure.kind == "left" for failure in ordered):  # the others missed it
        ordered = tuple(failure for failure in ordered if failure.kind in ("signal", "error"))
    code = ordered[0].exit_code if ordered else STOPPED_EXIT_CODE * stopped
    return LaunchOutcome(code, ordered, render_report(ordered, nodes, logs, lost))


def _cause_order(failure: WorkerFailure) -> tuple[int, float, int]:
    weight = {"signal": 0, "error": 1, "connection": 2, "stopped": 3, "left": 4}[failure.kind]
    return weight, failure.when, failure.global_rank


def render_report(
    failures: Sequence[WorkerFailure], nodes: int = 1, logs: str = "", lost: Sequence[str] = ()
) -> str:
    """The text for the user: the first failure in full, one line for each other one."""
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
    """A lost connection has its cause elsewhere: in a rank that did not answer, or on another node."""
    if first.kind != "connection":
        return []
    if lost:
        return [f"  cause: {line}" for line in lost]
    silent = [str(other.global_rank) for other in others if other.kind == "stopped"]
    if silent:
        return [f"  next:  look at rank {', '.join(silent)}, which did not answer"]
    return ["  next:  look at the other nodes, no rank of this one failed before"] if nodes > 1 else []


def shorten_line(line: str) -> str:
    """Cut a line that is too long for a report."""
    return line if len(line) <= _LINE_LENGTH else line[: _LINE_LENGTH - 3] + "..."


def signal_headline(number: int) -> str:
    """Says which signal ended a worker, and the likely reason if there is one."""
    hints: dict[int, str] = {signal.SIGKILL: " (out of memory?)", signal.SIGBUS: " (no space in /dev/shm?)"}
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"was killed by {name}{hints.get(number, '')}"


_LOG_LINES = 30
_STUCK_ADVICE = "next:  look at what that process waits for; --resume RUN goes on from the last checkpoint"
_LOST_SERVER_ADVICE = (
    "next:  look at who ended that process; --resume RUN goes on, PACELINE_FORK_SERVER=none does without"
)
_STOPPED_CODES = (-signal.SIGTERM, 128 + signal.SIGTERM, 128 + signal.SIGINT)


def has_failed(one: WorkerProcess, stop: ShutdownPlan) -> bool:
    """Must the other workers end because of this one? Not if all were told to end anyway."""
    return one.process.returncode not in (0, STOPPED_EXIT_CODE) and stop.signal is None


def has_stopped(one: WorkerProcess) -> bool:
    """Was it asked to stop, and did it save and leave?"""
    return one.process.returncode == STOPPED_EXIT_CODE and not one.killed and not one.told


def diagnose_worker(one: WorkerProcess, stop: ShutdownPlan) -> WorkerFailure | None:
    """Describe how a worker failed; None if it did not."""
    code = one.process.returncode
    report = ErrorReport.load(one.worker.error_file)
    if one.overdue:
        return _make_failure(
            one, "error", f"{one.overdue}, and was killed", DeadlineError.exit_code, _STUCK_ADVICE
        )
    if report is not None and not _left_after_failure(one, report, stop):
        return failure_from_report(one.worker.global_rank, report)
    if code is None or one.killed or (one.told and code in _STOPPED_CODES):
        return _stopped_failure(one, stop)
    return None if code == 0 or has_stopped(one) else _exit_failure(one, code)


def _left_after_failure(one: WorkerProcess, report: ErrorReport, stop: ShutdownPlan) -> bool:
    """Did it leave because this launcher told it to after a failure? Then nobody asked for a stop."""
    return report.exit_code == STOPPED_EXIT_CODE and one.told and stop.signal is None


def failure_from_report(global_rank: int, report: ErrorReport) -> WorkerFailure:
    """The failure of a worker that reported its own exception."""
    summary = report.message.partition("\n")[0]
    return WorkerFailure(
        global_rank,
        _failure_kind(report),
        report.when,
        f"raised {report.type}: {summary}" if summary else f"raised {report.type}",
        report.exit_code,
        report.details,
    )


def _failure_kind(report: ErrorReport) -> FailureKind:
    if report.exit_code == STOPPED_EXIT_CODE:
        return "left"
    return "connection" if report.connection else "error"


def _stopped_failure(one: WorkerProcess, stop: ShutdownPlan) -> WorkerFailure | None:
    if stop.signal is not None and not one.killed and one.process.returncode is not None:
        return None
    where = read_position(one.worker.stack_file)
    headline = "did not end in time and was killed" if one.killed else "was ended because of that"
    if one.process.returncode is None:
        headline = f"cannot be killed (process {one.pid})"
    return _make_failure(one, "stopped", headline + (f"; it was in {where}" if where else ""), 1)


def _exit_failure(one: WorkerProcess, code: int) -> WorkerFailure:
    details = _last_lines(one.worker.log_file)
    if code > 0:
        return _make_failure(one, "error", f"ended with exit code {code}", code, details)
    if one.fork_server_died:
        return _make_failure(
            one, "signal", "was ended: its fork server is gone", 128 - code, _LOST_SERVER_ADVICE
        )
    # An abort is raised by the process itself, often because another rank is gone: its time decides.
    kind: FailureKind = "error" if code == -signal.SIGABRT else "signal"
    advice = advise_after_signal(-code)
    return _make_failure(one, kind, signal_headline(-code), 128 - code, f"{details}\n{advice}".strip("\n"))


def _make_failure(
    one: WorkerProcess, kind: FailureKind, headline: str, exit_code: int, details: str = ""
) -> WorkerFailure:
    when = one.ended_at or time.time()
    return WorkerFailure(one.worker.global_rank, kind, when, headline, exit_code, details)


def _last_lines(path: Path | None) -> str:
    if path is None or not path.exists():
        return ""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:])
