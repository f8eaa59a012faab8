"""`paceline recipe show` and `paceline strategies`."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table

from paceline.cli import options
from paceline.cli.console import output


def show(
    recipe: options.RecipeArgument, strategy: options.StrategyOption = None, settings: options.Settings = None
) -> None:
    """Print the resolved recipe: every key with its value."""
    from paceline.recipe import to_toml

    resolved = options.read_recipe(recipe, settings, strategy)
    output().print(to_toml(resolved), markup=False, highlight=False, soft_wrap=True, end="")


def strategies(
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Print every preset, what it stands for, and whether it is supported."""
    from paceline.recipe import table

    rows = table()
    if as_json:
        records = [
            {
                "name": r.name,
                "strategy": str(r.strategy),
                "supported": r.support.ok,
                "reason": r.support.reason,
            }
            for r in rows
        ]
        output().print_json(json.dumps(records))
        return
    shown = Table("preset", "strategy", "supported", "reason")
    for row in rows:
        shown.add_row(row.name, str(row.strategy), "yes" if row.support.ok else "no", row.support.reason)
    output().print(shown)
