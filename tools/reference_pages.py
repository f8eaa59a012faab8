"""Write docs/reference/recipe.md, recipe.schema.json and api.md from the code; a test compares them."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from typing import Any

from pydantic import BaseModel

import paceline
from paceline.recipe.recipe_reference import json_schema, recipe_keys, table_description

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
_RECIPE_HEAD = """\
# The keys of a recipe

`make docs` writes this page from `paceline.recipe`. `paceline recipe show RECIPE` prints the same for one
recipe, with its values; `--set KEY=VALUE` changes a key, and `--set KEY=` goes back to the default. Editors
check and complete recipes by [recipe.schema.json](recipe.schema.json) (`paceline recipe schema`): begin a
file with the line `#:schema path/to/recipe.schema.json`. A file can also have `extends = "base.toml"`, and
is then merged over that recipe ([how](../howto/recipes.md)).
"""
_API_HEAD = """\
# The names of `paceline`

`make docs` writes this page from the code: what `import paceline` has, with its contracts.
"""


def pages() -> dict[str, str]:
    """Every page by its name."""
    return {
        "recipe.md": recipe_page(),
        "recipe.schema.json": json.dumps(json_schema(), indent=1) + "\n",
        "api.md": api_page(),
    }


def recipe_page() -> str:
    """Every key with what it may be, its default and its meaning."""
    lines, table = [_RECIPE_HEAD, *_head()], ""
    for key in recipe_keys():
        if key.table != table:
            table = key.table
            lines += ["", f"## `[{table}]`: {table_description(table)}", "", *_head()]
        default = f"`{key.default}`" if key.default else ""
        cells = f"`{key.name}`", key.expects, default, key.meaning, key.only
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


def _head() -> list[str]:
    return ["| key | value | default | meaning | has an effect only |", "|---|---|---|---|---|"]


def api_page() -> str:
    """Every public name with its signature and its docstring; methods of classes with their first line."""
    parts = [_API_HEAD]
    for name in sorted(set(paceline.__all__) - {"__version__"}, key=str.lower):
        parts += _entry(name, getattr(paceline, name))
    return "\n".join(parts)


def _entry(name: str, value: Any) -> Iterator[str]:
    is_table = inspect.isclass(value) and issubclass(value, BaseModel)
    call = "(...)" if is_table else _signature(value)
    yield f"## `{name}`\n\n```python\n{'class ' if inspect.isclass(value) else ''}{name}{call}\n```\n"
    yield f"```text\n{inspect.getdoc(value) or ''}\n```\n"
    if is_table:
        yield "Its fields are the [keys of a recipe](recipe.md).\n"
    methods = [*_methods(value)] if inspect.isclass(value) else []
    if methods:
        yield "\n".join(methods) + "\n"


def _methods(kind: type) -> Iterator[str]:
    for name, member in list(vars(kind).items()):
        function = getattr(member, "__func__", member)
        if not name.startswith("_") and inspect.isfunction(function) and inspect.getdoc(function):
            first = (inspect.getdoc(function) or "").partition("\n")[0]
            yield f"- `{name}{_signature(function)}`: {first}"


def _signature(value: Any) -> str:
    try:
        text = str(inspect.signature(value))
    except ValueError:
        return "(...)"
    text = re.sub(r"<function <lambda> at 0x[0-9a-f]+>", "...", text)
    return text if len(text) < 90 else "(\n" + indent(text[1:].replace(", ", ",\n"), "    ")


def main() -> int:
    """Write the pages."""
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(f"wrote {FOLDER / name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
