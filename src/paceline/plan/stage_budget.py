"""`stages=time` with `memory.budget`: the fastest cut of a pipeline whose every stage keeps the budget.

The fastest cut is planned; a stage that needs too much must not be these parts of the chain, and the fastest
of the cuts that are left is next. Invariant: what is returned was planned as it will run, and keeps the
budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from paceline.errors import StrategyError, TaskError
from paceline.parallel.pipeline.stage_partition import partition_evenly
from paceline.plan.memory_plan import MemoryPlan, describe_peak
from paceline.plan.memory_planner import plan_memory
from paceline.recipe.recipe import Recipe
from paceline.report.number_format import format_bytes
from paceline.task import Task

_EXACT_CHAIN_LENGTH = 12
"""Modules of a chain up to which nothing is concluded from one part of it to another."""


class BudgetedCut(NamedTuple):
    """A cut, and what it needs.

    Args:
        places: modules of each chunk of the model.
        stage_bytes: planned peak of each stage.
    """

    places: Sequence[range]
    stage_bytes: Sequence[int]


class _PartLimit(NamedTuple):
    """What a part of the chain has to be, or must not be.

    Args:
        part: its number.
        place: modules.
        holds: whether it has to be that (of a longer chain: contain it).
    """

    part: int
    place: range
    holds: bool


def best_fitting_cut(
    weights: Sequence[int],
    sizes: Sequence[int],
    num_stages: int,
    fits: Callable[[Sequence[range]], Sequence[bool]],
    chunks: int = 1,
) -> list[range]:
    """The cut whose heaviest part is lightest among those whose every stage fits; nothing if there is none.

    Cuts come in their order, the best first. Where a stage does not fit, it must not have these parts
    together: the cuts that are left are those without the first of them, those with the first and without
    the second, and so on; the best of each comes back in the order.

    Args:
        weights, sizes: see `partition_evenly`.
        fits: of a cut, which of its stages do; it depends on the parts of a stage alone.
        chunks: parts of each stage; stage s of p has parts s, s + p and so on.
    Exactness: up to 12 modules that of trying every cut, tests/unit/layout/test_stages.py. Of a longer chain
        parts are left out that contain those which do not fit as the same stage.
    Source: Murty 1968, An Algorithm for Ranking all the Assignments in Order of Increasing Cost (branching).
    """
    search = _CutSearch(weights, sizes, num_stages, chunks)
    search.wait([])
    while search.waiting:
        _, _, places, limits = heappop(search.waiting)
        own = [places[stage::num_stages] for stage in range(num_stages)]
        wrong = search.known(own)
        if wrong is None:
            found = [(stage, own[stage]) for stage, fit in enumerate(fits(places)) if not fit]
            if not found:
                return places
            search.too_large += found
            wrong = found[0]
        search.split(limits, *wrong)
    return []


class _CutSearch:
    """Cuts that may still be the one, the best first.

    Args: see `best_fitting_cut`.
    """

    def __init__(self, weights: Sequence[int], sizes: Sequence[int], num_stages: int, chunks: int) -> None:
        self._weights, self._sizes, self._num_stages, self._chunks = weights, sizes, num_stages, chunks
        self._covers = range.__eq__ if len(weights) <= _EXACT_CHAIN_LENGTH else _contains
        self._numbers = count()
        self.waiting: list[tuple[tuple[int, int], int, list[range], list[_PartLimit]]] = []
        self.too_large: list[tuple[int, Sequence[range]]] = []

    def wait(self, limits: list[_PartLimit]) -> None:
        """The best cut within these limits waits for its turn, if there is one."""

        def allowed(part: int, place: range) -> bool:
            return all(self._covers(place, one.place) == one.holds for one in limits if one.part == part)

        places = partition_evenly(self._weights, self._num_stages * self._chunks, self._sizes, allowed)
        if places:
            heappush(self.waiting, (_cut_cost(self._weights, places), next(self._numbers), places, limits))

    def known(self, own: Sequence[Sequence[range]]) -> tuple[int, Sequence[range]] | None:
        """A stage of a cut that is known not to fit, with the parts that are too large."""
        found = (
            (stage, parts)
            for stage, parts in self.too_large
            if all(self._covers(place, other) for place, other in zip(own[stage], parts, strict=True))
        )
        return next(found, None)

    def split(self, limits: list[_PartLimit], stage: int, parts: Sequence[range]) -> None:
        """The cuts within these limits whose stage has not all of these parts wait for their turn."""
        of = [_PartLimit(stage + k * self._num_stages, place, True) for k, place in enumerate(parts)]
        for number, one in enumerate(of):
            self.wait([*limits, *of[:number], one._replace(holds=False)])


def _cut_cost(weights: Sequence[int], places: Sequence[range]) -> tuple[int, int]:
    """By which cuts are ordered, see `partition_evenly`."""
    sums = [sum(weights[i] for i in place) for place in places]
    return max(sums), sum(one**2 for one in sums)


def _contains(place: range, other: range) -> bool:
    return place.start <= other.start and other.stop <= place.stop


def cut_within_budget(
    recipe: Recipe, task: Task, processes: int, weights: Sequence[int], sizes: Sequence[int], chunks: int = 1
) -> BudgetedCut:
    """The fastest cut that keeps the budget as it is; if none does, with every block computed again.

    Args:
        recipe: its strategy has its replicas filled in.
        weights: times of the links.
        sizes: numbers of their parameters.
        chunks: of the model, on each stage.
    Raises:
        StrategyError: no cut keeps it; says which needs least.
        TaskError: see `plan_memory`.
    """
    tried: list[MemoryPlan] = []
    for way in _recompute_variants(recipe):
        budget = _StageBudget(way, task, processes, tried)
        places = best_fitting_cut(weights, sizes, recipe.strategy.pipeline, budget.fits, chunks)
        if places:
            return BudgetedCut(places, budget.peaks(places))
    least, budget_bytes = min(tried, key=lambda plan: plan.peak), recipe.memory.budget or 0
    raise StrategyError(
        f"no cut of {len(weights)} modules into {_describe_stages(recipe, chunks)} keeps memory.budget ="
        f" {format_bytes(budget_bytes)}; of those that were tried stages={least.recipe.strategy.stages} needs"
        f" least: {describe_peak(least)}",
        where=f'strategy "{recipe.strategy}" on {processes} processes',
        next_step="take more stages, shards of the state (shard=2 zero=1), or smaller micro-batches"
        " (batch.shards)",
    )


def _describe_stages(recipe: Recipe, chunks: int) -> str:
    stages = f"{recipe.strategy.pipeline} stages"
    return stages if chunks == 1 else f"{stages} of {chunks} chunks"


def _recompute_variants(recipe: Recipe) -> Iterator[Recipe]:
    """As the recipe says; where that is left open, without recomputation and then with all of it."""
    memory = recipe.memory
    for how in ("none", "blocks") if memory.chooses else (memory.recompute,):
        yield recipe.replace(memory=memory.replace(recompute=how))


class _StageBudget:
    """Asks the plan of a cut which of its stages keep the budget.

    Args:
        recipe: with what is computed again.
        tried: is given every plan.
    """

    def __init__(self, recipe: Recipe, task: Task, processes: int, tried: list[MemoryPlan]) -> None:
        self._recipe, self._task, self._processes, self._tried = recipe, task, processes, tried

    def peaks(self, places: Sequence[range]) -> list[int]:
        """By stage, the most bytes of a rank in the steps; how the model is built is no matter of the cut."""
        stages = ",".join(str(len(place)) for place in places)
        recipe = self._recipe.replace(strategy=self._recipe.strategy.replace(stages=stages))
        plan = plan_memory(recipe, self._task, self._processes)
        self._tried.append(plan)
        found = [0] * recipe.strategy.pipeline
        for rank in plan.ranks:
            steps = (parts.total for when, parts in rank.moments.items() if not when.startswith("building"))
            found[rank.stage] = max(found[rank.stage], *steps)
        return found

    def fits(self, places: Sequence[range]) -> list[bool]:
        """By stage."""
        try:
            return [size <= (self._recipe.memory.budget or 0) for size in self.peaks(places)]
        except TaskError:
            if self._recipe.memory.recompute != "blocks":
                raise
            return [False] * self._recipe.strategy.pipeline  # the model has no blocks
