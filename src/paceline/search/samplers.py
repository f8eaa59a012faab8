"""Samplers of a study: grid, random, those of Optuna, and a function of the user.

A sampler proposes a batch, and observes the results of whole batches in the order of trial numbers.
Invariant: the proposals of a batch are a function of the space, the seed and the observations before it, so
a study that is resumed proposes again what its log has. Optuna's samplers are used through `ask` and `tell`
in memory.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

from paceline.errors import RecipeError
from paceline.search.optuna_storage import (
    build_distributions,
    import_optuna,
    read_trials,
    to_library_values,
)
from paceline.search.space import OPTUNA, Dimension, Params, Space, StudyPlan, label
from paceline.search.study_log import TrialStatus

_ATTEMPTS = 64
_DIGEST_BITS = 53  # those of a float


@dataclass(frozen=True)
class Observation:
    """The result of a trial, for a sampler.

    Args:
        number: of the trial.
        params: its values.
        status: "stopped" trials have the score at `step` and no final one.
        score: lower is better; infinite if there is none.
        step: at which it stopped.
    """

    number: int
    params: Params
    status: TrialStatus
    score: float
    step: int | None = None


class Sampler(Protocol):
    """A source of proposals."""

    def propose(self, first: int, count: int) -> list[Params]:
        """Return the values of trials `first` to `first + count - 1`; fewer if there are no more."""

    def replace(self, number: int, params: Params) -> None:
        """Note that a trial has other values than the proposed ones, which repeated an earlier trial."""

    def observe(self, results: Sequence[Observation]) -> None:
        """Receive the results of a whole batch, in the order of trial numbers."""


def build_sampler(plan: StudyPlan) -> Sampler:
    """Build the sampler that a study names.

    Raises:
        MissingExtraError: it needs Optuna, which is not installed.
        RecipeError: the user's function cannot be found.
    """
    search, space, seed = plan.study.search, plan.space, plan.study.seed
    if search == "grid":
        return GridSampler(space)
    if search == "random":
        return RandomSampler(space, seed)
    if search.startswith(OPTUNA):
        return OptunaSampler(space, "tpe", seed, read_trials(search.removeprefix(OPTUNA), plan))
    if ":" in search:
        return FunctionSampler(space, seed, _import_function(search))
    return OptunaSampler(space, search, seed)


class GridSampler:
    """All combinations in order, each once."""

    def __init__(self, space: Space) -> None:
        self._space = space

    def propose(self, first: int, count: int) -> list[Params]:
        """Return the combinations with these numbers."""
        end = min(first + count, self._space.size or 0)
        return [self._space.combination(number) for number in range(first, end)]

    def replace(self, number: int, params: Params) -> None:
        """Ignore it: a grid never repeats itself."""

    def observe(self, results: Sequence[Observation]) -> None:
        """Ignore them: a grid does not depend on results."""


def keyed_uniform(*parts: int | str) -> float:
    """Return a number in [0, 1) that is a function of its purpose."""
    digest = blake2b("\x1f".join(map(repr, parts)).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> (64 - _DIGEST_BITS)) / 2**_DIGEST_BITS


class RandomSampler:
    """Independent draws, keyed by (seed, trial, key)."""

    def __init__(self, space: Space, seed: int) -> None:
        self._space, self._seed = space, seed

    def propose(self, first: int, count: int) -> list[Params]:
        """Return the draws of these trials."""
        return [self._draw(number) for number in range(first, first + count)]

    def replace(self, number: int, params: Params) -> None:
        """Ignore it: draws do not depend on each other."""

    def observe(self, results: Sequence[Observation]) -> None:
        """Ignore them: draws do not depend on results."""

    def _draw(self, number: int) -> Params:
        return {
            dimension.key: dimension.value_of(keyed_uniform(self._seed, "proposal", number, dimension.key))
            for dimension in self._space.dimensions
        }


ProposalFunction = Callable[[Space, Sequence[Observation], int, int], Sequence[Params]]
"""`function(space, observations, count, seed)`: a pure function of its arguments."""


class FunctionSampler:
    """Proposals of the user's function, which gets all observations so far."""

    def __init__(self, space: Space, seed: int, function: ProposalFunction) -> None:
        self._space, self._seed, self._function = space, seed, function
        self._observations: list[Observation] = []

    def propose(self, first: int, count: int) -> list[Params]:
        """Call the function.

        Raises:
            RecipeError: it returned something else than `count` complete proposals.
        """
        proposals = [
            dict(params) for params in self._function(self._space, self._observations, count, self._seed)
        ]
        keys = [dimension.key for dimension in self._space.dimensions]
        if len(proposals) > count or any(set(params) != set(keys) for params in proposals):
            raise RecipeError(
                f"the function returned {len(proposals)} proposals, expected at most {count}, each with"
                f" {', '.join(keys)}",
                where="study.search",
            )
        return [{key: params[key] for key in keys} for params in proposals]

    def replace(self, number: int, params: Params) -> None:
        """Ignore it: the observation of the trial has the values that ran."""

    def observe(self, results: Sequence[Observation]) -> None:
        """Keep the results for the next call."""
        self._observations += results


