"""`paceline recipe show` and `paceline strategies`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import common_options
from paceline.cli.console import output

if TYPE_CHECKING:
    from paceline.recipe.support import StrategyRow


def show(
    recipe: common_options.RecipeArgument,
    strategy: common_options.StrategyOption = None,
    settings: common_options.Settings = None,
) -> None:
    """Print the resolved recipe: every key, set or not, with its value and what it means."""
    from paceline.recipe.recipe_reference import describe_recipe

    resolved = common_options.read_recipe(recipe, settings, strategy)
    output().print(describe_recipe(resolved), markup=False, highlight=False, soft_wrap=True, end="")


def schema() -> None:
    """Print a JSON schema of recipes, by which editors check and complete them."""
    from paceline.recipe.recipe_reference import json_schema

    output().print(json.dumps(json_schema(), indent=1), markup=False, highlight=False, soft_wrap=True)


def strategies(
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Also what is not supported, with the reasons.")
    ] = False,
    ranks: Annotated[
        int, typer.Option("--ranks", min=0, help="Every layout of so many ranks, and why one is refused.")
    ] = 0,
) -> None:
    """Print the strategies that are supported, and what each stands for."""
    from paceline.recipe.support import list_layouts, list_strategies

    rows = list_layouts(ranks) if ranks else list_strategies()
    if as_json:
        output().print_json(json.dumps([_record(row) for row in rows]))
    elif ranks:
        _print_layouts(rows, ranks)
    else:
        _print_table(rows, every=every)


def _print_table(rows: Sequence[StrategyRow], *, every: bool) -> None:
    """Presets and words, with what keeps them from running if `every` one is shown."""
    shown = rows if every else [row for row in rows if row.support.ok]
    alone = [row for row in shown if every or not _is_choice(row)]
    width = max(len(row.name) for row in alone)
    for row in alone:
        _print_line(f"{row.name:{width}}  {row.strategy}")
        if not row.support.ok:
            _print_line(f"{'':{width}}  not supported: {row.support.reason}")
    if not every:
        _print_choices([row.name for row in shown if _is_choice(row)], width)
        _print_line(f"{len(rows) - len(shown)} others are not supported yet: --all says why")


def _print_layouts(rows: Sequence[StrategyRow], ranks: int) -> None:
    """A line for each layout, with what keeps it from running."""
    width = max(len(row.name) for row in rows)
    for row in rows:
        _print_line(f"{row.name:{width}}  {'runs' if row.support.ok else f'refused: {row.support.reason}'}")
    refused = sum(not row.support.ok for row in rows)
    _print_line(f"{len(rows)} layouts of {ranks} ranks, {refused} of them refused")


def _is_choice(row: StrategyRow) -> bool:
    """Is it one word of many that may stand behind the same key?"""
    return row.name.split()[-1].partition("=")[0] in ("sync", "codec", "route", "channel", "schedule")


def _print_choices(names: Sequence[str], width: int) -> None:
    """A paragraph for each key: the words that may stand behind it, and what each of them needs beside it."""
    words: dict[str, list[str]] = {}
    for name in names:
        *needs, word = name.split()
        key, _, value = word.partition("=")
        words.setdefault(key, []).append(f"{value} (with {' '.join(needs)})" if needs else value)
    for key, values in words.items():
        _print_line(f"{key + '=':{width}}  " + f"\n{'':{width}}  ".join(wrap(", ".join(values), 98 - width)))


def _record(row: StrategyRow) -> dict[str, Any]:
    ok, reason = row.support.ok, row.support.reason
    return {"name": row.name, "strategy": str(row.strategy), "supported": ok, "reason": reason}


def _print_line(text: str) -> None:
    output().print(text, markup=False, highlight=False, soft_wrap=True)
