"""`stages=time` with `memory.budget`: the fastest cut of a pipeline whose stages all fit into the budget.

The fastest cut is planned. If a stage does not fit, cuts with the same stage are excluded, and the fastest of
the remaining cuts is next. Invariant: the returned cut was planned as it will run, and fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from paceline.errors import StrategyError, TaskError, format_count
from paceline.parallel.pipeline.stage_partition import partition_evenly
from paceline.plan.memory_plan import MemoryPlan, describe_peak
from paceline.plan.memory_planner import plan_memory
from paceline.recipe.recipe import Recipe
from paceline.report.number_format import format_bytes
from paceline.task import Task

_EXACT_CHAIN_LENGTH = 12
"""Longest chain in which a part that does not fit excludes no other part that contains it."""


class BudgetedCut(NamedTuple):
    """A cut of a chain and the memory of its stages.

    Args:
        places: modules of each chunk of the model.
        stage_bytes: planned peak of each stage.
    """

    places: Sequence[range]
    stage_bytes: Sequence[int]


class _PartLimit(NamedTuple):
    """A condition on one part of the chain.

    Args:
        part: number of the part.
        place: range of modules.
        holds: the part must be this range (in a longer chain: contain it); otherwise it must not.
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
    """Return the cut with the lightest heaviest part among those whose stages all fit; empty: none fits.

    Cuts are tried in order, the best first. If a stage does not fit, its parts must not occur together: the
    remaining cuts are those without the first part, those with the first and without the second, and so on,
    and the best of each set joins the order.

    Args:
        weights, sizes: as in `partition_evenly`.
        fits: returns for a cut which of its stages fit; depends only on the parts of a stage.
        chunks: parts of each stage; stage s of p has the parts s, s + p and so on.
    Exactness: up to 12 modules as good as trying every cut
        (tests/unit/parallel/pipeline/test_stage_partition.py). In a longer chain, parts that contain a part
        which does not fit are also excluded.
    Source: Murty 1968, An Algorithm for Ranking all the Assignments in Order of Increasing Cost (branching).
    """
    search = _CutSearch(weights, sizes, num_stages, chunks)
    search.wait([])
    while search.waiting:
        _, _, places, limits = heappop(search.waiting)
        stage_parts = [places[stage::num_stages] for stage in range(num_stages)]
        misfit = search.known(stage_parts)
        if misfit is None:
            too_large = [(stage, stage_parts[stage]) for stage, fit in enumerate(fits(places)) if not fit]
            if not too_large:
                return places
            search.too_large += too_large
            misfit = too_large[0]
        search.split(limits, *misfit)
    return []


class _CutSearch:
    """A queue of cuts that can still be chosen, the best first; arguments as in `best_fitting_cut`."""

    def __init__(self, weights: Sequence[int], sizes: Sequence[int], num_stages: int, chunks: int) -> None:
        self._weights, self._sizes, self._num_stages, self._chunks = weights, sizes, num_stages, chunks
        self._covers = range.__eq__ if len(weights) <= _EXACT_CHAIN_LENGTH else _contains
        self._numbers = count()
        self.waiting: list[tuple[tuple[int, int], int, list[range], list[_PartLimit]]] = []
        self.too_large: list[tuple[int, Sequence[range]]] = []

    def wait(self, limits: list[_PartLimit]) -> None:
        """Add the best cut within these limits to the queue, if there is one."""

        def allowed(part: int, place: range) -> bool:
            return all(
                self._covers(place, limit.place) == limit.holds for limit in limits if limit.part == part
            )

        places = partition_evenly(self._weights, self._num_stages * self._chunks, self._sizes, allowed)
        if places:
            # The number breaks ties, since ranges cannot be compared.
            heappush(self.waiting, (_cut_cost(self._weights, places), next(self._numbers), places, limits))

    def known(self, stage_parts: Sequence[Sequence[range]]) -> tuple[int, Sequence[range]] | None:
        """Return a stage of a cut that is known not to fit, with the parts that are too large."""
        matches = (
            (stage, spans)
            for stage, spans in self.too_large
            if all(self._covers(span, other) for span, other in zip(stage_parts[stage], spans, strict=True))
        )
        return next(matches, None)

    def split(self, limits: list[_PartLimit], stage: int, parts: Sequence[range]) -> None:
        """Add the cuts within these limits whose stage does not have all of these parts."""
        # Murty's branching: the k-th set keeps the first k parts and excludes the next, so no cut occurs
        # twice.
        wanted = [_PartLimit(stage + k * self._num_stages, place, True) for k, place in enumerate(parts)]
        for number, limit in enumerate(wanted):
            self.wait([*limits, *wanted[:number], limit._replace(holds=False)])


