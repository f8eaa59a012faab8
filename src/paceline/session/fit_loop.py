"""What compiling a model has cost, in seconds and in steps: nobody knows it before.

Hashes of the state while it is trained: written to the sinks, and compared over all ranks.

The course of one fit: rounds, and what is due between two of them.

The fit loop: step, observe, and at quiescent points evaluate and save.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, cast

from torch import nn

from paceline.errors import DivergenceError
from paceline.observe.sinks import Sink
from paceline.observe.step_stats import StepStats
from paceline.parallel.state_hash import find_divergence, whole_sha256
from paceline.session.checkpointing import CheckpointSchedule, interval_passed, open_checkpoint_schedule
from paceline.session.evaluation import Evaluation, evaluate
from paceline.session.run_records import RankRecords
from paceline.session.session import Session, gather_from_all, repeat_until_agreed
from paceline.sync.health import RollBackRequest

_NUM_USUAL_STEPS = 5


class CompileCost:
    """Watches the first steps of a model that is compiled when it is first called."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def follow(self, seconds: float) -> Mapping[str, Any] | None:
        """Note the wall time of a step; returns the event `compile` when it is known."""
        if len(self._seconds) > _NUM_USUAL_STEPS:
            return None
        self._seconds.append(seconds)
        if len(self._seconds) <= _NUM_USUAL_STEPS:
            return None
        first, usual = self._seconds[0], median(self._seconds[1:])
        spent = max(0.0, first - usual)
        return {"seconds": spent, "steps": int(spent / usual) if usual > 0 else 0}


def hash_at_interval(session: Session, before: int, sinks: Sequence[Sink]) -> bool:
    """Every `hash_every` steps: hash, compare, tell; collective.

    Args:
        before: the step at which the last round began.
    Returns:
        Whether it was time.
    Raises:
        DivergenceError: ranks that should be equal are not, and the recipe says stop.
    """
    is_due = interval_passed(session.recipe.hash_every, before, session.state.step)
    if is_due:
        hash_and_compare(session, sinks)
    return is_due


def hash_and_compare(session: Session, sinks: Sequence[Sink]) -> str:
    """Hash the whole state, in hex, after comparing what ranks hold in common; collective."""
    state = session.state
    found = repeat_until_agreed(session, lambda: find_divergence(state, session.mesh, session.net))
    sha256 = repeat_until_agreed(session, lambda: whole_sha256(state, session.mesh, session.net))
    for sink in sinks:
        sink.event("hash", {"step": state.step - 1, "sha256": sha256, "equal": found is None})
    if found is None:
        return sha256
    for sink in sinks:
        sink.event("divergence", {"step": found.step, "tensor": found.tensor, "ranks": list(found.ranks)})
    if session.recipe.on_divergence == "stop":
        raise DivergenceError(
            f"ranks that should hold equal bits do not: {found}",
            next_step="go on from the last checkpoint; if it happens again on the same host, test its memory,"
            " otherwise look for something in the model that differs between ranks",
        )
    return sha256


