"""What became of one worker, from its exit code, its own report, its log and where it was last seen.

Invariant: a worker that ended well, or that obeyed a signal that the user sent, is no failure.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

from paceline.errors import DeadlineError
from paceline.launch.advice import advise_after_signal
from paceline.launch.outcome import STOPPED_EXIT_CODE, Failure, Kind, signal_headline
from paceline.launch.process import Running
from paceline.launch.stacks import read_position
from paceline.launch.stop import Stop
from paceline.launch.worker import ErrorReport

_LOG_LINES = 30
_GO_ON = "next:  look at what that process waits for; --resume RUN goes on from the last checkpoint"
_START_ANEW = (
    "next:  look at who ended that process; --resume RUN goes on, PACELINE_FORK_SERVER=none does without"
)
_OBEYED = (-signal.SIGTERM, 128 + signal.SIGTERM, 128 + signal.SIGINT)


def failed(one: Running, stop: Stop) -> bool:
    """Must the other workers end because of this one? Not if all were told to end anyway."""
    return one.process.returncode not in (0, STOPPED_EXIT_CODE) and stop.signal is None


def has_stopped(one: Running) -> bool:
    """Was it asked to stop, and did it save and leave?"""
    return one.process.returncode == STOPPED_EXIT_CODE and not one.killed and not one.told


def judge(one: Running, stop: Stop) -> Failure | None:
    """Describe how a worker failed; None if it did not."""
    code = one.process.returncode
    report = ErrorReport.load(one.worker.error_file)
    if one.overdue:
        return _failure(one, "error", f"{one.overdue}, and was killed", DeadlineError.exit_code, _GO_ON)
    if report is not None and not _obeyed(one, report, stop):
        return raised(one.worker.global_rank, report)
    if code is None or one.killed or (one.told and code in _OBEYED):
        return _stopped(one, stop)
    return None if code == 0 or has_stopped(one) else _died(one, code)


def _obeyed(one: Running, report: ErrorReport, stop: Stop) -> bool:
    """Did it leave because this launcher told it to after a failure? Then nobody asked for a stop."""
    return report.exit_code == STOPPED_EXIT_CODE and one.told and stop.signal is None


def raised(global_rank: int, report: ErrorReport) -> Failure:
    """The failure of a worker that reported its own exception."""
    summary = report.message.partition("\n")[0]
    return Failure(
        global_rank,
        _kind(report),
        report.when,
        f"raised {report.type}: {summary}" if summary else f"raised {report.type}",
        report.exit_code,
        report.details,
    )


def _kind(report: ErrorReport) -> Kind:
    if report.exit_code == STOPPED_EXIT_CODE:
        return "left"
    return "connection" if report.connection else "error"


def _stopped(one: Running, stop: Stop) -> Failure | None:
    if stop.signal is not None and not one.killed and one.process.returncode is not None:
        return None
    where = read_position(one.worker.stack_file)
    headline = "did not end in time and was killed" if one.killed else "was ended because of that"
    if one.process.returncode is None:
        headline = f"cannot be killed (process {one.pid})"
    return _failure(one, "stopped", headline + (f"; it was in {where}" if where else ""), 1)


def _died(one: Running, code: int) -> Failure:
    details = _last_lines(one.worker.log_file)
    if code > 0:
        return _failure(one, "error", f"ended with exit code {code}", code, details)
    if one.lost_server:
        return _failure(one, "signal", "was ended: its fork server is gone", 128 - code, _START_ANEW)
    # An abort is raised by the process itself, often because another rank is gone: its time decides.
    kind: Kind = "error" if code == -signal.SIGABRT else "signal"
    advice = advise_after_signal(-code)
    return _failure(one, kind, signal_headline(-code), 128 - code, f"{details}\n{advice}".strip("\n"))


def _failure(one: Running, kind: Kind, headline: str, exit_code: int, details: str = "") -> Failure:
    when = one.ended_at or time.time()
    return Failure(one.worker.global_rank, kind, when, headline, exit_code, details)


def _last_lines(path: Path | None) -> str:
    if path is None or not path.exists():
        return ""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:])
