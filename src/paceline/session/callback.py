"""What a user may hang into a run: called on every rank, at points where the state is consistent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.observe.step_stats import StepStats
    from paceline.session.evaluation import Evaluation
    from paceline.session.fit_loop import Result
    from paceline.session.session import Session


class Callback:
    """Override what you need; `Task(callbacks=[...])` or `train(..., callbacks=[...])`.

    Every rank has its own and calls it at the same points, so a callback may use what is collective
    (`session.sum`, `session.complete`, `paceline.evaluate`), and writes files where `session.is_first`.
    `session.stop(reason)` ends the run after the present round on all ranks, whichever asked for it.
    """

    def on_build(self, session: Session) -> None:
        """Once, before anything is restored: hooks on modules, parts of `session.update_step`, and what
        `session.state.keep` is to put into checkpoints."""

    def on_begin(self, session: Session) -> None:
        """Before the first round of this fit; a resumed run has its state by then."""

    def on_step(self, session: Session, stats: StepStats) -> None:
        """After every round: one step of many micro-batches, or several steps where replicas train alone."""

    def on_evaluation(self, session: Session, evaluation: Evaluation) -> None:
        """After every evaluation on held-out data; equal on all ranks."""

    def on_end(self, session: Session, result: Result) -> None:
        """After the last checkpoint; not called when the run fails."""

    def state_dict(self) -> Mapping[str, Any]:
        """What a checkpoint should hold: numbers, words, lists and tables. That of rank 0 is saved."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave before the run was stopped."""
