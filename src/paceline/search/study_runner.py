"""The study: propose a batch, run its trials on the worker slots, stop some at rungs, and observe the
results.

Invariants: batch b + 1 is proposed from the results of batches up to b, in the order of trial numbers, so the
study does not depend on the number of workers (except with `asha`). What has happened is in the log; a study
that is started again goes on from there, and runs no run again that has ended.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from paceline.errors import RecipeError, format_count
from paceline.recipe.recipe import Recipe, to_toml
from paceline.search.samplers import DistinctProposals, Observation, build_sampler
from paceline.search.space import Params, StudyPlan, label
from paceline.search.stopping import continues_in_asha, surviving_trials
from paceline.search.study_log import Event, Lease, LeaseEnd, StudyLog, Trial, finite
from paceline.search.worker_slots import RunEnd, SlotPool

_POLL_SECONDS = 0.2
_MAX_KILLS = 2
_STATUS_OF_END = {"failed": "failed", "killed": "failed", "diverged": "diverged", "refused": "refused"}


class StudyStopped(Exception):
    """The user has stopped the study; the same command continues it."""


@dataclass(frozen=True)
class TrialRun:
    """One run of a trial.

    Args:
        name: of its folder inside that of the study.
        folder: its path; with `--reuse` perhaps in another study.
        recipe: resolved, without `run_dir`.
        processes: of its job.
    """

    name: str
    folder: Path
    recipe: Recipe
    processes: int


class RunExecutor(Protocol):
    """What runs the runs of a study: jobs in worker slots, or a function of the user."""

    def execute(self, run: TrialRun, lease: Lease) -> RunEnd:
        """Run until the rung of the lease, or to the end if it has none, and wait for that."""

    def is_complete(self, run: TrialRun) -> bool:
        """Return whether the run has been trained to its end."""

    def rung_value(self, run: TrialRun) -> tuple[int, float]:
        """Return the step and the metric of the last evaluation."""

    def value(self, run: TrialRun) -> float | None:
        """Return the objective of a complete run; None if its target was not reached."""

    def test(self, run: TrialRun) -> Mapping[str, float]:
        """Return the scores of a run on the test set; empty if there is none."""

    def stop(self) -> None:
        """Let runs save and end."""


@dataclass(frozen=True)
class ResolvedTrial:
    """The recipe of a trial.

    Args:
        recipe: resolved, without `run_dir`.
        processes: of its job.
        steps: length of the run; 0: not known.
    """

    recipe: Recipe
    processes: int
    steps: int = 0

    @cached_property
    def identity(self) -> str:
        """Hash of the recipe: trials with equal recipes are one run."""
        return identity_of(self.recipe)


Resolve = Callable[[Params, int], ResolvedTrial]
"""Returns the recipe of a trial's values; the integer is added to the seed.

