"""`paceline plan memory`: predict the memory of a job before it starts."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import common_options
from paceline.cli.console import print_error, print_json, print_plain
from paceline.errors import format_count

if TYPE_CHECKING:
    from paceline.plan.memory_budget import BudgetVerdict
    from paceline.recipe.tables import ServeRecipe


def memory(
    recipe: common_options.RecipeArgument,
    processes: common_options.Processes = None,
    strategy: common_options.StrategyOption = None,
    settings: common_options.Settings = None,
    nodes: common_options.Nodes = 1,
    layers: Annotated[
        bool, typer.Option("--layers", help="Also print a row for each layer of each rank.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every phase of every rank as JSON, in bytes.")
    ] = False,
    serves: Annotated[
        bool, typer.Option("--serve", help="Plan `paceline serve` with the recipe's model instead.")
    ] = False,
    slots: Annotated[
        int | None, typer.Option(min=1, help="With --serve: texts at a time. Default: serve.slots.")
    ] = None,
    chunk: Annotated[
        int | None, typer.Option(min=1, help="With --serve: tokens of a prompt at a time; serve.chunk.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=2, help="With --serve: longest text. Default: that of the model.")
    ] = None,
) -> None:
    """Predict how much memory each rank of a job needs, by kind, and whether it fits.

    The task is built and one micro-batch runs on tensors without storage; no process is started. The bytes
    are those of tensors at the peak of each rank; Python, PyTorch and kernels need some more. With
    memory.budget the plan says which activations are recomputed to stay below it. If nothing fits, the exit
    code is the one with which training would refuse to start.
    """
    from paceline.plan.memory_budget import check_budget
    from paceline.session.start_rank import build_task

    resolved = common_options.read_recipe(recipe, settings, strategy)
    if serves:
        task = build_task(resolved, None, common_options.task_directory(recipe))
        options = {"slots": slots, "chunk": chunk, "context": context}
        given = {name: value for name, value in options.items() if value is not None}
        _show_slots(task.model, resolved.serve.replace(**given), as_json=as_json)
        return
    world_size = common_options.processes_for(resolved, processes, nodes) * nodes
    task = build_task(resolved, None, common_options.task_directory(recipe))
    verdict = check_budget(resolved, task, world_size, nodes=nodes)
    if as_json:
        print_json({**verdict.plan.record(), "fits": verdict.refusal is None})
    else:
        _show(verdict, layers=layers)
    if verdict.refusal is not None:
        print_error(verdict.refusal)
        sys.exit(verdict.refusal.exit_code)


def _show_slots(model: Any, recipe: ServeRecipe, *, as_json: bool) -> None:
    """Print the memory of a served model."""
    from paceline.serving.kv_cache import SlotSettings
    from paceline.serving.load_model import model_limits, plan_slots

    settings = SlotSettings.from_recipe(recipe, model_limits(model)[0])
    plan = plan_slots(model, settings)
    if as_json:
        print_json({**asdict(settings), **asdict(plan), "total": plan.total})
        return
    for line in plan.lines(settings):
        print_plain(line)


def _show(verdict: BudgetVerdict, *, layers: bool) -> None:
    """Print the table of ranks, their imbalance if it is large, and what is recomputed."""
    from paceline.plan.memory_plan import describe_imbalance, render_layer_table, render_rank_table

    plan = verdict.plan
    recomputed = "" if verdict.choice is None else str(verdict.choice)
    processes = format_count(plan.processes, "process")
    title = f'"{plan.recipe.strategy}" on {processes}, bytes of each rank at its peak:'
    rows = render_layer_table(plan) if layers else ()
    for line in filter(None, (title, *render_rank_table(plan), describe_imbalance(plan), recomputed, *rows)):
        print_plain(line)