def _import_function(path: str) -> ProposalFunction:
    from paceline.recipe.registry import import_object

    try:
        function: ProposalFunction = import_object(path)
    except (ImportError, AttributeError) as error:
        raise RecipeError(
            f'study.search = "{path}" cannot be imported: {error}',
            where="study.search",
            next_step="name a function as module:function that Python can import here",
        ) from error
    return function


class OptunaSampler:
    """One of Optuna's samplers, without a storage.

    `earlier` trials are Optuna's own, from a storage; they are learned from. Scores are minimized. A stopped
    trial is passed as pruned, with its score at its step, which a sampler ranks behind all complete ones of a
    later step. A failed one has the worst score seen. Refused trials and duplicates are passed as failed,
    which samplers ignore.
    """

    def __init__(self, space: Space, search: str, seed: int, earlier: Sequence[Any] = ()) -> None:
        optuna = import_optuna()
        self._optuna, self._space = optuna, space
        samplers = {"tpe": "TPESampler", "gp": "GPSampler", "cma-es": "CmaEsSampler"}
        arguments: dict[str, Any] = {"seed": seed, "warn_independent_sampling": False}
        if search == "tpe":
            arguments = {"seed": seed, "constant_liar": True}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of experimental options
            sampler = getattr(optuna.samplers, samplers[search])(**arguments)
        self._study = optuna.create_study(sampler=sampler, direction="minimize")
        self._study.add_trials(earlier)
        self._distributions = build_distributions(optuna, space.dimensions)
        self._trials: dict[int, Any] = {}
        self._worst = -math.inf

    def propose(self, first: int, count: int) -> list[Params]:
        """Ask for a batch."""
        return [self._ask(number) for number in range(first, first + count)]

    def replace(self, number: int, params: Params) -> None:
        """Let the trial have these values; the proposal that repeated another is dropped."""
        self._tell(self._trials[number], state=self._optuna.trial.TrialState.FAIL)
        self._study.enqueue_trial(to_library_values(self._space.dimensions, params))
        self._ask(number)

    def observe(self, results: Sequence[Observation]) -> None:
        """Tell the results, in order."""
        state = self._optuna.trial.TrialState
        for result in results:
            trial = self._trials.pop(result.number)
            if math.isfinite(result.score) and result.status == "complete":
                self._worst = max(self._worst, result.score)
                self._tell(trial, result.score)
            elif result.status == "stopped" and math.isfinite(result.score):
                trial.report(result.score, result.step or 0)
                self._tell(trial, state=state.PRUNED)
            elif result.status in ("refused", "duplicate") or not math.isfinite(self._worst):
                self._tell(trial, state=state.FAIL)
            else:
                self._tell(trial, self._worst)

    def _ask(self, number: int) -> Params:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._trials[number] = trial = self._study.ask(self._distributions)
        return {
            dimension.key: _from_optuna(dimension, trial.params[dimension.key])
            for dimension in self._space.dimensions
        }

    def _tell(self, trial: Any, value: float | None = None, state: Any = None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._study.tell(trial, value, state)


def _from_optuna(dimension: Dimension, value: Any) -> Any:
    if dimension.kind == "choice":
        return dimension.choices[value]
    return (
        dimension.value_at(round((value - dimension.low) / dimension.step))
        if dimension.step
        else dimension.bounded(value)
    )


class DistinctProposals:
    """The proposals of a sampler, without repetitions as long as a finite space has other combinations.

    Args:
        space: of the study.
        sampler: proposes.
        seed: orders the combinations that take the place of repetitions.
    """

    def __init__(self, space: Space, sampler: Sampler, seed: int) -> None:
        self._space, self._sampler, self._seed = space, sampler, seed
        self._labels: set[str] = set()

    def propose(self, first: int, count: int) -> list[Params]:
        """Return a batch; fewer than `count` if no combination is left."""
        batch = []
        for number, params in enumerate(self._sampler.propose(first, count), first):
            if label(params) in self._labels and self._space.size is not None:
                unused = self._unused(number)
                if unused is None:
                    break
                self._sampler.replace(number, unused)
                params = unused
            self._labels.add(label(params))
            batch.append(params)
        return batch

    def observe(self, results: Sequence[Observation]) -> None:
        """Pass the results of a batch on."""
        self._sampler.observe(results)

    def _unused(self, number: int) -> Params | None:
        """Return a combination that has not run; None if all have."""
        size = self._space.size or 0
        if len(self._labels) >= size:
            return None
        draws = [int(keyed_uniform(self._seed, "unused", number, i) * size) for i in range(_ATTEMPTS)]
        candidates = (self._space.combination(index) for index in (*draws, *range(size)))
        return next((params for params in candidates if label(params) not in self._labels), None)
