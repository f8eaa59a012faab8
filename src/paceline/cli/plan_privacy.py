"""`paceline plan privacy`: the noise that a run needs for an epsilon."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli import common_options
from paceline.cli.console import print_json, print_plain
from paceline.errors import RecipeError, format_count


def privacy(
    recipe: common_options.RecipeArgument,
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", min=0.0, help="Largest epsilon. Default: private.budget.")
    ] = None,
    settings: common_options.Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the noise with which a run stays within an epsilon, and the epsilon of its own noise.

    Of federated rounds it protects clients, drawn as federated.cohort says, otherwise samples in Poisson
    batches of batch.size on average. The length of the run and private.delta are those of the recipe.
    """
    from paceline.privacy.accountant import check_delta, compute_epsilon, find_noise, name_accountant
    from paceline.session.private_training import plan_run
    from paceline.session.start_rank import build_task

    resolved = common_options.read_recipe(recipe, settings, None)
    private = resolved.private
    target = private.budget if epsilon is None else epsilon
    if not target:
        raise RecipeError(
            "no epsilon is given, and private.budget is not set",
            where="--epsilon",
            next_step="add --epsilon 8, or set private.budget",
        )
    plan = plan_run(resolved, lambda: build_task(resolved, None, common_options.task_directory(recipe)))
    noise = find_noise(plan.release, plan.num_rounds, private.delta, target)
    needed = plan.release._replace(noise=noise)
    record = {
        "epsilon": target,
        "delta": private.delta,
        "unit": plan.unit,
        "units": plan.num_units,
        "relation": f"{needed.relation} {plan.unit}",
        "sampling": needed.describe_sampling(),
        "rounds": plan.num_rounds,
        "noise": noise,
        "epsilon_of_noise": compute_epsilon({needed: plan.num_rounds}, private.delta),
        "accountant": name_accountant({needed: plan.num_rounds}),
        "recipe_noise": private.noise,
        "epsilon_of_recipe": (
            compute_epsilon({plan.release: plan.num_rounds}, private.delta) if private.is_on else None
        ),
    }
    if as_json:
        print_json(record)
        return
    print_plain(
        f"private.noise = {noise:g} gives epsilon {record['epsilon_of_noise']:.4g} at delta {private.delta:g}"
        f" after {format_count(plan.num_rounds, 'round')}"
    )
    print_plain(
        f"each {plan.unit} is protected; sampling of {plan.num_units}: {record['sampling']};"
        f" neighbours: {record['relation']}"
    )
    if private.is_on:
        print_plain(f"the recipe's noise, {private.noise:g}, gives epsilon {record['epsilon_of_recipe']:.4g}")
    print_plain(f"accountant: {record['accountant']}")
    for text in filter(None, [check_delta(private.delta, plan.num_units)]):
        print_plain(text)