class RunSchedule:
    """Takes a session through its rounds.

    Args:
        saves: when to save, and which evaluation was the best.
        sinks: receive every step and event; only rank 0 has any.
    Attributes:
        reason: why the run ends before its last step; empty: it goes on.
        stopped: a signal ended it.
        checks_stop_requests: `Session.stop` may be called though there are no callbacks.
    """

    def __init__(self, session: Session, saves: CheckpointSchedule, sinks: Sequence[Sink]) -> None:
        self._session, self._saves, self._sinks = session, saves, sinks
        self.reason, self.stopped, self.checks_stop_requests = "", False, False
        self._evaluation: Evaluation | None = None
        self._compile_cost = CompileCost() if session.recipe.runtime.compile else None

    def rounds(self) -> Iterator[StepStats]:
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
            except RollBackRequest as ask:
                self._saves.roll_back(ask)

    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.done or bool(self.reason)

    @property
    def done(self) -> bool:
        """Whether the last step was taken."""
        return self._session.state.step >= self._session.num_steps

    def after_round(self, stats: StepStats, before: int) -> bool:
        """Tell of a round that began at step `before`, and do what is due; collective.

        Returns:
            Whether more was done than telling: what that took belongs to no round.
        """
        session = self._session
        for sink in self._sinks:
            sink.step(stats)
        compiled = self._compile_cost.follow(stats.seconds) if self._compile_cost is not None else None
        if compiled is not None:
            self.tell("compile", compiled)
        for name, record in session.events.take():
            self.tell(name, record)
        for callback in session.callbacks:
            callback.on_step(session, stats)
        more = hash_at_interval(session, before, self._sinks)
        self.stopped = stats.stops > 0 and not self.done
        if self.stopped:
            self.reason = "asked by a signal"
        elif not self.done:
            more |= self._at_intervals(before)
            self._check_stop_requests()
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
        return bool(self._session.callbacks) or self.checks_stop_requests

    def _at_intervals(self, before: int) -> bool:
        """Evaluate and save where that is due; returns whether it was."""
        session, best = self._session, self._saves.best
        evaluated = None
        if interval_passed(session.recipe.evaluate.every_steps, before, session.state.step):
            evaluated = self.evaluate()
            if best.is_over():
                self.reason = self._patience()
                self.tell("early-stop", best.record(session.state.step))
        is_best = evaluated is not None and best.is_best(evaluated.step)
        return self._saves.at_interval(before, is_best=is_best) or evaluated is not None

    def _patience(self) -> str:
        recipe = self._session.recipe.evaluate
        return f"{recipe.patience} evaluations without a better {recipe.metric}"

    def _check_stop_requests(self) -> None:
        """End on all ranks if a callback of any has asked for it; 8 bytes a round if there are callbacks."""
        session = self._session
        if self.reason or not self._heeds or not session.sum(float(bool(session.stop_reason))):
            return
        reasons = gather_from_all(session, lambda: session.stop_reason)
        self.reason = next(text for text in reasons if text)
        self.tell("stop", {"step": session.state.step, "reason": self.reason})


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
    last: StepStats | None
    evaluation: Evaluation | None
    checkpoint: str | None
    sha256: str | None
    stopped: bool
    run_dir: Path | None = None
    reason: str = ""
    best: str | None = None
    model: nn.Module | None = None


class FitInProgress:
    """A fit under way.

    Args:
        course: rounds, and what is due between two of them.
    """

    def __init__(
        self, session: Session, run_dir: Path | None, sinks: Sequence[Sink], saves: CheckpointSchedule
    ) -> None:
        self._session, self._run_dir, self._sinks, self._saves = session, run_dir, sinks, saves
        self.course = RunSchedule(session, saves, sinks)
        self._ranks = RankRecords(session, sinks, written=run_dir is not None)
        self._before, self._last = session.state.step, cast("StepStats | None", None)
        for callback in session.callbacks:
            callback.on_begin(session)

    def after_round(self, stats: StepStats) -> None:
        """Tell of a round, and do what is due; collective."""
        self._last = stats
        self._ranks.step(stats)
        if self.course.after_round(stats, self._before):
            self._ranks.begin()
        self._before = self._session.state.step

    def finish(self) -> Result:
        """Save, evaluate and say how the run ended; collective."""
        session, course, saves = self._session, self.course, self._saves
        saves.begin_final_save()
        self._ranks.flush()
        _log_communication(session, course)
        sha256 = hash_and_compare(session, self._sinks) if session.recipe.reproducible else None
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
            best=saves.best_checkpoint_path(),
        )
        for callback in session.callbacks:
            callback.on_end(session, result)
        return result


@contextmanager
def fitting(session: Session, run_dir: Path | None, sinks: Sequence[Sink]) -> Iterator[FitInProgress]:
    """A fit, for whoever makes its rounds; see `fit`."""
    with ExitStack() as stack:
        for sink in sinks:
            stack.callback(sink.close)
        yield FitInProgress(
            session, run_dir, sinks, stack.enter_context(open_checkpoint_schedule(session, run_dir, sinks))
        )


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


def _log_communication(session: Session, course: RunSchedule) -> None:
    """What went over the wires, how much of its time was hidden, and what the sample cache saved."""
    rows = {
        f"{op} {group}": {**asdict(entry), "hidden_fraction": entry.hidden_fraction}
        for (op, group), entry in session.net.ledger.rows.items()
    }
    loader = session.loader
    course.tell("communication", {"rows": rows})
    course.tell("cache", {"hits": loader.cache_hits, "lookups": loader.cache_lookups})
