"""The fit loop: train a session to the end of its run, with metrics, hashes, evaluations and checkpoints.

`fit` runs `FitInProgress.after_round` after every round. What is due there is due on all ranks after the
same round, since it follows from the step (or from rank 0's clock, which all ranks read together); so
everything in `RunSchedule` is collective. `RunSchedule` decides when the run ends: after its last step,
after a stop signal, when evaluations have not improved, or when a callback asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, cast

from torch import nn

from paceline.errors import CommunicationError, DivergenceError, RecipeError, format_count
from paceline.job.launcher_reports import write_run_folder
from paceline.observe.sinks import Sink
from paceline.observe.step_stats import StepStats
from paceline.observe.step_trace import TraceWindow
from paceline.parallel.state_hash import find_divergence, whole_sha256
from paceline.pipeline_schedule.schedule_table import TimelineRow
from paceline.privacy.entropy import PRIVACY_KEY
from paceline.privacy.private_sum import PrivateSum
from paceline.recipe.tables import parse_step_range, require_steps_of_run
from paceline.session.checkpointing import CheckpointSchedule, interval_passed, open_checkpoint_schedule
from paceline.session.early_stopping import value_of_metric
from paceline.session.evaluation import Evaluation, evaluate
from paceline.session.freed_memory import FreedMemory
from paceline.session.membership_change import JoinRequests, LeaveRequest
from paceline.session.run_records import RankRecords
from paceline.session.session import Session, gather_from_all, repeat_until_agreed
from paceline.session.step_profile import build_step_profile
from paceline.sync.health import RollBackRequest

_NUM_USUAL_STEPS = 5


class CompileCost:
    """Measurement of what compiling the model has cost, from the first steps, of which the first compiles."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def follow(self, seconds: float) -> Mapping[str, Any] | None:
        """Record the wall time of a step; return the event `compile` once the cost is known."""
        if len(self._seconds) > _NUM_USUAL_STEPS:
            return None
        self._seconds.append(seconds)
        if len(self._seconds) <= _NUM_USUAL_STEPS:
            return None
        first, usual = self._seconds[0], median(self._seconds[1:])
        cost = max(0.0, first - usual)
        return {"seconds": cost, "steps": int(cost / usual) if usual > 0 else 0}


def hash_and_compare(session: Session, sinks: Sequence[Sink]) -> str:
    """Compare tensors that several ranks hold, and return the SHA-256 of the whole state in hex; collective.

    Args:
        sinks: receive the events `hash` and `divergence`.
    Raises:
        DivergenceError: ranks differ in tensors that should be equal, and `on_divergence` is "stop".
    """
    state = session.state
    divergence = repeat_until_agreed(session, lambda: find_divergence(state, session.mesh, session.net))
    sha256 = repeat_until_agreed(session, lambda: whole_sha256(state, session.mesh, session.net))
    for sink in sinks:
        sink.event("hash", {"step": state.step - 1, "sha256": sha256, "equal": divergence is None})
    if divergence is None:
        return sha256
    for sink in sinks:
        sink.event(
            "divergence",
            {"step": divergence.step, "tensor": divergence.tensor, "ranks": list(divergence.ranks)},
        )
    if session.recipe.on_divergence == "stop":
        raise DivergenceError(
            f"ranks that should hold equal bits do not: {divergence}",
            next_step="resume from the last checkpoint; if it happens again on the same host, test its"
            " memory, otherwise look for something in the model that differs between ranks",
        )
    return sha256


