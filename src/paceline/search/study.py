"""A study as a value, and the call that runs one from a checked plan and a way to make recipes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import DataError, RecipeError
from paceline.job.cluster import process_environment
from paceline.job.cpu_count import num_cores
from paceline.recipe.recipe import Recipe
from paceline.recipe.toml_text import parse_toml
from paceline.search.job_executor import FunctionExecutor, JobExecutor, find_complete_runs
from paceline.search.remote_workers import ExecutorRequest, ExecutorWorkers, LeaseServer, WorkerEntrance
from paceline.search.space import Params, StudyPlan, label, override_texts, plan_study
from paceline.search.study_log import Event, Lease, StudyLog, Trial
from paceline.search.study_runner import (
    ResolvedTrial,
    StudyRunner,
    find_winner,
    identity_of,
    rank_trials,
    replayed_proposals,
    require_workers,
)
from paceline.search.trial_rank import save_task
from paceline.search.worker_slots import SlotPool

_EVALUATE_EVERY = 20
"""Steps between evaluations at the recipe's own batch size, for a target, if the recipe sets no interval."""

LoadRecipe = Callable[[Sequence[str], str | None], Recipe]
"""Returns the base recipe with overrides and a strategy; raises a RecipeError."""


@dataclass(frozen=True)
class Study:
    """The results of a study.

    Args:
        folder: of the study; that of trial 3 is `trial-0003` in it.
        plan: the checked study file.
        trials: by number.
        confirmed: values with new seeds, by trial.
        tested: trial and scores of the one use of the test set; None: it was not opened.
        leases: what ran when.
        events: the lines of the log.
    """

    folder: Path
    plan: StudyPlan
    trials: Sequence[Trial]
    confirmed: Mapping[int, Sequence[float | None]]
    tested: Event | None
    leases: Sequence[Lease]
    events: Sequence[Event]

    @classmethod
    def of(cls, plan: StudyPlan, log: StudyLog) -> Study:
        """Return the study that a log describes."""
        return cls(log.folder, plan, log.trials, log.confirmed, log.tested, log.leases.leases, log.events)

    @property
    def best(self) -> Trial | None:
        """The trial with the best confirmed mean, else the best one; None without any."""
        return find_winner(self.plan, self)

    @property
    def ranked(self) -> list[Trial]:
        """The complete trials, the best first."""
        return rank_trials(self.plan, self.trials)

    def replay(self) -> list[Params]:
        """Return what the sampler proposes again from the results in the log; equal to the trials' params."""
        return replayed_proposals(self.plan, self.trials)


def open_study(folder: Path) -> Study:
    """Read the study of a folder.

    Raises:
        DataError: there is none, or another process works on it.
    """
    if not (folder / "study.jsonl").is_file():
        raise DataError(
            f"'{folder}' holds no study", next_step="name the folder that `paceline tune` printed"
        )
    with closing(StudyLog(folder)) as log:
        return Study.of(plan_study(log.events[0]["study"]), log)


@dataclass(frozen=True)
class StudyRequest:
    """What to run.

    Args:
        plan: the checked study file.
        load: makes recipes.
        count_processes: returns the number of processes of a recipe's job; raises a RecipeError.
        folder: of the study.
        trials: number of trials; None: the size of the grid.
        workers: runs at the same time on this machine; 0 with `entrance`: none.
        entrance: where workers of other machines join; None: there are none.
        executor: starts workers that join at `entrance`; None: the user starts them.
        reuse: folder of a study, or of several, whose complete runs are taken.
        function: of the user, in place of jobs; None: jobs.
        task: function that builds the task, in place of the one that the recipe names.
        report: receives a line for the user.
        environ: variables of the jobs; None: those of this process.
    """

    plan: StudyPlan
    load: LoadRecipe
    count_processes: Callable[[Recipe], int]
    folder: Path
    trials: int | None
    workers: int = 1
    entrance: WorkerEntrance | None = None
    executor: ExecutorRequest | None = None
    reuse: Path | None = None
    function: Callable[[Recipe], float] | None = None
    task: Callable[..., Any] | None = None
    report: Callable[[str], None] = lambda line: None
    environ: Mapping[str, str] | None = None