Raises a RecipeError if the combination is refused."""


def identity_of(recipe: Recipe) -> str:
    """Return a hash of a resolved recipe without its folder: equal recipes are one run."""
    return hashlib.sha256(to_toml(recipe.replace(run_dir=None)).encode()).hexdigest()[:16]


class StudyRunner:
    """A study that runs.

    Args:
        plan: the checked study file.
        log: of the study.
        executor: of the runs.
        resolve: makes recipes.
        workers: runs at the same time, at most `study.proposals`.
        report: receives a line for the user.
        reusable: folders of complete runs of other studies, by identity.
        slots: of the runs; None: as many as workers. Others can join and leave.
    Raises:
        RecipeError: there are more workers than proposals, or the rule contradicts the recipe.
    """

    def __init__(
        self,
        plan: StudyPlan,
        log: StudyLog,
        executor: RunExecutor,
        resolve: Resolve,
        workers: int,
        report: Callable[[str], None] = lambda line: None,
        reusable: Mapping[str, Path] | None = None,
        *,
        slots: SlotPool | None = None,
    ) -> None:
        require_workers(plan, workers)
        self._plan, self._log, self._executor, self._resolve = plan, log, executor, resolve
        self._workers = 1 if plan.alone else workers
        self._report, self._reusable = report, reusable or {}
        self._seen: dict[str, int] = {}
        self._known_runs: dict[tuple[int, int], TrialRun] = {}
        self._lock = threading.Lock()
        self._slots = SlotPool(range(self._workers)) if slots is None else slots
        self._sampler = DistinctProposals(plan.space, build_sampler(plan), plan.study.seed)

    def run(self, trials: int) -> None:
        """Run until the study has this many trials, then confirm and test; continues what the log has.

        Raises:
            StudyStopped: the user has stopped it.
            RecipeError: the sampler proposes something else than the log has, or the test set was opened.
        """
        self._refuse_more_after_test(trials)
        # the pool waits for its runs when the block ends, so an error has to stop them first
        with ThreadPoolExecutor(self._workers) as pool, ExitStack() as on_error:
            on_error.callback(self._executor.stop)
            on_error.callback(self._slots.close)
            self._pool = pool
            self._run_batches(trials)
            self._confirm()
            on_error.pop_all()
            self._test()

    def _refuse_more_after_test(self, trials: int) -> None:
        if self._log.tested is not None and trials > len(self._log.trials) and not self._is_exhausted():
            raise RecipeError(
                f"the test set of this study has been opened after"
                f" {format_count(len(self._log.trials), 'trial')}:"
                " more trials would be chosen with its score in mind",
                where="--trials",
                next_step="start a new study with another --out; --reuse FOLDER takes the runs of this one",
            )

    def _is_exhausted(self) -> bool:
        size = self._plan.space.size
        return size is not None and len(self._log.trials) >= size

    def _run_batches(self, trials: int) -> None:
        logged = list(self._log.batches())
        number = batch_number = 0
        while number < trials or batch_number < len(logged):
            before = logged[batch_number] if batch_number < len(logged) else None
            count = len(before) if before else min(self._plan.study.proposals, trials - number)
            proposals = self._sampler.propose(number, count)
            if before is not None:
                self._compare_with_log(before, proposals)
            elif not proposals:
                size = self._plan.space.size or 0
                self._report(
                    f"all {format_count(size, 'combination')} of the space have run: {number} of {trials}"
                    " trials"
                )
                return
            else:
                self._log_proposals(number, batch_number, proposals)
            batch = [trial for trial in self._log.trials if trial.batch == batch_number]
            self._run_batch(batch)
            self._sampler.observe([observe_trial(self._plan, trial) for trial in batch])
            number, batch_number = number + len(batch), batch_number + 1

    def _compare_with_log(self, before: Sequence[Trial], proposals: Sequence[Params]) -> None:
        """Refuse to continue if the sampler proposes something else than it did before."""
        for trial, params in zip(before, [*proposals, *[{}] * len(before)], strict=False):
            if label(trial.params) != label(params):
                raise RecipeError(
                    f"trial {trial.number} was proposed as {label(trial.params)}, and is now {label(params)}",
                    where=str(self._log.folder),
                    next_step="continue with the version of Optuna, or the function, that began the study",
                )

    def _log_proposals(self, first: int, batch: int, proposals: Sequence[Params]) -> None:
        """Log a batch, in one write: a crash leaves all of it or, if it tears the write, the first ones."""
        events: list[Event] = []
        for number, params in enumerate(proposals, first):
            event: Event = {"event": "proposed", "trial": number, "batch": batch, "params": params}
            try:
                resolved = self._resolve(params, 0)
            except RecipeError:
                events.append({**event, "identity": ""})
                continue
            samples = resolved.steps * resolved.recipe.batch.size
            length = {"steps": resolved.steps, "samples": samples} if resolved.steps else {}
            events.append({**event, "identity": resolved.identity, **length})
        self._log.append(*events)

    def _end_without_run(self, trial: Trial) -> None:
        """Log the end of a combination that is refused, or whose recipe an earlier trial has run."""
        event: Event = {"event": "ended", "trial": trial.number, "value": None}
        if not trial.identity:
            try:
                self._resolve(trial.params, 0)
            except RecipeError as error:
                event |= {"status": "refused", "reason": error.what}
        elif self._seen.setdefault(trial.identity, trial.number) != trial.number:
            event |= {"status": "duplicate", "reason": f"equal to trial {self._seen[trial.identity]}"}
        if "status" in event:
            self._log.append(event)
            self._report(f"trial {trial.number}  {label(trial.params)}  {event['status']}  {event['reason']}")

    # ------------------------------------------------------------------ one batch

    def _run_batch(self, batch: Sequence[Trial]) -> None:
        for trial in batch:
            if not trial.has_ended:
                self._end_without_run(trial)
            elif trial.identity:
                self._seen.setdefault(trial.identity, trial.number)
        alive = [trial for trial in batch if not trial.has_ended]
        if self._plan.stop.rule == "asha":
            self._run_all([partial(self._run_asha, trial) for trial in alive])
            return
        rung = 0
        while alive:
            until = self._plan.rung(rung)
            # a trial whose rung is in the log has been measured there by an earlier call
            waiting = [trial for trial in alive if len(trial.rungs) <= rung]
            ends = self._run_phase({trial.number: self._runs(trial) for trial in waiting}, until)
            for trial in waiting:
                self._log_phase(trial, ends[trial.number])
            alive = [trial for trial in alive if not trial.has_ended]
            alive = self._stop_some(batch, alive, rung)
            rung += 1

    def _run_phase(
        self, runs: Mapping[int, Sequence[TrialRun]], until: str | None
    ) -> dict[int, list[RunEnd]]:
        """Run several runs of several trials until a rung; returns their ends by trial."""
        ends = self._run_all(
            [partial(self._run, run, until) for of_trial in runs.values() for run in of_trial]
        )
        position = iter(ends)
        return {number: [next(position) for _ in of_trial] for number, of_trial in runs.items()}

    def _run_all(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Make calls in threads, the first ones first; returns their results in this order."""
        futures: list[Future[Any]] = [self._pool.submit(call) for call in calls]
        pending = set(futures)
        with ExitStack() as on_error:
            on_error.callback(lambda: [future.cancel() for future in futures])
            while pending:
                # in short waits, so that Ctrl-C is noticed
                done, pending = wait(pending, _POLL_SECONDS, FIRST_COMPLETED)
                for future in done:
                    future.result()
            on_error.pop_all()
        return [future.result() for future in futures]

    def _runs(self, trial: Trial) -> list[TrialRun]:
        return [self._run_of(trial, seed, "trial") for seed in range(self._plan.study.seeds)]

    def _run_of(self, trial: Trial, seed: int, kind: str) -> TrialRun:
        """Return a run of a trial with the seed `recipe.seed + seed`."""
        run = self._known_runs.get((trial.number, seed))
        if run is None:
            resolved = self._resolve(trial.params, seed)
            name = f"{kind}-{trial.number:04d}" + (f"-seed-{resolved.recipe.seed}" if seed else "")
            folder = self._reusable.get(resolved.identity, self._log.folder / name)
            run = TrialRun(name, folder, resolved.recipe, resolved.processes)
            self._known_runs[trial.number, seed] = run
        return run

    def _run(self, run: TrialRun, until: str | None) -> RunEnd:
        """Run until a rung, unless that has been done; a run that is killed is resumed once."""
        with self._lock:
            earlier = self._log.leases.of(run.name)
        for lease in earlier:
            if lease.end in ("failed", "diverged", "refused"):
                return lease.end, lease.reason
            if lease.end == "done" or (lease.end == "paused" and lease.until == until):
                return lease.end, ""
        num_kills = sum(lease.end == "killed" for lease in earlier)
        if self._executor.is_complete(run):
            return "done", ""
        while num_kills < _MAX_KILLS:
            end, reason = self._lease(run, until)
            if end == "stopped":
                raise StudyStopped
            if end == "lost":  # its worker left before a process of the run was killed
                continue
            if end != "killed":
                return end, reason
            num_kills += 1
            self._report(
                f"{run.name} was killed ({reason}); {'resuming it' if num_kills < _MAX_KILLS else 'again'}"
            )
        return "killed", f"killed {num_kills} times; it was resumed once"

    def _lease(self, run: TrialRun, until: str | None) -> RunEnd:
        slot = self._slots.take()
        if slot is None:
            raise StudyStopped
        with self._lock:
            lease = self._log.leases.begin(run.name, until, slot)
        end: LeaseEnd = "lost"
        reason = ""
        try:
            end, reason = self._executor.execute(run, lease)
        finally:
            with self._lock, suppress(OSError):
                self._log.leases.finish(lease.number, end, reason)
            self._slots.give_back(slot)
        return end, reason

    # ------------------------------------------------------------------ results

    def _log_phase(self, trial: Trial, ends: Sequence[RunEnd]) -> None:
        """Log the state of a trial after all its runs have reached a rung or their end."""
        bad = [(end, reason) for end, reason in ends if end in _STATUS_OF_END]
        runs = self._runs(trial)
        if bad:
            event: Event = {"status": _STATUS_OF_END[bad[0][0]], "value": None, "reason": bad[0][1]}
        elif any(end == "paused" for end, _ in ends):
            points = [self._executor.rung_value(run) for run in runs]
            mean = fmean(value for _, value in points)
            self._log.append(
                {
                    "event": "measured",
                    "trial": trial.number,
                    "rung": len(trial.rungs),
                    "step": max(step for step, _ in points),
                    "value": finite(mean),
                }
            )
            return
        else:
            event = self._result([self._executor.value(run) for run in runs])
        event = {"event": "ended", "trial": trial.number, **event}
        if any(run.folder.parent != self._log.folder for run in runs):
            event["reused"] = [run.folder.name for run in runs]
        self._log.append(event)
        shown = (
            event["reason"] if event["value"] is None else f"{self._plan.objective.text} {event['value']:.6g}"
        )
        self._report(f"trial {trial.number}  {label(trial.params)}  {event['status']}  {shown}".rstrip())

    def _result(self, values: Sequence[float | None]) -> Event:
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return {"status": "complete", "value": None, "reason": "the target was not reached"}
        if not all(map(math.isfinite, known)):
            return {"status": "diverged", "value": None, "reason": "the objective is not finite"}
        return {"status": "complete", "value": fmean(known), "reason": ""}

    def _stop_some(self, batch: Sequence[Trial], alive: list[Trial], rung: int) -> list[Trial]:
        """Log the trials that stop at a rung; returns the others."""
        score = self._plan.objective.rung_score
        scores = {trial.number: score(trial.rungs[rung]) for trial in batch if len(trial.rungs) > rung}
        earlier = [
            score(trial.rungs[rung])
            for trial in self._log.trials
            if trial.batch < batch[0].batch and len(trial.rungs) > rung
        ]
        survivors = surviving_trials(self._plan.stop, scores, earlier)
        for trial in alive:
            if trial.number not in survivors:
                self._log_stop(trial)
        return [trial for trial in alive if trial.number in survivors]

    def _log_stop(self, trial: Trial) -> None:
        step, value = trial.step, trial.rungs[-1]
        self._log.append({"event": "stopped", "trial": trial.number, "step": step, "value": finite(value)})
        self._report(f"trial {trial.number}  {label(trial.params)}  stopped after step {step}, {value:.6g}")

    def _run_asha(self, trial: Trial) -> None:
        """Run a trial from rung to rung until it stops or ends."""
        while not trial.has_ended:
            rung = len(trial.rungs)
            ends = [self._run(run, self._plan.rung(rung)) for run in self._runs(trial)]
            with self._lock:
                self._log_phase(trial, ends)
                score = self._plan.objective.rung_score
                arrived = [score(other.rungs[rung]) for other in self._log.trials if len(other.rungs) > rung]
                if len(trial.rungs) == rung:  # it has ended
                    return
                if not continues_in_asha(self._plan.stop.keep, score(trial.rungs[rung]), arrived):
                    self._log_stop(trial)

    # ------------------------------------------------------------------ after the search

    def ranked(self) -> list[Trial]:
        """Return the complete trials, the best first."""
        return rank_trials(self._plan, self._log.trials)

    def _confirm(self) -> None:
        """Repeat the best trials with seeds that the search has not used."""
        confirm = self._plan.study.confirm
        if confirm is None:
            return
        first = self._plan.study.seeds
        waiting = [trial for trial in self.ranked()[: confirm.top] if trial.number not in self._log.confirmed]
        runs = {
            trial.number: [self._run_of(trial, first + i, "confirm") for i in range(confirm.seeds)]
            for trial in waiting
        }
        ends = self._run_phase(runs, None)
        for number, of_trial in runs.items():
            values = [
                finite(self._executor.value(run)) if end == "done" else None
                for run, (end, _) in zip(of_trial, ends[number], strict=True)
            ]
            seeds = [run.recipe.seed for run in of_trial]
            self._log.append({"event": "confirmed", "trial": number, "seeds": seeds, "values": values})
            shown = " ".join("-" if value is None else f"{value:.6g}" for value in values)
            self._report(f"trial {number}  with seeds {seeds[0]} to {seeds[-1]}: {shown}")

    def _test(self) -> None:
        """Open the test set, once, for the winner."""
        winner = find_winner(self._plan, self._log)
        if winner is None or self._log.tested is not None:
            return
        scores = self._executor.test(self._runs(winner)[0])
        if not scores:  # the task has no test set
            return
        self._log.append(
            {"event": "tested", "trial": winner.number, "scores": {k: finite(v) for k, v in scores.items()}}
        )


