"""`paceline plan`: what a job will need, before it is started."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.cli.console import fail, output

if TYPE_CHECKING:
    from paceline.plan import MemoryPlan


def memory(
    recipe: options.RecipeArgument,
    processes: options.Processes = None,
    strategy: options.StrategyOption = None,
    settings: options.Settings = None,
    nodes: options.Nodes = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every moment of every rank, in bytes, as JSON.")
    ] = False,
) -> None:
    """Say what each rank of a job will need in memory, by kind, and whether it fits.

    The task is built, one micro-batch runs on tensors without memory, and no process is started. Bytes are
    those of tensors at the moment of a rank's peak: what Python, PyTorch and kernels take for themselves
    comes on top. With memory.budget the exit code is that of a refused start where it does not fit.
    """
    from paceline.plan import plan_memory, refusal
    from paceline.training.joining import obtain_task

    resolved = options.read_recipe(recipe, settings, strategy)
    world = options.processes_for(resolved, processes, nodes) * nodes
    task = obtain_task(resolved, None, options.task_directory(recipe))
    plan = plan_memory(resolved, task, world, nodes=nodes)
    refused = refusal(resolved, task, world, nodes)
    if as_json:
        output().print_json(json.dumps({**plan.record(), "fits": refused is None}))
    else:
        _show(plan)
    if refused is not None:
        fail(refused)
        sys.exit(refused.exit_code)


def _show(plan: MemoryPlan) -> None:
    """A table, and whether ranks are far apart."""
    from paceline.plan.words import imbalance, table_lines

    many = "es" if plan.processes > 1 else ""
    title = f'"{plan.recipe.strategy}" on {plan.processes} process{many}, bytes of each rank at its peak:'
    for line in filter(None, (title, *table_lines(plan), imbalance(plan))):
        output().print(line, markup=False, highlight=False, soft_wrap=True)
