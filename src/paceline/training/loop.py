"""The fit loop: step, observe, and at quiescent points evaluate and save."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline import checkpoint
from paceline.observe import Sink, Stats
from paceline.training.evaluation import Evaluation, evaluate
from paceline.training.records import RankRecords, run_record
from paceline.training.session import Session


@dataclass(frozen=True)
class Result:
    """How a run ended, equal on every rank.

    Args:
        steps: steps taken since the beginning of the run, also before a resume.
        last: the last step of this fit; None if there was none to take.
        evaluation: on the held-out data after the last step; None without such data.
        checkpoint: the last one written.
        stopped: whether a signal ended the run before its last step.
    """

    steps: int
    last: Stats | None
    evaluation: Evaluation | None
    checkpoint: Path | None
    stopped: bool


def fit(session: Session, run_dir: Path | None = None, sinks: Sequence[Sink] = ()) -> Result:
    """Train to the end of the run.

    Args:
        session: from its state's step on; a resumed state continues.
        run_dir: where checkpoints go; None: nothing is saved.
        sinks: receive every step and event; only rank 0 has any.
    Returns:
        The result; a stop signal on any rank ends all ranks after the same step, which is saved.
    """
    last: Stats | None = None
    stopped = False
    with ExitStack() as stack:
        for sink in sinks:
            stack.callback(sink.close)
            sink.event("run", run_record(session))
        ranks = RankRecords(session, sinks, written=run_dir is not None)
        before = session.state.step
        for last in session.rounds():
            for sink in sinks:
                sink.step(last)
            ranks.step(last)
            stopped = last.stops > 0 and not _done(session)
            if not _done(session) and not stopped:
                _at_intervals(session, before, run_dir, sinks)
            before = session.state.step
            ranks.begin()
        ranks.flush()
        saved = _save(session, run_dir, sinks)
        _account(session, sinks)
        evaluation = None if stopped else _evaluate(session, sinks)
        for sink in sinks:
            sink.event("end", {"step": session.state.step, "stopped": stopped})
    return Result(session.state.step, last, evaluation, saved, stopped)


def _account(session: Session, sinks: Sequence[Sink]) -> None:
    """What went over the wires, how much of its time was hidden, and what the sample cache saved."""
    rows = {
        f"{op} {group}": {**asdict(entry), "hidden_fraction": entry.hidden_fraction}
        for (op, group), entry in session.net.ledger.rows.items()
    }
    loader = session.loader
    for sink in sinks:
        sink.event("communication", {"rows": rows})
        sink.event("cache", {"hits": loader.cache_hits, "lookups": loader.cache_lookups})


def _at_intervals(session: Session, before: int, run_dir: Path | None, sinks: Sequence[Sink]) -> None:
    if _due(session, before, session.recipe.evaluate.every_steps):
        _evaluate(session, sinks)
    if _due(session, before, session.recipe.checkpoint.every_steps):
        _save(session, run_dir, sinks)


def _due(session: Session, before: int, every_steps: int) -> bool:
    """Whether the last round, begun at step `before`, reached or passed a multiple of the interval."""
    return every_steps > 0 and session.state.step // every_steps > before // every_steps


def _done(session: Session) -> bool:
    return session.state.step >= session.num_steps


def _evaluate(session: Session, sinks: Sequence[Sink]) -> Evaluation | None:
    evaluation = evaluate(session)
    if evaluation is not None:
        for sink in sinks:
            sink.event("evaluation", asdict(evaluation))
    return evaluation


def _save(session: Session, run_dir: Path | None, sinks: Sequence[Sink]) -> Path | None:
    if run_dir is None:
        return None
    folder = run_dir / "checkpoints"
    snapshot = session.snapshot()
    if not session.is_first:
        return folder / checkpoint.name_of(session.state.step)
    path = checkpoint.save(folder, snapshot, session.recipe.checkpoint.keep)
    for sink in sinks:
        sink.event("checkpoint", {"step": session.state.step, "path": str(path)})
    return path
