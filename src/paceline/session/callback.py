"""Callbacks of a run, called on every rank at points where the state is consistent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.observe.step_stats import StepStats
    from paceline.session.evaluation import Evaluation
    from paceline.session.fit_loop import Result
    from paceline.session.session import Session


class Callback:
    """Base class of callbacks for `Task(callbacks=[...])` or `train(..., callbacks=[...])`.

    Override the methods you need. Every rank has its own callback and calls it at the same points, so a
    callback may call collectives (`session.sum`, `session.complete`, `paceline.evaluate`), and should
    write files only if `session.is_first`. `session.stop(reason)` on any rank ends the run after the
    present round on all ranks.
    """

    def on_build(self, session: Session) -> None:
        """Run once, before anything is restored: the place to register hooks on modules, to add parts to
        `session.update_step`, and to add state to checkpoints with `session.state.keep`."""

    def on_begin(self, session: Session) -> None:
        """Run before the first round of a fit, when a resumed run has its state."""

    def on_step(self, session: Session, stats: StepStats) -> None:
        """Run after every round: one step, or several steps under rules in which replicas train alone."""

    def on_evaluation(self, session: Session, evaluation: Evaluation) -> None:
        """Run after every evaluation on held-out data; `evaluation` is equal on all ranks."""

    def on_end(self, session: Session, result: Result) -> None:
        """Run after the last checkpoint; not called if the run fails."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return state for checkpoints: numbers, strings, lists and mappings; that of rank 0 is saved."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned when the checkpoint was saved."""
