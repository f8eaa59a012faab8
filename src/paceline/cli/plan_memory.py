"""`paceline plan`: what a job will need, before it is started."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import common_options
from paceline.cli.console import output, print_error

if TYPE_CHECKING:
    from paceline.plan.memory_budget import BudgetVerdict


def memory(
    recipe: common_options.RecipeArgument,
    processes: common_options.Processes = None,
    strategy: common_options.StrategyOption = None,
    settings: common_options.Settings = None,
    nodes: common_options.Nodes = 1,
    layers: Annotated[
        bool, typer.Option("--layers", help="Print a row for each layer of each rank, too.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every moment of every rank, in bytes, as JSON.")
    ] = False,
) -> None:
    """Say what each rank of a job will need in memory, by kind, and whether it fits.

    The task is built, one micro-batch runs on tensors without memory, and no process is started. Bytes are
    those of tensors at the moment of a rank's peak: what Python, PyTorch and kernels take for themselves
    comes on top. With memory.budget it says what is computed again to keep it; the exit code is that of a
    refused start where nothing does.
    """
    from paceline.plan.memory_budget import check_budget
    from paceline.session.joining import build_task

    resolved = common_options.read_recipe(recipe, settings, strategy)
    world = common_options.processes_for(resolved, processes, nodes) * nodes
    task = build_task(resolved, None, common_options.task_directory(recipe))
    found = check_budget(resolved, task, world, nodes=nodes)
    if as_json:
        output().print_json(json.dumps({**found.plan.record(), "fits": found.refusal is None}))
    else:
        _show(found, layers=layers)
    _end(found)


def _end(found: BudgetVerdict) -> None:
    """With the exit code of a refused start, where it would be one."""
    if found.refusal is not None:
        print_error(found.refusal)
        sys.exit(found.refusal.exit_code)


def _show(found: BudgetVerdict, *, layers: bool) -> None:
    """A table, whether ranks are far apart, and what is computed again."""
    from paceline.plan.memory_plan import describe_imbalance, render_layer_table, render_rank_table

    plan = found.plan
    chosen = "" if found.choice is None else str(found.choice)
    many = "es" if plan.processes > 1 else ""
    title = f'"{plan.recipe.strategy}" on {plan.processes} process{many}, bytes of each rank at its peak:'
    rows = render_layer_table(plan) if layers else ()
    for line in filter(None, (title, *render_rank_table(plan), describe_imbalance(plan), chosen, *rows)):
        output().print(line, markup=False, highlight=False, soft_wrap=True)