class RunSchedule:
    """Schedule of one fit: its rounds, what is due between two of them, and when the run ends.

    Args:
        checkpoints: when to save, and which evaluation was the best.
        sinks: receive every step and event; only rank 0 has any.
    Attributes:
        reason: why the run ends before its last step; empty while it continues.
        stopped: a signal has ended the run.
        checks_stop_requests: `Session.stop` may be called although there are no callbacks.
        pause_step: the step after which the run is saved and stops, as if by a signal; None: its last one.
    """

    def __init__(self, session: Session, checkpoints: CheckpointSchedule, sinks: Sequence[Sink]) -> None:
        self._session, self._checkpoints, self._sinks = session, checkpoints, sinks
        self._private = session.private
        self.pause_step: int | None = None
        self.reason, self.stopped, self.checks_stop_requests = "", False, False
        self._evaluation: Evaluation | None = None
        self._compile_cost = CompileCost() if session.recipe.runtime.compile else None

    def rounds(self) -> Iterator[StepStats]:
        """Yield the stats of the session's rounds; roll back if a health check asks for it."""
        session = self._session
        # A resumed run may have used up its patience before.
        if self._checkpoints.best.is_over():
            self.reason = self._patience()
        self._pause_if_due()
        if self._private is not None:
            self._stop_at_privacy_budget(self._private)
        while not self.is_over():
            try:
                for stats in session.rounds():
                    yield stats
                    if self.is_over():
                        return
                return
            # The generator has ended with the request; the loop starts another one from the
            # restored step.
            except RollBackRequest as request:
                self._checkpoints.roll_back(request)

    def is_over(self) -> bool:
        """Return whether the run has ended."""
        return self.done or bool(self.reason)

    @property
    def done(self) -> bool:
        """Return whether the last step was taken."""
        return self._session.state.step >= self._session.num_steps

    def after_round(self, stats: StepStats, before: int) -> bool:
        """Report a round to sinks and callbacks, and do what is due after it; collective.

        Args:
            before: the step at which the round began.
        Returns:
            Whether something was done whose time does not belong to the next round.
        """
        session = self._session
        for sink in self._sinks:
            sink.step(stats)
        session.recorded_step = stats.step
        compiled = self._compile_cost.follow(stats.seconds) if self._compile_cost is not None else None
        if compiled is not None:
            self.send_event("compile", compiled)
        # After the step, so that in the files the events of a round follow it.
        for name, record in session.events.take():
            self.send_event(name, record)
        session.run_callbacks(lambda callback: callback.on_step(session, stats))
        hashes = interval_passed(session.recipe.hash_every, before, session.state.step)
        if hashes:
            hash_and_compare(session, self._sinks)
        self.stopped = stats.stops > 0 and not self.done
        if self.stopped:
            self.reason = "stopped by a signal"
        elif not self.done:
            hashes |= self._evaluate_and_save(before)
            self._check_stop_requests()
            self._pause_if_due()
            if self._private is not None:
                self._stop_at_privacy_budget(self._private)
        return hashes or self._may_be_stopped

    def _stop_at_privacy_budget(self, private: PrivateSum) -> None:
        """End the run before the round that would exceed the privacy budget; equal on all ranks."""
        step = self._session.state.step
        if self.is_over():
            return
        self.reason = private.refuse_next(self._session.num_steps - step)
        if self.reason:
            self.send_event("stop", {"step": step, "reason": self.reason})

    def _pause_if_due(self) -> None:
        """Stop at the pause step, after what is due at that step, so that a resumed run repeats nothing."""
        step = self._session.state.step
        if self.pause_step is not None and step >= self.pause_step and not self.is_over():
            self.stopped, self.reason = True, f"paused after {format_count(step, 'step')}"

    def evaluate(self) -> Evaluation | None:
        """Return the evaluation of the present state, evaluating it if that was not done yet; collective."""
        evaluation, session = self._evaluation, self._session
        if evaluation is not None and evaluation.step == session.state.step:
            return evaluation
        with session.net.activity.during("evaluation"):
            self._evaluation = evaluation = evaluate(session)
        if evaluation is not None:
            self._checkpoints.score(self._checkpoints.best.add(evaluation))
            self.send_event("evaluation", asdict(evaluation))
            session.run_callbacks(lambda callback: callback.on_evaluation(session, evaluation))
        return evaluation

    @property
    def has_evaluated_or_saved(self) -> bool:
        """Return whether the present state was evaluated or is being saved."""
        step, evaluation = self._session.state.step, self._evaluation
        return self._checkpoints.saved_at == step or (evaluation is not None and evaluation.step == step)

    def send_event(self, event: str, record: Mapping[str, Any]) -> None:
        """Send an event to all sinks."""
        for sink in self._sinks:
            sink.event(event, record)

    @property
    def _may_be_stopped(self) -> bool:
        """Return whether a callback or the user's own loop may stop the run after a round."""
        return bool(self._session.callbacks) or self.checks_stop_requests

    def _evaluate_and_save(self, before: int) -> bool:
        """Evaluate and save if that is due; return whether it was."""
        session, best = self._session, self._checkpoints.best
        evaluated = None
        if interval_passed(session.recipe.evaluate.every_steps, before, session.state.step):
            evaluated = self.evaluate()
            self._reduce_on_plateau(evaluated)
            if best.is_over():
                self.reason = self._patience()
                self.send_event("early-stop", best.record(session.state.step))
        is_best = evaluated is not None and best.is_best(evaluated.step)
        return self._checkpoints.at_interval(before, is_best=is_best) or evaluated is not None

    def repeat_interrupted(self, before: int) -> None:
        """Do again what is due after the present step, which the loss of a rank has interrupted; collective.

        Args:
            before: the step at which the round before it began.
        """
        if not self.done:
            self._evaluate_and_save(before)

    def make_missed_evaluation(self) -> None:
        """Make the evaluation that was due when the run stopped; collective.

        A run that stops by a signal or at its last step saves before it evaluates, or does not evaluate.
        """
        session, plateau, step = self._session, self._session.plateau, self._session.state.step
        every_steps = session.recipe.evaluate.every_steps
        if not every_steps or not step or self.done:
            return
        is_missed = self._checkpoints.lacks_score(step) and step % every_steps == 0
        if is_missed or (plateau is not None and interval_passed(every_steps, plateau.step, step)):
            self._reduce_on_plateau(self.evaluate())

    def _reduce_on_plateau(self, evaluation: Evaluation | None) -> None:
        """Count an evaluation that was due in the schedule; equal on all ranks."""
        plateau, schedule = self._session.plateau, self._session.recipe.schedule
        if plateau is None or evaluation is None:
            return
        value = value_of_metric("schedule.metric", schedule.metric, evaluation)
        if plateau.observe(evaluation.step, value):
            best = math.nan if plateau.best is None else plateau.best
            record = {"metric": schedule.metric, "best": best, "multiplier": plateau.multiplier}
            self.send_event("plateau", {"step": evaluation.step, **record})

    def _patience(self) -> str:
        recipe = self._session.recipe.evaluate
        return f"{format_count(recipe.patience, 'evaluation')} without a better {recipe.metric}"

    def _check_stop_requests(self) -> None:
        """End the run on all ranks if a callback of any rank asks for it; 8 bytes a round with callbacks."""
        session = self._session
        if self.reason or not self._may_be_stopped or not session.sum(float(bool(session.stop_reason))):
            return
        # Texts are gathered only if the sum has shown that a rank has a reason.
        reasons = gather_from_all(session, lambda: session.stop_reason)
        self.reason = next(text for text in reasons if text)
        self.send_event("stop", {"step": session.state.step, "reason": self.reason})


