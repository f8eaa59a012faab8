"""The course of one fit: rounds, and what is due between two of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from paceline.observe import Sink, Stats
from paceline.sync.health import RollBack
from paceline.training.agreed import gather_from_all
from paceline.training.compile_cost import CompileCost
from paceline.training.evaluation import Evaluation, evaluate
from paceline.training.hashes import hash_at_interval
from paceline.training.intervals import reached
from paceline.training.saves import Saves
from paceline.training.session import Session


class Course:
    """Takes a session through its rounds.

    Args:
        saves: when to save, and which evaluation was the best.
        sinks: receive every step and event; only rank 0 has any.
    Attributes:
        reason: why the run ends before its last step; empty: it goes on.
        stopped: a signal ended it.
        heeds_stop: `Session.stop` may be called though there are no callbacks.
    """

    def __init__(self, session: Session, saves: Saves, sinks: Sequence[Sink]) -> None:
        self._session, self._saves, self._sinks = session, saves, sinks
        self.reason, self.stopped, self.heeds_stop = "", False, False
        self._evaluation: Evaluation | None = None
        self._compiling = CompileCost() if session.recipe.runtime.compile else None

    def rounds(self) -> Iterator[Stats]:
        """The rounds of the session; where health asks for it, on from an earlier checkpoint."""
        session = self._session
        if self._saves.best.is_over():
            self.reason = self._patience()
        while not self.is_over():
            try:
                for stats in session.rounds():
                    yield stats
                    if self.is_over():
                        return
                return
            except RollBack as ask:
                self._saves.roll_back(ask)

    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.done or bool(self.reason)

    @property
    def done(self) -> bool:
        """Whether the last step was taken."""
        return self._session.state.step >= self._session.num_steps

    def after_round(self, stats: Stats, before: int) -> bool:
        """Tell of a round that began at step `before`, and do what is due; collective.

        Returns:
            Whether more was done than telling: what that took belongs to no round.
        """
        session = self._session
        for sink in self._sinks:
            sink.step(stats)
        compiled = self._compiling.follow(stats.seconds) if self._compiling is not None else None
        if compiled is not None:
            self.tell("compile", compiled)
        for name, record in session.notes.take():
            self.tell(name, record)
        for callback in session.callbacks:
            callback.on_step(session, stats)
        more = hash_at_interval(session, before, self._sinks)
        self.stopped = stats.stops > 0 and not self.done
        if self.stopped:
            self.reason = "asked by a signal"
        elif not self.done:
            more |= self._at_intervals(before)
            self._heed_callbacks()
        return more or self._heeds

    def evaluate(self) -> Evaluation | None:
        """Evaluate, unless the present state has been; collective."""
        found, session = self._evaluation, self._session
        if found is not None and found.step == session.state.step:
            return found
        self._evaluation = found = evaluate(session)
        if found is not None:
            self._saves.score(self._saves.best.add(found))
            self.tell("evaluation", asdict(found))
            for callback in session.callbacks:
                callback.on_evaluation(session, found)
        return found

    def tell(self, event: str, record: Mapping[str, Any]) -> None:
        """Tell all sinks."""
        for sink in self._sinks:
            sink.event(event, record)

    @property
    def _heeds(self) -> bool:
        """Whether somebody else has a say after every round."""
        return bool(self._session.callbacks) or self.heeds_stop

    def _at_intervals(self, before: int) -> bool:
        """Evaluate and save where that is due; returns whether it was."""
        session, best = self._session, self._saves.best
        evaluated = None
        if reached(session.recipe.evaluate.every_steps, before, session.state.step):
            evaluated = self.evaluate()
            if best.is_over():
                self.reason = self._patience()
                self.tell("early-stop", best.record(session.state.step))
        is_best = evaluated is not None and best.is_best(evaluated.step)
        return self._saves.at_interval(before, is_best=is_best) or evaluated is not None

    def _patience(self) -> str:
        recipe = self._session.recipe.evaluate
        return f"{recipe.patience} evaluations without a better {recipe.metric}"

    def _heed_callbacks(self) -> None:
        """End on all ranks if a callback of any has asked for it; 8 bytes a round if there are callbacks."""
        session = self._session
        if self.reason or not self._heeds or not session.sum(float(bool(session.stop_reason))):
            return
        reasons = gather_from_all(session, lambda: session.stop_reason)
        self.reason = next(text for text in reasons if text)
        self.tell("stop", {"step": session.state.step, "reason": self.reason})