def _cut_cost(weights: Sequence[int], spans: Sequence[range]) -> tuple[int, int]:
    """Return the key by which cuts are ordered: the heaviest part, then the sum of squares."""
    sums = [sum(weights[i] for i in span) for span in spans]
    return max(sums), sum(total**2 for total in sums)


def _contains(span: range, other: range) -> bool:
    return span.start <= other.start and other.stop <= span.stop


def cut_within_budget(
    recipe: Recipe, task: Task, processes: int, weights: Sequence[int], sizes: Sequence[int], chunks: int = 1
) -> BudgetedCut:
    """Return the fastest cut that fits into the budget; if none does, the fastest with full recomputation.

    Args:
        recipe: its strategy has its replicas filled in.
        weights: times of the modules.
        sizes: numbers of their parameters.
        chunks: chunks of each stage.
    Raises:
        StrategyError: no cut fits; names the one that needs least.
        TaskError: as in `plan_memory`.
    """
    plans: list[MemoryPlan] = []
    for variant in _recompute_variants(recipe):
        budget = _StageBudget(variant, task, processes, plans)
        places = best_fitting_cut(weights, sizes, recipe.strategy.pipeline, budget.fits, chunks)
        if places:
            return BudgetedCut(places, budget.peaks(places))
    least, budget_bytes = min(plans, key=lambda plan: plan.peak), recipe.memory.budget or 0
    raise StrategyError(
        f"no cut of {format_count(len(weights), 'module')} into {_describe_stages(recipe, chunks)} keeps"
        f" memory.budget = {format_bytes(budget_bytes)}; stages={least.recipe.strategy.stages} needs"
        f" least of all that were tried: {describe_peak(least)}",
        where=f'strategy "{recipe.strategy}" on {format_count(processes, "process")}',
        next_step="take more stages, shards of the state (shard=2 zero=1), or smaller micro-batches"
        " (batch.shards)",
    )


def _describe_stages(recipe: Recipe, chunks: int) -> str:
    stages = f"{recipe.strategy.pipeline} stages"
    return stages if chunks == 1 else f"{stages} of {chunks} chunks"


def _recompute_variants(recipe: Recipe) -> Iterator[Recipe]:
    """Yield the recipe; if it leaves recomputation open, without any and then with that of all blocks."""
    memory = recipe.memory
    for how in ("none", "blocks") if memory.chooses else (memory.recompute,):
        yield recipe.replace(memory=memory.replace(recompute=how))


class _StageBudget:
    """The check of cuts against the budget, by a plan of each.

    Args:
        recipe: with the recomputation of the run.
        plans: list to which every plan is appended.
    """

    def __init__(self, recipe: Recipe, task: Task, processes: int, plans: list[MemoryPlan]) -> None:
        self._recipe, self._task, self._processes, self._tried = recipe, task, processes, plans

    def peaks(self, spans: Sequence[range]) -> list[int]:
        """Return the peak of each stage in the steps, without the building of the model."""
        stages = ",".join(str(len(span)) for span in spans)
        recipe = self._recipe.replace(strategy=self._recipe.strategy.replace(stages=stages))
        plan = plan_memory(recipe, self._task, self._processes)
        self._tried.append(plan)
        peak_by_stage = [0] * recipe.strategy.pipeline
        for rank in plan.ranks:
            steps = (parts.total for when, parts in rank.moments.items() if not when.startswith("building"))
            peak_by_stage[rank.stage] = max(peak_by_stage[rank.stage], *steps)
        return peak_by_stage

    def fits(self, places: Sequence[range]) -> list[bool]:
        """Return which stages fit."""
        try:
            return [size <= (self._recipe.memory.budget or 0) for size in self.peaks(places)]
        except TaskError:
            if self._recipe.memory.recompute != "blocks":
                raise
            # A model without blocks cannot be recomputed, so nothing fits.
            return [False] * self._recipe.strategy.pipeline
