"""A recipe as TOML, with every value that a run uses.

Invariant: `load_recipe` reads the text back as an equal Recipe.
"""

from __future__ import annotations

from paceline.recipe.model import Recipe
from paceline.recipe.spell import spell, spell_key


def to_toml(recipe: Recipe) -> str:
    """Write the resolved recipe: all fields, defaults too, except those that are None."""
    values = {name: value for name, value in recipe.model_dump().items() if value not in (None, {})}
    plain = {name: value for name, value in values.items() if not isinstance(value, dict)}
    blocks = [_pairs(plain)]
    blocks += [f"[{name}]\n{_pairs(value)}" for name, value in values.items() if isinstance(value, dict)]
    return "\n".join(blocks)


def _pairs(values: dict[str, object]) -> str:
    return "".join(
        f"{spell_key(name)} = {spell(value)}\n" for name, value in values.items() if value is not None
    )
