"""`stages=time` with `memory.budget`: the fastest cut of a pipeline whose every stage keeps the budget.

The fastest cut is planned; a stage that needs too much must not be that part of the chain, and the fastest of
the cuts that are left is next. Invariant: what is returned was planned as it will run, and keeps the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from paceline.errors import StrategyError, TaskError
from paceline.layout.pipeline import cut_evenly
from paceline.plan.memory import plan_memory
from paceline.plan.parts import MemoryPlan
from paceline.plan.words import spell_peak
from paceline.recipe import Recipe
from paceline.report.facts import spell_bytes
from paceline.task import Task

_FEW = 12
"""Modules of a chain up to which nothing is concluded from one part of it to another."""


class CappedCut(NamedTuple):
    """A cut, and what it needs.

    Args:
        places: modules of each stage.
        stage_bytes: planned peak of each.
    """

    places: Sequence[range]
    stage_bytes: Sequence[int]


def cut_within(
    weights: Sequence[int],
    sizes: Sequence[int],
    num_parts: int,
    fits: Callable[[Sequence[range]], Sequence[bool]],
) -> list[range]:
    """The cut whose heaviest part is lightest among those whose every part fits; nothing if there is none.

    Args:
        weights, sizes, num_parts: see `cut_evenly`.
        fits: of a cut, which of its parts do; it depends on a part's number and place alone.
    Exactness: up to 12 modules that of trying every cut, tests/unit/layout/test_stages.py. Of a longer chain
        parts are left out that contain one which does not fit as the same stage.
    """
    too_large: set[tuple[int, range]] = set()

    def allowed(part: int, place: range) -> bool:
        if len(weights) <= _FEW:
            return (part, place) not in too_large
        return not any(part == k and _contains(place, other) for k, other in too_large)

    while places := cut_evenly(weights, num_parts, sizes, allowed):
        answers = list(enumerate(zip(places, fits(places), strict=True)))
        wrong = {(part, place) for part, (place, fit) in answers if not fit}
        if not wrong:
            break
        too_large |= wrong
    return places


def _contains(place: range, other: range) -> bool:
    return place.start <= other.start and other.stop <= place.stop


def cut_within_budget(
    recipe: Recipe, task: Task, processes: int, weights: Sequence[int], sizes: Sequence[int]
) -> CappedCut:
    """The fastest cut that keeps the budget as it is; if none does, with every block computed again.

    Args:
        recipe: its strategy has its replicas filled in, and one chunk of the model on each stage.
        weights: times of the links.
        sizes: numbers of their parameters.
    Raises:
        StrategyError: no cut keeps it; says which needs least.
        TaskError: see `plan_memory`.
    """
    tried: list[MemoryPlan] = []
    for way in _ways(recipe):
        budget = _Budget(way, task, processes, tried)
        places = cut_within(weights, sizes, recipe.strategy.pipeline, budget.fits)
        if places:
            return CappedCut(places, budget.peaks(places))
    least, budget_bytes = min(tried, key=lambda plan: plan.peak), recipe.memory.budget or 0
    raise StrategyError(
        f"no cut of {len(weights)} modules into {recipe.strategy.pipeline} stages keeps memory.budget ="
        f" {spell_bytes(budget_bytes)}; of those that were tried stages={least.recipe.strategy.stages} needs"
        f" least: {spell_peak(least)}",
        where=f'strategy "{recipe.strategy}" on {processes} processes',
        next_step="take more stages, shards of the state (shard=2 zero=1), or smaller micro-batches"
        " (batch.shards)",
    )


def _ways(recipe: Recipe) -> Iterator[Recipe]:
    """As the recipe says; where that is left open, without recomputation and then with all of it."""
    memory = recipe.memory
    for how in ("none", "blocks") if memory.chooses else (memory.recompute,):
        yield recipe.replace(memory=memory.replace(recompute=how))


class _Budget:
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
        found = [0] * len(places)
        for rank in plan.ranks:
            steps = (parts.total for when, parts in rank.moments.items() if when != "building")
            found[rank.stage] = max(found[rank.stage], *steps)
        return found

    def fits(self, places: Sequence[range]) -> list[bool]:
        """By stage."""
        try:
            return [size <= (self._recipe.memory.budget or 0) for size in self.peaks(places)]
        except TaskError:
            if self._recipe.memory.recompute != "blocks":
                raise
            return [False] * len(places)  # the model has no blocks
