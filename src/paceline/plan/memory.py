"""The memory of every rank of a job, by kind, before it is started.

What stays from step to step is a closed form (`forms`), what the optimizer keeps comes from updates of small
tensors (`updates`), the activations from one micro-batch on tensors without memory (`rehearsal`). The peak is
the largest of the moments of a run (`moments`), not a sum of largest parts: gradients grow while activations
go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.cluster import Cluster
from paceline.data import settled
from paceline.errors import StrategyError
from paceline.plan.parts import MemoryPlan
from paceline.plan.planner import Planner
from paceline.plan.ranks import CPU
from paceline.plan.switching import under, while_switching
from paceline.recipe import Recipe, most_sharers, resolve
from paceline.recipe.phases import phases_of
from paceline.recipe.specs import SyncSpec
from paceline.task import Task
from paceline.training.stage_choice import cut_here


def plan_memory(recipe: Recipe, task: Task, processes: int, *, nodes: int = 1) -> MemoryPlan:
    """The bytes of every rank.

    Args:
        recipe: as the user wrote it.
        task: its model may be built without memory; it is not changed.
        processes: in the job.
        nodes: on which they run.
    Raises:
        StrategyError: the strategy does not fit the processes, or keeps what no form is known for.
        TaskError: the model cannot be cut so, or cannot run on shapes alone.
    Exactness: no less than the tensors that are allocated in a step, and at most 10 % more;
        tests/dist/test_memory_plan.py.
    """
    task = settled(task, recipe)
    recipe = laid_out(recipe, task, processes)
    return plan_of(recipe, planners_of(recipe, task, processes, nodes))


def laid_out(recipe: Recipe, task: Task, processes: int) -> Recipe:
    """A recipe whose strategy has its replicas and stages filled in.

    Raises:
        StrategyError: it does not fit the processes, or keeps what no form is known for.
    """
    most, called = most_sharers(recipe)
    strategy = resolve(recipe.strategy, processes=processes, shards=most, called=called)
    recipe = recipe.replace(strategy=strategy)
    _require_known(recipe)
    return _cut_here(recipe, task, processes) if strategy.stages == "time" else recipe


def planners_of(recipe: Recipe, task: Task, processes: int, nodes: int) -> list[Planner]:
    """One for each number format and each codec that the run may have, under each of its rules.

    Args:
        recipe: see `laid_out`.
        task: as a run settles it.
    """
    strategy = recipe.strategy
    ways = [one for phase in phases_of(strategy.sync) for one in strategy.under(phase.rule).alternatives]
    recipes = [recipe.under(one) for one in ways]
    return [Planner(one, task, processes, nodes, compute) for one in recipes for compute in _formats(one)]


def plan_of(recipe: Recipe, planners: Sequence[Planner]) -> MemoryPlan:
    """The plan of what needs most in any format, by any codec, under any rule.

    Args:
        recipe: with all its rules.
        planners: of it.
    """
    plans = [one.ranks() for one in planners]
    switches = len(recipe.strategy.rules) > 1
    if switches:
        formats = len(_formats(recipe)) * len(recipe.strategy.alternatives)
        told = [[under(rank, one) for rank in ranks] for ranks, one in zip(plans, planners, strict=True)]
        pairs = [*zip(planners, plans, strict=True)]
        plans = told + [
            while_switching(*one, *then) for one, then in zip(pairs, pairs[formats:], strict=False)
        ]
    ranks = []
    for number in range(max(map(len, plans))):  # beyond the first replica ranks are like those before
        alike = [of[number % len(of)] for of in plans]
        ranks.append(replace(max(alike, key=lambda one: one.peak.total), rank=number))
    return MemoryPlan(recipe, planners[0].processes, ranks)


def _formats(recipe: Recipe) -> list[str]:
    """Number formats that the run may have; what the machine will choose is not known before it is asked."""
    asked = recipe.precision.compute
    if asked != "auto":
        return [asked]
    return ["fp32"] if recipe.reproducible else ["fp32", "bf16"]


def _cut_here(recipe: Recipe, task: Task, processes: int) -> Recipe:
    """With stages that are even in what links take in this process."""
    stages = cut_here(recipe, task, Cluster.single(), processes, CPU).stages
    return recipe.replace(strategy=recipe.strategy.replace(stages=stages))


def _needs_server(rule: SyncSpec) -> bool:
    """Workers go on with the moments that they had, which nobody updates."""
    return rule.needs_server > 0


def _require_known(recipe: Recipe) -> None:
    strategy, rules = recipe.strategy, recipe.strategy.rules
    switches = len(rules) > 1
    loses = any(one.is_coded and not one.form.exact for one in strategy.alternatives)
    unknown = {
        f"sync={strategy.sync}": not all(rule.memory for rule in rules),
        f"sync={strategy.sync}, at last with a server,": switches and any(map(_needs_server, rules)),
        f"codec={strategy.codec} where a rule follows another": switches and loses,
        f"cut={strategy.cut}": bool(strategy.cut),
    }
    words = [word for word, holds in unknown.items() if holds]
    if words:
        raise StrategyError(
            f"what {' and '.join(words)} keeps in memory has no closed form yet",
            where=f'strategy "{strategy}"',
            next_step="plan the same layout without it, or leave memory.budget out",
        )
