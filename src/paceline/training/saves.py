"""The saves of one fit: when one is due, and telling the sinks when it is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from paceline.checkpoint import BEST, Saver
from paceline.errors import CheckpointError, NumericError
from paceline.observe import Sink
from paceline.sync.health import RollBack
from paceline.training.agreed import share_with_all
from paceline.training.early import BestSoFar
from paceline.training.intervals import EveryMinutes, reached
from paceline.training.saving import build_saver, restore
from paceline.training.session import Session


@contextmanager
def open_saves(session: Session, run_dir: Path | None, sinks: Sequence[Sink]) -> Iterator[Saves]:
    """The saves of a fit; collective. Without a run folder nothing is saved."""

    def warn(text: str) -> None:
        for sink in sinks:
            sink.event("warning", {"text": text})

    saver = None if run_dir is None else build_saver(session, run_dir, warn)
    try:
        saves = Saves(session, saver, sinks, warn)
        saves.best = BestSoFar(session.recipe.evaluate, saves.scores())
        saves.begin()
        yield saves
    finally:
        if saver is not None:
            saver.close()


class Saves:
    """Saves a session when it is time.

    Args:
        saver: None: it is never time.
        sinks: are told of every checkpoint when it is there.
        warn: is told what cannot be used.
    Attributes:
        best: the evaluations so far, by which the run may end early.
    """

    def __init__(
        self, session: Session, saver: Saver | None, sinks: Sequence[Sink], warn: Callable[[str], None]
    ) -> None:
        self._session, self._saver, self._sinks, self._warn = session, saver, sinks, warn
        self.best = BestSoFar(session.recipe.evaluate, {})
        self._first = session.state.step
        self._name: str | None = None
        self._saved_at = -1
        self._roll_backs = 0
        self._returned_to: str | None = None
        self._untold: tuple[int, str] | None = None
        minutes = session.recipe.checkpoint.every_minutes if saver is not None else 0.0
        self._clock = EveryMinutes(minutes, session.is_first, session.sum)

    def at_interval(self, before: int, *, is_best: bool = False) -> bool:
        """Save if a round from step `before` to now has made it due; collective.

        Args:
            is_best: the state has just been evaluated, and none was better; the same on every rank.
        Returns:
            Whether ranks may have talked about it.
        """
        if self._saver is None:
            return False
        if not self._saver.busy:
            self._tell()
        step = self._session.state.step
        by_time = self._clock.due(step - before)
        options = self._session.recipe.checkpoint
        as_best = is_best and options.keep_best > 0
        is_due = by_time or as_best or reached(options.every_steps, before, step)
        if is_due:
            self._save(self._saver)
        return is_due or self._clock.asks

    def begin(self) -> None:
        """Save where the fit begins, if the run may have to go back there; collective."""
        if self._saver is not None and self._session.recipe.health.rolls_back and self._here() is None:
            self._save(self._saver)

    def roll_back(self, ask: RollBack) -> None:
        """Load the newest valid checkpoint, and leave out the steps from there to the one that went wrong.

        If nothing was saved since the last time, that one is no good, and the one before it is loaded.
        Collective.

        Raises:
            NumericError: it went back too often, or there is nothing to go back to.
        """
        saver, session = self._who_goes_back(ask), self._session
        self._roll_backs += 1
        if self._name is not None:
            saver.wait_published(self._name)
        self._tell()
        session.abort()
        wrong = session.state.step
        try:
            name = restore(session, saver.shelf.files, None, self._warn, before=self._returned_to)
        except CheckpointError as error:
            raise _unhelped(ask, f"{error.what}: there is no checkpoint left to go back to") from error
        self._returned_to = name
        first, session.state.step = session.state.step, wrong + 1
        told = {"step": wrong, "checkpoint": name, "left_out": [first, wrong], "reason": ask.what}
        for sink in self._sinks:
            sink.event("roll-back", told)

    def _who_goes_back(self, ask: RollBack) -> Saver:
        """The saver, if there is one and the run may go back once more."""
        most = self._session.recipe.health.max_roll_backs
        if self._saver is None:
            raise _unhelped(ask, "there is no checkpoint to go back to, as there is no run folder")
        if self._roll_backs == most:
            raise _unhelped(
                ask, f"the run has gone back {most} times, and health.max_roll_backs allows no more"
            )
        return self._saver

    def score(self, score: float) -> None:
        """Of the evaluation at the present step; lower is better."""
        if self._saver is not None:
            self._saver.score(self._session.state.step, score)

    def scores(self) -> dict[int, float]:
        """The scores up to the present step, by step; collective."""
        session, saver = self._session, self._saver
        if saver is None or session.state.step == 0:
            return {}
        mine = json.dumps(saver.shelf.losses if session.is_first else {})
        found = {int(step): float(score) for step, score in json.loads(share_with_all(session, mine)).items()}
        return {step: score for step, score in found.items() if step <= session.state.step}

    def begin_last(self) -> None:
        """Begin to save the end of the fit, if that is not where a checkpoint is already; collective."""
        if self._saver is None:
            return
        step = self._session.state.step
        if step == self._first:
            self._name = self._here()
        if self._name is None or step not in (self._first, self._saved_at):
            self._save(self._saver)

    def finish(self) -> str | None:
        """Wait until the last one can be loaded, and say where it is; collective where a rank was lost."""
        if self._saver is None or self._name is None:
            return None
        while not self._saver.wait_published(self._name):
            self._save(self._saver)
        self._tell()
        self._saver.tidy()
        return self._saver.shelf.files.place(self._name)

    def best_place(self) -> str | None:
        """Where the checkpoint of the best evaluation is, if such are kept; collective."""
        session, saver = self._session, self._saver
        if saver is None or not session.recipe.checkpoint.keep_best:
            return None
        shelf, name = saver.shelf, ""
        if session.is_first and any(kept.step in shelf.losses for kept in shelf.whole):
            name = shelf.named(BEST)
        name = share_with_all(session, name)
        return shelf.files.place(name) if name else None

    def _here(self) -> str | None:
        """The newest checkpoint, if it is of the present step; collective."""
        session, saver = self._session, self._saver
        found = saver.shelf.newest_at(session.state.step) if saver is not None and session.is_first else None
        return share_with_all(session, found or "") or None

    def _save(self, saver: Saver) -> None:
        saver.finish()
        self._tell()
        self._returned_to = None
        self._name, self._saved_at = saver.save(), self._session.state.step
        self._untold = (self._session.state.step, self._name)
        self._clock.restart()

    def _tell(self) -> None:
        """Tell of the save that was under way, now that it is written."""
        if self._saver is None or self._untold is None:
            return
        self._saver.finish()
        (step, name), self._untold = self._untold, None
        if name in self._saver.dropped:
            return
        path = self._saver.shelf.files.place(name)
        for sink in self._sinks:
            sink.event("checkpoint", {"step": step, "path": path})


def _unhelped(ask: RollBack, why: str) -> NumericError:
    """The trouble that asked to go back, and why that cannot be."""
    return NumericError(f"{ask.what}; {why}", where=ask.where, next_step=ask.next_step)
