"""The fit loop: step, observe, and at quiescent points evaluate and save."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import nn

from paceline.observe import Sink, Stats
from paceline.training.course import Course
from paceline.training.evaluation import Evaluation
from paceline.training.hashes import tell_hash
from paceline.training.records import RankRecords
from paceline.training.saves import open_saves
from paceline.training.session import Session


@dataclass(frozen=True)
class Result:
    """How a run ended, equal on every rank but for `model`.

    Args:
        steps: steps taken since the beginning of the run, also before a resume.
        last: the last step of this fit; None if there was none to take.
        evaluation: on the held-out data after the last step; None without such data.
        checkpoint: where the last one is; None: nothing was saved.
        sha256: of the state after the last step, in hex; None unless the run is reproducible.
        stopped: whether a signal ended the run before its last step.
        run_dir: the folder of the run; None without one.
        reason: why it ended before its last step: a signal, patience, or what a callback said; empty: it
            did not.
        best: where the checkpoint of the best evaluation is; None: `checkpoint.keep_best` is not set, or
            nothing was evaluated.
        model: with the parameters of the last step, or with their average where the recipe asks for one;
            None where this rank holds only a part of it (`paceline export` takes it whole from the
            checkpoint), and until `train` returns.
    """

    steps: int
    last: Stats | None
    evaluation: Evaluation | None
    checkpoint: str | None
    sha256: str | None
    stopped: bool
    run_dir: Path | None = None
    reason: str = ""
    best: str | None = None
    model: nn.Module | None = None


def fit(session: Session, run_dir: Path | None = None, sinks: Sequence[Sink] = ()) -> Result:
    """Train to the end of the run.

    Args:
        session: from its state's step on; a resumed state continues.
        run_dir: of the run; None: nothing is saved.
        sinks: receive every step and event; only rank 0 has any.
    Returns:
        The result; a stop signal on any rank ends all ranks after the same step, which is saved.
    """
    last: Stats | None = None
    with ExitStack() as stack:
        for sink in sinks:
            stack.callback(sink.close)
        saves = stack.enter_context(open_saves(session, run_dir, sinks))
        course = Course(session, saves, sinks)
        ranks = RankRecords(session, sinks, written=run_dir is not None)
        for callback in session.callbacks:
            callback.on_begin(session)
        before = session.state.step
        for last in course.rounds():
            ranks.step(last)
            course.after_round(last, before)
            before = session.state.step
            ranks.begin()
        saves.begin_last()
        ranks.flush()
        _account(session, course)
        sha256 = tell_hash(session, sinks) if session.recipe.reproducible else None
        evaluation = None if course.stopped else course.evaluate()
        saved = saves.finish()
        course.tell("end", {"step": session.state.step, "stopped": course.stopped})
        result = Result(
            session.state.step,
            last,
            evaluation,
            saved,
            sha256,
            course.stopped,
            run_dir,
            course.reason,
            saves.best_place(),
        )
        for callback in session.callbacks:
            callback.on_end(session, result)
    return result


def _account(session: Session, course: Course) -> None:
    """What went over the wires, how much of its time was hidden, and what the sample cache saved."""
    rows = {
        f"{op} {group}": {**asdict(entry), "hidden_fraction": entry.hidden_fraction}
        for (op, group), entry in session.net.ledger.rows.items()
    }
    loader = session.loader
    course.tell("communication", {"rows": rows})
    course.tell("cache", {"hits": loader.cache_hits, "lookups": loader.cache_lookups})
