"""The fit loop: step, observe, and at quiescent points evaluate and save."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from paceline.observe import Sink, Stats
from paceline.sync.health import RollBack
from paceline.training.evaluation import Evaluation, evaluate
from paceline.training.hashes import hash_at_interval, tell_hash
from paceline.training.intervals import reached
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
        model: with the parameters of the last step; None where this rank holds only a part of it
            (`paceline export` takes it whole from the checkpoint), and until `train` returns.
    """

    steps: int
    last: Stats | None
    evaluation: Evaluation | None
    checkpoint: str | None
    sha256: str | None
    stopped: bool
    run_dir: Path | None = None
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
    stopped = False
    with ExitStack() as stack:
        for sink in sinks:
            stack.callback(sink.close)
        saves = stack.enter_context(open_saves(session, run_dir, sinks))
        ranks = RankRecords(session, sinks, written=run_dir is not None)
        before = session.state.step
        for last in _rounds(session, saves):
            _observe(session, last, sinks, ranks)
            stopped = last.stops > 0 and not _done(session)
            hash_at_interval(session, before, sinks)
            if not _done(session) and not stopped:
                _at_intervals(session, before, saves, sinks)
            before = session.state.step
            ranks.begin()
        saves.begin_last()
        ranks.flush()
        _account(session, sinks)
        sha256 = tell_hash(session, sinks) if session.recipe.reproducible else None
        evaluation = None if stopped else _evaluate(session, saves, sinks)
        saved = saves.finish()
        _tell(sinks, "end", {"step": session.state.step, "stopped": stopped})
    return Result(session.state.step, last, evaluation, saved, sha256, stopped, run_dir)


def _rounds(session: Session, saves: Saves) -> Iterator[Stats]:
    """The rounds of a session; where health asks for it, on from an earlier checkpoint."""
    while not saves.best.is_over():
        try:
            for stats in session.rounds():
                yield stats
                if saves.best.is_over():
                    return
            return
        except RollBack as ask:
            saves.roll_back(ask)


def _observe(session: Session, stats: Stats, sinks: Sequence[Sink], ranks: RankRecords) -> None:
    for sink in sinks:
        sink.step(stats)
    for name, record in session.notes.take():
        for sink in sinks:
            sink.event(name, record)
    ranks.step(stats)


def _account(session: Session, sinks: Sequence[Sink]) -> None:
    """What went over the wires, how much of its time was hidden, and what the sample cache saved."""
    rows = {
        f"{op} {group}": {**asdict(entry), "hidden_fraction": entry.hidden_fraction}
        for (op, group), entry in session.net.ledger.rows.items()
    }
    loader = session.loader
    _tell(sinks, "communication", {"rows": rows})
    _tell(sinks, "cache", {"hits": loader.cache_hits, "lookups": loader.cache_lookups})


def _tell(sinks: Sequence[Sink], event: str, record: Mapping[str, Any]) -> None:
    for sink in sinks:
        sink.event(event, record)


def _at_intervals(session: Session, before: int, saves: Saves, sinks: Sequence[Sink]) -> None:
    if reached(session.recipe.evaluate.every_steps, before, session.state.step):
        _evaluate(session, saves, sinks)
        if saves.best.is_over():
            _tell(sinks, "early-stop", saves.best.record(session.state.step))
    saves.at_interval(before)


def _done(session: Session) -> bool:
    return session.state.step >= session.num_steps


def _evaluate(session: Session, saves: Saves, sinks: Sequence[Sink]) -> Evaluation | None:
    evaluation = evaluate(session)
    if evaluation is not None:
        saves.score(saves.best.add(evaluation))
        _tell(sinks, "evaluation", asdict(evaluation))
    return evaluation
