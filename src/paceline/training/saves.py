"""The saves of one fit: when one is due, and telling the sinks when it is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from paceline.checkpoint import Saver
from paceline.comm.text import share_text
from paceline.observe import Sink
from paceline.training.intervals import EveryMinutes, reached
from paceline.training.saving import build_saver
from paceline.training.session import Session


@contextmanager
def open_saves(session: Session, run_dir: Path | None, sinks: Sequence[Sink]) -> Iterator[Saves]:
    """The saves of a fit; collective. Without a run folder nothing is saved."""

    def warn(text: str) -> None:
        for sink in sinks:
            sink.event("warning", {"text": text})

    saver = None if run_dir is None else build_saver(session, run_dir, warn)
    try:
        yield Saves(session, saver, sinks)
    finally:
        if saver is not None:
            saver.close()


class Saves:
    """Saves a session when it is time.

    Args:
        saver: None: it is never time.
        sinks: are told of every checkpoint when it is there.
    """

    def __init__(self, session: Session, saver: Saver | None, sinks: Sequence[Sink]) -> None:
        self._session, self._saver, self._sinks = session, saver, sinks
        self._first = session.state.step
        self._name: str | None = None
        self._untold: tuple[int, str] | None = None
        minutes = session.recipe.checkpoint.every_minutes if saver is not None else 0.0
        self._clock = EveryMinutes(minutes, session.is_first, session.sum)

    def at_interval(self, before: int) -> None:
        """Save if a round from step `before` to now has made it due; collective."""
        if self._saver is None:
            return
        if not self._saver.busy:
            self._tell()
        step = self._session.state.step
        by_time = self._clock.due(step - before)
        if by_time or reached(self._session.recipe.checkpoint.every_steps, before, step):
            self._save(self._saver)

    def score(self, loss: float) -> None:
        """The evaluation loss of the present step."""
        if self._saver is not None:
            self._saver.score(self._session.state.step, loss)

    def begin_last(self) -> None:
        """Begin to save the end of the fit, if that is not where a checkpoint is already; collective."""
        if self._saver is None:
            return
        unmoved = self._session.state.step == self._first
        here = self._saver.shelf.newest_at(self._first) if unmoved and self._session.is_first else None
        mesh, net = self._session.mesh, self._session.net
        self._name = share_text(here or "", mesh.world, net, self._session.placed.device) or None
        if self._name is None:
            self._save(self._saver)

    def finish(self) -> str | None:
        """Wait until the last one can be loaded, and say where it is."""
        if self._saver is None or self._name is None:
            return None
        self._saver.wait_published(self._name)
        self._tell()
        self._saver.tidy()
        return self._saver.shelf.files.place(self._name)

    def _save(self, saver: Saver) -> None:
        saver.finish()
        self._tell()
        self._name = saver.save()
        self._untold = (self._session.state.step, self._name)
        self._clock.restart()

    def _tell(self) -> None:
        """Tell of the save that was under way, now that it is written."""
        if self._saver is None or self._untold is None:
            return
        self._saver.finish()
        (step, name), self._untold = self._untold, None
        path = self._saver.shelf.files.place(name)
        for sink in self._sinks:
            sink.event("checkpoint", {"step": step, "path": path})