def observe_trial(plan: StudyPlan, trial: Trial) -> Observation:
    """Return the result of a trial for a sampler; that of a stopped one is the score at its step."""
    is_stopped = trial.status == "stopped"
    score = plan.objective.rung_score(trial.rungs[-1]) if is_stopped else plan.objective.score(trial.value)
    return Observation(trial.number, trial.params, trial.status, score, trial.step)


def require_workers(plan: StudyPlan, workers: int) -> None:
    """Refuse more workers than there are trials in a batch.

    Raises:
        RecipeError: there are more.
    """
    if workers > plan.study.proposals:
        raise RecipeError(
            f"{format_count(workers, 'worker')} for {format_count(plan.study.proposals, 'proposal')}: a"
            " batch has"
            " no work for the others",
            where="--workers",
            next_step=f"pass --workers {plan.study.proposals}, or set proposals = {workers} in [study]",
        )


def rank_trials(plan: StudyPlan, trials: Sequence[Trial]) -> list[Trial]:
    """Return the complete trials, the best first; of equal ones the earliest."""
    complete = [trial for trial in trials if trial.status == "complete"]
    return sorted(complete, key=lambda trial: (plan.objective.score(trial.value), trial.number))


def confirmed_score(plan: StudyPlan, values: Sequence[float | None]) -> float:
    """Return the mean score over new seeds; infinity if one of them has none."""
    return fmean(map(plan.objective.score, values))


class StudyResults(Protocol):
    """Trials, and their values with new seeds."""

    @property
    def trials(self) -> Sequence[Trial]: ...
    @property
    def confirmed(self) -> Mapping[int, Sequence[float | None]]: ...


def find_winner(plan: StudyPlan, results: StudyResults) -> Trial | None:
    """Return the trial with the best confirmed mean, else the best one; None without any."""
    ranked = [trial for trial in rank_trials(plan, results.trials) if trial.value is not None]
    confirmed = [trial for trial in ranked if trial.number in results.confirmed]
    if confirmed:
        return min(confirmed, key=lambda trial: confirmed_score(plan, results.confirmed[trial.number]))
    return ranked[0] if ranked else None


def replayed_proposals(plan: StudyPlan, trials: Sequence[Trial]) -> list[Params]:
    """Return what the sampler proposes again, given the results in the log, batch by batch."""
    sampler = DistinctProposals(plan.space, build_sampler(plan), plan.study.seed)
    proposals: list[Params] = []
    batch_number = 0
    while batch := [trial for trial in trials if trial.batch == batch_number]:
        proposals += sampler.propose(len(proposals), len(batch))
        sampler.observe([observe_trial(plan, trial) for trial in batch])
        batch_number += 1
    return proposals