def run_study(request: StudyRequest) -> Study:
    """Run a study, or continue it where it stopped.

    Raises:
        RecipeError: the plan does not go with the recipe, or the folder holds another study.
        StudyStopped: the user has stopped it.
    """
    plan = request.plan
    base = request.load([], None)
    _check_base(plan, base, request)
    trials = _num_trials(request)
    with closing(StudyLog(request.folder)) as log:
        header = base.replace(run_dir=None).model_dump(mode="json")
        log.begin(plan.values, header)
        if log.torn:
            request.report("the last line of the log was torn by a crash, and is left out")
        if request.task is not None:
            save_task(request.folder, request.task)
        reusable = {} if request.reuse is None else find_complete_runs(request.reuse, _identity_of_text)
        if request.function is not None:
            executor = FunctionExecutor(request.function)
            resolve = _Resolver(request, base, None)
            StudyRunner(plan, log, executor, resolve, request.workers, request.report).run(trials)
            return Study.of(plan, log)
        with _open_jobs(request) as (jobs, pool):
            first = base.replace(evaluate=base.evaluate.replace(validation=plan.study.validation))
            task = jobs.look(first, request.count_processes(base))
            plan.objective.require_metric(task["metrics"])
            resolve = _Resolver(request, base, task["samples"])
            resolve.require_early_evaluation(base)
            # with workers of other machines, as many runs at a time as a batch has
            workers = request.workers if request.entrance is None else plan.study.proposals
            StudyRunner(plan, log, jobs, resolve, workers, request.report, reusable, slots=pool).run(trials)
            return Study.of(plan, log)


@contextmanager
def _open_jobs(request: StudyRequest) -> Iterator[tuple[JobExecutor, SlotPool]]:
    """Start the slots of this machine, and listen for workers of others."""
    plan, workers = request.plan, request.workers
    if plan.alone:
        workers = min(1, workers)
    sharing = 1 if plan.alone else plan.study.proposals
    if request.executor is not None:
        sharing = num_cores()  # one thread in a process, for which a node gets one core
    pool = SlotPool(range(workers))
    with ExitStack() as stack:
        jobs = stack.enter_context(
            JobExecutor.open(
                request.folder, plan.objective, workers, sharing, request.environ or process_environment()
            )
        )
        started = None
        if request.executor is not None:
            started = ExecutorWorkers(request.executor, pool, request.report)
            stack.callback(started.close)  # after the server, which sends the workers home
            started.reserve()
        if request.entrance is not None:
            server = LeaseServer(request.entrance, request.folder, jobs.slots, pool, request.report)
            stack.callback(server.close)
            if started is None:
                request.report(f"workers: paceline tune work {server.address} --token-file KEY")
            else:
                started.start(server.address, request.entrance.token)
        yield jobs, pool


def _check_base(plan: StudyPlan, base: Recipe, request: StudyRequest) -> None:
    """Refuse what no trial could run."""
    nodes = None if request.executor is None else request.executor.nodes
    require_workers(plan, request.workers if nodes is None else nodes.nodes * nodes.processes)
    if plan.stop.rule == "asha" and base.reproducible:
        raise RecipeError(
            'rule = "asha" decides by which trial arrived first, and the recipe is reproducible',
            where="stop.rule",
            next_step='use rule = "halving", or leave reproducible out of the recipe',
        )
    if request.function is not None and plan.stop.rule != "none":
        raise RecipeError(
            "a function has no rungs at which it could be stopped",
            where="stop.rule",
            next_step="leave [stop] out",
        )
    if base.checkpoint.folder is not None:
        raise RecipeError(
            "checkpoint.folder would be that of every trial",
            where="checkpoint.folder",
            next_step="leave it out: each trial has checkpoints in its own folder",
        )


