"""How a job ended on this node, and what to tell the user: the rank that failed first, first. Pure.

Invariant: a failure that another one caused (a lost connection, an end by the launcher) is never named
as the cause while a better one is known.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

STOPPED_EXIT_CODE = 143
"""Of a worker that was asked to stop, has saved and left: no failure. 128 + SIGTERM, as shells say it."""

_LINE_LENGTH = 160

_EXIT_CODES: dict[int, int] = {signal.SIGINT: 128 + signal.SIGINT, signal.SIGHUP: 128 + signal.SIGHUP}

Kind = Literal["signal", "error", "connection", "stopped", "left"]


@dataclass(frozen=True)
class Failure:
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
    kind: Kind
    when: float
    headline: str
    exit_code: int
    details: str = ""


@dataclass(frozen=True)
class Outcome:
    """How the job ended on this node.

    Args:
        exit_code: 0, the cause's, 128 + signal for a worker that a signal killed; 143 if the workers were
            asked to stop, saved and left; or, when the launcher itself was told to stop, 130 (Ctrl-C),
            143 (SIGTERM, SIGUSR1) or 129 (SIGHUP).
        failures: the cause first; empty if all went well or stopped as they were told.
        report: for the user; empty if there is nothing to report.
    """

    exit_code: int
    failures: tuple[Failure, ...]
    report: str


def conclude(
    failures: Sequence[Failure],
    *,
    stop_signal: int | None = None,
    stopped: bool = False,
    nodes: int = 1,
    logs: str = "",
    lost: Sequence[str] = (),
) -> Outcome:
    """Order the failures, choose the exit code, write the report.

    Args:
        stop_signal: the signal that the launcher got and passed on, if it did.
        stopped: workers were asked to stop by someone else, and obeyed.
        nodes: of the job; with more than one, the cause may be elsewhere.
        logs: the folder with the output of the workers, if it is kept.
        lost: a line for each other node that could not be reached when the first worker failed.
    """
    ordered = tuple(sorted(failures, key=_rank_of_cause))
    if stop_signal is not None:
        # Told to stop, workers may lose each other; only what is wrong in itself is worth a report.
        own = tuple(failure for failure in ordered if failure.kind in ("signal", "error"))
        shown = own + tuple(failure for failure in ordered if failure.kind == "stopped")
        report = render_report(shown, nodes, logs, lost)
        obeyed = _EXIT_CODES.get(stop_signal, STOPPED_EXIT_CODE)
        return Outcome(own[0].exit_code if own else obeyed, own, report)
    if any(failure.kind == "left" for failure in ordered):  # the others missed it
        ordered = tuple(failure for failure in ordered if failure.kind in ("signal", "error"))
    code = ordered[0].exit_code if ordered else STOPPED_EXIT_CODE * stopped
    return Outcome(code, ordered, render_report(ordered, nodes, logs, lost))


def _rank_of_cause(failure: Failure) -> tuple[int, float, int]:
    weight = {"signal": 0, "error": 1, "connection": 2, "stopped": 3, "left": 4}[failure.kind]
    return weight, failure.when, failure.global_rank


def render_report(
    failures: Sequence[Failure], nodes: int = 1, logs: str = "", lost: Sequence[str] = ()
) -> str:
    """The text for the user: the first failure in full, one line for each other one."""
    if not failures:
        return ""
    first, *others = failures
    lines = [f"rank {first.global_rank} {first.headline}"]
    lines += [f"  {line}".rstrip() for line in first.details.splitlines()]
    lines += _where_to_look(first, others, nodes, lost)
    lines += [shorten(f"rank {other.global_rank} {other.headline}") for other in others]
    if logs:
        lines.append(f"logs: {logs}")
    return "\n".join(lines) + "\n"


def _where_to_look(first: Failure, others: Sequence[Failure], nodes: int, lost: Sequence[str]) -> list[str]:
    """A lost connection has its cause elsewhere: in a rank that did not answer, or on another node."""
    if first.kind != "connection":
        return []
    if lost:
        return [f"  cause: {line}" for line in lost]
    silent = [str(other.global_rank) for other in others if other.kind == "stopped"]
    if silent:
        return [f"  next:  look at rank {', '.join(silent)}, which did not answer"]
    return ["  next:  look at the other nodes, no rank of this one failed before"] if nodes > 1 else []


def shorten(line: str) -> str:
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
