"""`paceline recipe show`, `paceline recipe schema` and `paceline strategies`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import common_options
from paceline.cli.console import output, print_json, print_plain
from paceline.errors import format_count

if TYPE_CHECKING:
    from paceline.recipe.support import StrategyRow


_LINE_LENGTH = 100


def show(
    recipe: common_options.RecipeArgument,
    strategy: common_options.StrategyOption = None,
    settings: common_options.Settings = None,
) -> None:
    """Print the resolved recipe: every key with its value and its meaning."""
    from paceline.recipe.recipe_reference import describe_recipe

    resolved = common_options.read_recipe(recipe, settings, strategy)
    output().print(describe_recipe(resolved), markup=False, highlight=False, soft_wrap=True, end="")


def schema() -> None:
    """Print a JSON schema of recipes, with which editors check and complete them."""
    from paceline.recipe.recipe_reference import json_schema

    print_plain(json.dumps(json_schema(), indent=1))


def strategies(
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Also list what is not supported, with the reason.")
    ] = False,
    ranks: Annotated[
        int,
        typer.Option(
            "--ranks", min=0, help="List every layout of this many ranks, and why some are refused."
        ),
    ] = 0,
) -> None:
    """List the supported strategies and what each name stands for."""
    from paceline.recipe.support import list_layouts, list_strategies

    rows = list_layouts(ranks) if ranks else list_strategies()
    if as_json:
        print_json([_record(row) for row in rows])
    elif ranks:
        _print_layouts(rows, ranks)
    else:
        _print_table(rows, every=every)


def _print_table(rows: Sequence[StrategyRow], *, every: bool) -> None:
    """Print presets and words; with `every`, also those that are not supported, and why."""
    shown = rows if every else [row for row in rows if row.support.ok]
    alone = [row for row in shown if every or not _is_choice(row)]
    width = max(len(row.name) for row in alone)
    for row in alone:
        first, *others = wrap(str(row.strategy), _LINE_LENGTH - width - 2)
        print_plain(f"{row.name:{width}}  {first}")
        for line in others:
            print_plain(f"{'':{width}}  {line}")
        if not row.support.ok:
            print_plain(f"{'':{width}}  not supported: {row.support.reason}")
    if not every:
        _print_choices([row.name for row in shown if _is_choice(row)], width)
        print_plain(f"{len(rows) - len(shown)} others are not supported yet; --all prints the reasons")


def _print_layouts(rows: Sequence[StrategyRow], ranks: int) -> None:
    """Print a line for each layout, with the reason if it is refused."""
    width = max(len(row.name) for row in rows)
    for row in rows:
        print_plain(f"{row.name:{width}}  {'runs' if row.support.ok else f'refused: {row.support.reason}'}")
    refused = sum(not row.support.ok for row in rows)
    print_plain(
        f"{format_count(len(rows), 'layout')} of {format_count(ranks, 'rank')}, {refused} of them refused"
    )


def _is_choice(row: StrategyRow) -> bool:
    """Return whether a row is one of several values of the same key."""
    return row.name.split()[-1].partition("=")[0] in ("sync", "codec", "route", "channel", "schedule")


def _print_choices(names: Sequence[str], width: int) -> None:
    """Print a paragraph for each key: its possible values, and which other terms each one needs."""
    words: dict[str, list[str]] = {}
    for name in names:
        *needs, word = name.split()
        key, _, value = word.partition("=")
        words.setdefault(key, []).append(f"{value} (with {' '.join(needs)})" if needs else value)
    for key, values in words.items():
        print_plain(f"{key + '=':{width}}  " + f"\n{'':{width}}  ".join(wrap(", ".join(values), 98 - width)))


def _record(row: StrategyRow) -> dict[str, Any]:
    ok, reason = row.support.ok, row.support.reason
    return {"name": row.name, "strategy": str(row.strategy), "supported": ok, "reason": reason}