@dataclass(frozen=True)
class Result:
    """Result of a run, equal on every rank except for `model`.

    Args:
        steps: steps taken since the beginning of the run, including those before a resume.
        last: stats of the last round of this fit; None if there was no step to take.
        evaluation: on the held-out data after the last step; None if the task has no held-out data.
        checkpoint: path or URL of the last checkpoint; None if nothing was saved.
        sha256: hash of the state after the last step, in hex; None unless the run is reproducible.
        stopped: a signal ended the run before its last step.
        run_dir: the folder of the run; None without one.
        reason: why the run ended before its last step: a signal, patience, or the reason of a callback; empty
            if it did not.
        best: path or URL of the checkpoint of the best evaluation; None if `checkpoint.keep_best` is not set
            or nothing was evaluated.
        model: with the parameters of the last step, or their average if the recipe asks for one; None if this
            rank holds only a part of it (`paceline export` reads the whole from the checkpoint), and until
            `train` returns.
        privacy: of a run with `federated.secure` what the server learned, of one with `private.noise` the
            fields of `PrivacyReport`; in `warning` why that may be everything; empty for others.
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
    privacy: Mapping[str, Any] = field(default_factory=dict)


class FitInProgress:
    """Fit that has begun: `after_round` is called after every round, `finish` at the end.

    Attributes:
        schedule: the rounds, and what is due between two of them.
        run_dir: the folder of the run; None without one.
    """

    def __init__(
        self, session: Session, run_dir: Path | None, sinks: Sequence[Sink], checkpoints: CheckpointSchedule
    ) -> None:
        self.run_dir, self._sinks = run_dir, sinks
        self.session, self._session, self._checkpoints = session, session, checkpoints
        self.schedule = RunSchedule(session, checkpoints, sinks)
        self._ranks = RankRecords(session, sinks, written=run_dir is not None)
        self._before, self._last = session.state.step, cast("StepStats | None", None)
        session.reported = self._before, session.reported[1]
        self._profile = build_step_profile(session, run_dir, self.schedule.send_event)
        self._trace = _open_trace(session, run_dir, self.schedule)
        self._freed_memory = FreedMemory(session.recipe, session.mesh)
        self._freed_memory.return_to_system()  # the whole model that was partitioned, and trial steps
        self._report_epsilon()
        session.run_callbacks(lambda callback: callback.on_begin(session))
        if session.interrupted_at is None:
            self.schedule.make_missed_evaluation()
        else:
            self._last = session.reported[1]
            self.schedule.repeat_interrupted(session.interrupted_at)
            session.interrupted_at = None
        if self._profile is not None:
            self._profile.before_step(session.state.step)
        if self._trace is not None:
            self._trace.before_step(session.state.step)

    def after_round(self, stats: StepStats) -> None:
        """Report a round, and do what is due after it; collective."""
        self._last = stats
        self._session.reported = self._before, stats
        self._ranks.step(stats)
        is_interrupted = self.schedule.after_round(stats, self._before)
        if self._freed_memory.is_returned:
            self._freed_memory.after_round(is_after_other_work=self.schedule.has_evaluated_or_saved)
        if self._profile is not None:
            is_interrupted |= self._profile.before_step(self._session.state.step)
        if self._trace is not None:
            is_interrupted |= self._trace.before_step(self._session.state.step)
        if is_interrupted:
            # The time of evaluations and saves belongs to no round.
            self._ranks.begin()
        self._before = self._session.state.step
        self._session.reported = self._before, stats

    def _report_epsilon(self) -> dict[str, Any]:
        """Send the event `epsilon`, and return its fields; empty if no sum has noise."""
        private = self._session.private
        if private is None:
            return {}
        record = asdict(private.ledger.report())
        self.schedule.send_event("epsilon", {"step": self._session.state.step, **record})
        return record

    def close(self) -> None:
        """Write the profile and the trace of a run that ends, also by an error, inside of their ranges."""
        if self._profile is not None:
            self._profile.close()
        if self._trace is not None:
            self._trace.close()

    def finish(self) -> Result:
        """Save, evaluate and return the result of the run; collective."""
        self.close()
        session, schedule, checkpoints = self._session, self.schedule, self._checkpoints
        checkpoints.begin_final_save()  # first, so that it is written in the background of the evaluation
        self._ranks.flush()
        _log_communication(session, schedule)
        sha256 = hash_and_compare(session, self._sinks) if session.recipe.reproducible else None
        evaluation = None if schedule.stopped else schedule.evaluate()
        saved = checkpoints.finish()
        self._freed_memory.return_to_system()  # before the whole model is assembled for the result
        epsilon = self._report_epsilon()
        schedule.send_event("end", {"step": session.state.step, "stopped": schedule.stopped})
        privacy = session.state.stateful_objects.get(PRIVACY_KEY)
        result = Result(
            steps=session.state.step,
            last=self._last,
            evaluation=evaluation,
            checkpoint=saved,
            sha256=sha256,
            stopped=schedule.stopped,
            run_dir=self.run_dir,
            reason=schedule.reason,
            best=checkpoints.best_checkpoint_path(),
            privacy={**({} if privacy is None else privacy.state_dict()), **epsilon},
        )
        session.run_callbacks(lambda callback: callback.on_end(session, result))
        return result


Recover = Callable[[CommunicationError], Sequence[Sink]]
"""Function that lets a session continue after the loss of ranks; it returns the sinks of this rank, or raises
the error again."""


@contextmanager
def fitting(
    session: Session, run_dir: Path | None, sinks: Sequence[Sink], *, closes_sinks: bool = True
) -> Iterator[FitInProgress]:
    """Return a context manager around a fit whose rounds the caller makes; see `fit`."""
    with ExitStack() as stack:
        for sink in sinks if closes_sinks else ():
            # Closed after the checkpoint schedule below, which sends its last events while it
            # closes.
            stack.callback(sink.close)
        checkpoints = stack.enter_context(open_checkpoint_schedule(session, run_dir, sinks))
        fit_in_progress = FitInProgress(session, run_dir, sinks, checkpoints)
        stack.callback(session.net.activity.close)
        stack.callback(fit_in_progress.close)
        yield fit_in_progress


def find_pause_step(session: Session, until: str) -> int:
    """Return the step of the last evaluation of a run at or before a rung of a search.

    Args:
        until: "steps:N", or "epochs:E" for E passes over the data.
    Raises:
        RecipeError: the run has no evaluation until then.
    """
    unit, _, number = until.partition(":")
    limit = float(number) if unit == "steps" else math.ceil(float(number) * session.work.steps_per_epoch)
    every = session.recipe.evaluate.every_steps
    step = int(limit // every) * every if every else 0
    if step < 1:
        first = f"after step {every}" if every else "at the end of the run"
        raise RecipeError(
            f"the first evaluation is {first}, later than the first rung, {until} (step {limit:g})",
            where="evaluate.every_steps",
            next_step=f"set evaluate.every_steps to {max(1, int(limit))} or less, or a later [stop] first",
        )
    return step


def fit(
    session: Session,
    run_dir: Path | None = None,
    sinks: Sequence[Sink] = (),
    until: str | None = None,
    recover: Recover | None = None,
) -> Result:
    """Train to the end of the run, or pause before it.

    Args:
        session: training continues from its state's step.
        run_dir: the folder of the run; None: nothing is saved.
        sinks: receive every step and event; only rank 0 has any.
        until: the rung of a search at which the run pauses, see `find_pause_step`: it saves and stops, and a
            resumed run has the same bits as one that did not pause. None: train to the end.
        recover: called when a collective fails; the fit then continues where it was, on the remaining ranks.
            None: the error is raised.
    Returns:
        The result. A stop signal on any rank ends all ranks after the same step, which is saved.
    """
    pause_step = None if until is None else find_pause_step(session, until)
    if recover is None:
        with fitting(session, run_dir, sinks) as fit_in_progress:
            return _run(fit_in_progress, pause_step)
    with ExitStack() as opened:
        opened.callback(lambda: _close(sinks))
        while True:
            try:
                with fitting(session, run_dir, sinks, closes_sinks=False) as fit_in_progress:
                    return _run(fit_in_progress, pause_step)
            except CommunicationError as error:
                sinks = recover(error)


def _close(sinks: Sequence[Sink]) -> None:
    for sink in sinks:
        sink.close()


def _run(fit_in_progress: FitInProgress, pause_step: int | None) -> Result:
    requests = JoinRequests(fit_in_progress.session)
    leaving = LeaveRequest(fit_in_progress.session, fit_in_progress.run_dir)
    fit_in_progress.schedule.pause_step = pause_step
    for stats in fit_in_progress.schedule.rounds():
        fit_in_progress.after_round(stats)
        if not fit_in_progress.schedule.is_over():
            leaving.check()
            requests.check()
    return fit_in_progress.finish()


def _open_trace(session: Session, run_dir: Path | None, schedule: RunSchedule) -> TraceWindow | None:
    """Show the current operation of this rank in the run folder, and return its window of traced steps.

    Raises:
        RecipeError: the run ends before the first step of `log.trace`.
    """
    if run_dir is None:
        return None
    cluster, activity, trace = session.cluster, session.net.activity, session.recipe.log.trace
    if trace is not None:
        require_steps_of_run("log.trace", trace, session.num_steps)
    write_run_folder(cluster.error_dir, run_dir)
    try:
        activity.open(run_dir, cluster.global_rank, cluster.world_size, session.num_steps, cluster.stack_file)
    except OSError as error:
        schedule.send_event("warning", {"text": f"the current operation cannot be shown: {error}"})

    def stage_rows() -> Sequence[TimelineRow]:
        measured = session.runner.schedule
        return () if measured is None else measured.measured

    return TraceWindow(
        run_dir,
        cluster.global_rank,
        cluster.world_size,
        activity=activity,
        recipe_steps=None if trace is None else parse_step_range(trace),
        stage_rows=stage_rows,
        send_event=schedule.send_event,
    )


def _log_communication(session: Session, schedule: RunSchedule) -> None:
    """Send what was communicated, which fraction of its time was hidden, and the hits of the sample cache."""
    rows = {
        f"{op} {group}": {**asdict(entry), "hidden_fraction": entry.hidden_fraction}
        for (op, group), entry in session.net.ledger.rows.items()
    }
    loader = session.loader
    schedule.send_event("communication", {"rows": rows})
    if session.copies is not None:
        schedule.send_event("redundancy", session.copies.cost())
    schedule.send_event("cache", {"hits": loader.cache_hits, "lookups": loader.cache_lookups})
