"""The check of a job against `memory.budget`, and the nearest layout that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch

from paceline.errors import StrategyError, TaskError, format_count
from paceline.plan.memory_plan import MemoryPlan, describe_peak
from paceline.plan.memory_planner import plan_memory
from paceline.plan.recompute_choice import RecomputeChoice, choose_recompute
from paceline.recipe.recipe import Recipe, max_sharers
from paceline.recipe.strategy import Strategy
from paceline.recipe.support import cost_change, list_layouts, support
from paceline.report.number_format import format_bytes
from paceline.task import Task

_MOST_PLANS = 24
_PIPELINE_WORDS: Mapping[str, Callable[[Strategy, Strategy], bool]] = {
    "schedule": lambda now, other: other.pipeline > 1,
    "stages": lambda now, other: other.pipeline == now.pipeline,
}
"""Words of a pipeline, and whether another layout can keep them."""


@dataclass(frozen=True)
class BudgetVerdict:
    """The plan of a job, and whether it can start.

    Args:
        plan: plan with the chosen recomputation.
        choice: chosen recomputation; None: the recipe names it, or there is no budget.
        refusal: error with the nearest layout that fits; None: the job fits, or has no budget.
    """

    plan: MemoryPlan
    choice: RecomputeChoice | None
    refusal: StrategyError | None


def check_budget(
    recipe: Recipe, task: Task, processes: int, *, nodes: int = 1, device: torch.device | None = None
) -> BudgetVerdict:
    """Plan a job, choose its recomputation, and compare the peak with its budget.

    Args:
        recipe, task, processes, nodes: as in `plan_memory`.
        device: device on which blocks are measured; None: the CPU.
    Raises:
        StrategyError, TaskError: as in `plan_memory`.
    """
    if not recipe.memory.chooses:
        plan = plan_memory(recipe, task, processes, nodes=nodes)
        return BudgetVerdict(plan, None, _refusal(plan, task, nodes))
    choice = choose_recompute(recipe, task, processes, nodes=nodes, device=device)
    return BudgetVerdict(choice.plan, choice, _refusal(choice.plan, task, nodes))


def _refusal(plan: MemoryPlan, task: Task, nodes: int) -> StrategyError | None:
    budget = plan.recipe.memory.budget
    if budget is None or plan.peak <= budget:
        return None
    advice = _next_step(nearest_that_fits(plan, task, nodes), budget)
    if plan.largest.when.startswith("evaluation"):
        advice = f"lower evaluate.batch, which is {plan.recipe.evaluate.batch}; or {advice}"
    return StrategyError(
        f"{describe_peak(plan)}, and memory.budget is {format_bytes(budget)}",
        where=f'strategy "{plan.recipe.strategy}" on {format_count(plan.processes, "process")}',
        next_step=advice,
    )


def _next_step(plan: MemoryPlan, budget: int) -> str:
    words = f'"{plan.recipe.strategy}"'
    if plan.recipe.memory.recomputes:
        words += f' with memory.recompute = "{plan.recipe.memory.recompute}"'
    needs = format_bytes(plan.peak)
    if plan.peak <= budget:
        return f"the nearest that fits is {words}, which needs {needs}"
    return (
        f"no layout of {format_count(plan.processes, 'process')} fits; {words} needs least, {needs}: take"
        " more processes, or smaller micro-batches (batch.shards)"
    )


def nearest_that_fits(plan: MemoryPlan, task: Task, nodes: int = 1) -> MemoryPlan:
    """Return the plan of the nearest layout that fits; if none does, of the one that needs least."""
    budget, least = plan.recipe.memory.budget or 0, plan
    for recipe in _candidates(plan):
        # A layout that this model does not allow is no candidate.
        with suppress(StrategyError, TaskError):
            candidate = plan_memory(recipe, task, plan.processes, nodes=nodes)
            least = min(least, candidate, key=lambda memory_plan: memory_plan.peak)
            if candidate.peak <= budget:
                return candidate
    return least


def _candidates(plan: MemoryPlan) -> Iterator[Recipe]:
    """Yield recipes with the same result, the nearest first, each without and with recomputation."""
    recipe, now = plan.recipe, plan.recipe.strategy
    most, limit_key = max_sharers(recipe)
    answers = [
        support(_with_layout(now, row.strategy), processes=plan.processes, shards=most, limit_key=limit_key)
        for row in list_layouts(plan.processes)
    ]
    strategies = [answer.nearest for answer in answers if answer.ok]
    near = sorted(strategies, key=lambda strategy: cost_change(now, strategy))
    # Three plans for each layout, each of which runs the model on fake tensors.
    for strategy in near[: _MOST_PLANS // 3]:
        for recompute in ("none", "blocks", "segments"):
            yield recipe.replace(strategy=strategy, memory=recipe.memory.replace(recompute=recompute))


def _with_layout(now: Strategy, other: Strategy) -> Strategy:
    """Return the strategy with the layout of another."""
    fields = ("replicas", "shard", "zero", "tensor", "context", "pipeline")
    gone = [name for name, holds in _PIPELINE_WORDS.items() if not holds(now, other)]
    back = {name: Strategy.model_fields[name].default for name in gone}
    return now.replace(**back, **{name: getattr(other, name) for name in fields})