def _num_trials(request: StudyRequest) -> int:
    size = request.plan.space.size
    if request.trials is not None:
        if size is not None and request.trials > size:
            request.report(f"the space has {size} combinations for {request.trials} trials: each runs once")
        return request.trials
    if request.plan.study.search == "grid" and size is not None:
        return size
    raise RecipeError(
        "the number of trials is missing",
        where="--trials",
        next_step="pass --trials N; only a grid has a size",
    )


def _identity_of_text(text: str) -> str:
    return identity_of(Recipe.read(parse_toml(text), lambda paths: "resolved.toml"))


class _Resolver:
    """Makes the recipes of trials.

    Args:
        base: the recipe of the study.
        samples: number of training samples without the validation part; None for a function.
    """

    def __init__(self, request: StudyRequest, base: Recipe, samples: int | None) -> None:
        self._request, self._base, self._samples = request, base, samples
        self._resolved: dict[tuple[str, int], ResolvedTrial] = {}

    def __call__(self, params: Mapping[str, Any], seed: int) -> ResolvedTrial:
        """Return the recipe of a trial's values; a RecipeError if the combination is refused."""
        name = (label(params), seed)
        if name not in self._resolved:  # reading the files again takes milliseconds
            self._resolved[name] = self._resolve(params, seed)
        return self._resolved[name]

    def _resolve(self, params: Mapping[str, Any], seed: int) -> ResolvedTrial:
        strategy = params.get("strategy")
        recipe = self._request.load([*override_texts(params), f"seed={self._base.seed + seed}"], strategy)
        processes = self._request.count_processes(recipe)
        if self._samples is None:
            without_folder = recipe if recipe.run_dir is None else recipe.replace(run_dir=None)
            return ResolvedTrial(without_folder, processes)
        share, every = self._request.plan.study.validation, self._interval(recipe)
        evaluate = recipe.evaluate.replace(validation=share, every_steps=every)
        return ResolvedTrial(
            recipe.replace(run_dir=None, evaluate=evaluate), processes, self._num_steps(recipe, recipe.epochs)
        )

    def require_early_evaluation(self, recipe: Recipe) -> None:
        """Refuse a recipe whose first evaluation is later than the first rung.

        Raises:
            RecipeError: it is.
        """
        first, every = self._request.plan.stop.first, recipe.evaluate.every_steps
        if first is None or not every:
            return
        rung = self._rung_steps(recipe, first)
        if every > rung:
            raise RecipeError(
                f"the first evaluation is after step {every}, later than the first rung, {first} (step"
                f" {rung})",
                where="evaluate.every_steps",
                next_step=f"set evaluate.every_steps to {rung} or less, or a later rung: [stop] first",
            )

    def _interval(self, recipe: Recipe) -> int:
        """Return the interval of evaluations: the recipe's, or one that a rung or a target needs."""
        plan = self._request.plan
        if recipe.evaluate.every_steps:
            return recipe.evaluate.every_steps
        if plan.stop.first is not None:
            return self._rung_steps(recipe, plan.stop.first)
        if plan.objective.target is not None:
            return max(1, _EVALUATE_EVERY * self._base.batch.size // recipe.batch.size)
        return 0

    def _rung_steps(self, recipe: Recipe, rung: str) -> int:
        unit, _, amount = rung.partition(":")
        if unit == "steps":
            return max(1, int(float(amount)))
        return self._steps_of_epochs(recipe, float(amount))

    def _num_steps(self, recipe: Recipe, epochs: float | None) -> int:
        return recipe.steps or self._steps_of_epochs(recipe, epochs or 0)

    def _steps_of_epochs(self, recipe: Recipe, epochs: float) -> int:
        samples, size = self._samples or 0, recipe.batch.size
        steps = samples // size if recipe.batch.drop_last else math.ceil(samples / size)
        return max(1, math.ceil(epochs * steps))
