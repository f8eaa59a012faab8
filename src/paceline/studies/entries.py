"""The strategies of a comparison, read from a file. Pure.

The file is TOML: `name = "strategy"`, or `name = { strategy = "...", set = ["optimizer.lr=2e-3"] }` where a
strategy needs other settings than the recipe's. The first is what the speeds of the others are put beside.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import RecipeError
from paceline.recipe.toml_text import parse_toml

_EXAMPLE = 'for example every-step = "replicas=2"'
_MOST_LETTERS = 40


@dataclass(frozen=True)
class Entry:
    """One strategy.

    Args:
        name: in the table, and of its folders.
        strategy: as `--strategy` takes it.
        settings: as `--set` takes them.
    """

    name: str
    strategy: str
    settings: tuple[str, ...] = ()


def parse_entries(text: str, where: str) -> list[Entry]:
    """Read a file of strategies.

    Args:
        where: its name, for errors.
    Raises:
        RecipeError: it is no TOML, holds no strategy, or one of them is not written as it has to be.
    """
    try:
        found = parse_toml(text)
    except ValueError as error:
        raise RecipeError(f"the strategies cannot be read: {error}", where=where) from error
    if not found:
        raise RecipeError("there is no strategy", where=where, next_step=_EXAMPLE)
    return [_entry(name, value, where) for name, value in found.items()]


def _entry(name: str, value: Any, where: str) -> Entry:
    table: Mapping[str, Any] = {"strategy": value} if type(value) is str else _table(name, value, where)
    strategy, settings = table.get("strategy"), table.get("set", [])
    texts = type(settings) is list and {type(one) for one in settings} <= {str}
    problems = {
        "its name is no name of a folder": re.fullmatch(r"\w[\w.:+-]*", name) is None,
        f"its name has more than {_MOST_LETTERS} letters": len(name) > _MOST_LETTERS,
        "it has no strategy": type(strategy) is not str or not strategy.strip(),
        "set is no list of texts": not texts,
        "a key of it is unknown": not set(table) <= {"strategy", "set"},
    }
    for problem, holds in problems.items():
        if holds:
            raise RecipeError(f"the strategy '{name}': {problem}", where=where, next_step=_EXAMPLE)
    return Entry(name, str(strategy), tuple(settings))


def _table(name: str, value: Any, where: str) -> Mapping[str, Any]:
    if isinstance(value, dict):
        return value
    raise RecipeError(f"the strategy '{name}' is neither a text nor a table", where=where, next_step=_EXAMPLE)
