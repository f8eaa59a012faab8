"""The fit loop: step, observe, and at quiescent points evaluate and save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from torch import nn

from paceline.observe import Sink, Stats
from paceline.training.course import Course
from paceline.training.evaluation import Evaluation
from paceline.training.hashes import tell_hash
from paceline.training.records import RankRecords
from paceline.training.saves import Saves, open_saves
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


class Fitting:
    """A fit under way.

    Args:
        course: rounds, and what is due between two of them.
    """

    def __init__(self, session: Session, run_dir: Path | None, sinks: Sequence[Sink], saves: Saves) -> None:
        self._session, self._run_dir, self._sinks, self._saves = session, run_dir, sinks, saves
        self.course = Course(session, saves, sinks)
        self._ranks = RankRecords(session, sinks, written=run_dir is not None)
        self._before, self._last = session.state.step, cast("Stats | None", None)
        for callback in session.callbacks:
            callback.on_begin(session)

    def after_round(self, stats: Stats) -> None:
        """Tell of a round, and do what is due; collective."""
        self._last = stats
        self._ranks.step(stats)
        if self.course.after_round(stats, self._before):
            self._ranks.begin()
        self._before = self._session.state.step

    def finish(self) -> Result:
        """Save, evaluate and say how the run ended; collective."""
        session, course, saves = self._session, self.course, self._saves
        saves.begin_last()
        self._ranks.flush()
        _account(session, course)
        sha256 = tell_hash(session, self._sinks) if session.recipe.reproducible else None
        evaluation = None if course.stopped else course.evaluate()
        saved = saves.finish()
        course.tell("end", {"step": session.state.step, "stopped": course.stopped})
        result = Result(
            steps=session.state.step,
            last=self._last,
            evaluation=evaluation,
            checkpoint=saved,
            sha256=sha256,
            stopped=course.stopped,
            run_dir=self._run_dir,
            reason=course.reason,
            best=saves.best_place(),
        )
        for callback in session.callbacks:
            callback.on_end(session, result)
        return result


@contextmanager
def fitting(session: Session, run_dir: Path | None, sinks: Sequence[Sink]) -> Iterator[Fitting]:
    """A fit, for whoever makes its rounds; see `fit`."""
    with ExitStack() as stack:
        for sink in sinks:
            stack.callback(sink.close)
        yield Fitting(session, run_dir, sinks, stack.enter_context(open_saves(session, run_dir, sinks)))


def fit(session: Session, run_dir: Path | None = None, sinks: Sequence[Sink] = ()) -> Result:
    """Train to the end of the run.

    Args:
        session: from its state's step on; a resumed state continues.
        run_dir: of the run; None: nothing is saved.
        sinks: receive every step and event; only rank 0 has any.
    Returns:
        The result; a stop signal on any rank ends all ranks after the same step, which is saved.
    """
    with fitting(session, run_dir, sinks) as found:
        for stats in found.course.rounds():
            found.after_round(stats)
        return found.finish()


def _account(session: Session, course: Course) -> None:
    """What went over the wires, how much of its time was hidden, and what the sample cache saved."""
    rows = {
        f"{op} {group}": {**asdict(entry), "hidden_fraction": entry.hidden_fraction}
        for (op, group), entry in session.net.ledger.rows.items()
    }
    loader = session.loader
    course.tell("communication", {"rows": rows})
    course.tell("cache", {"hits": loader.cache_hits, "lookups": loader.cache_lookups})
