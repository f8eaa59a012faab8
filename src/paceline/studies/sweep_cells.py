"""The axes of a sweep, and the cells that they span. Pure.

Invariant: a cell is overrides of a recipe, as `--set` takes them; what suits a key is decided by the recipe.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import RecipeError

ACCUMULATION = "accumulation"
_KEY_ALIASES = {"batch": "batch.size"}


@dataclass(frozen=True)
class SweepAxis:
    """A word, and the values that it takes, as written."""

    word: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class SweepCell:
    """One run of a sweep.

    Args:
        values: by the word of the axis.
    """

    values: Mapping[str, str]

    @property
    def label(self) -> str:
        """For people."""
        return " ".join(f"{word}={value}" for word, value in self.values.items())

    @property
    def folder(self) -> str:
        """Its name inside the folder of the sweep."""
        return re.sub(r"[^A-Za-z0-9=.+-]+", "_", "_".join(f"{w}={v}" for w, v in self.values.items()))

    @property
    def overrides(self) -> list[str]:
        """What it changes in the recipe; accumulation is left to `accumulation`."""
        return [f"{recipe_key(word)}={value}" for word, value in self.values.items() if word != ACCUMULATION]

    @property
    def accumulation(self) -> int | None:
        """Forward and backward passes of each replica in a step, if that is an axis.

        Raises:
            RecipeError: it is no positive number.
        """
        value = self.values.get(ACCUMULATION)
        if value is not None and not (value.isdecimal() and int(value) > 0):
            raise RecipeError(f"accumulation: expected an integer >= 1, found {value}", where="--over")
        return None if value is None else int(value)


def recipe_key(word: str) -> str:
    """The recipe's key that an axis changes: `batch` is batch.size, `replicas` strategy.replicas."""
    from paceline.recipe.strategy import Strategy

    return f"strategy.{word}" if word in Strategy.model_fields else _KEY_ALIASES.get(word, word)


def parse_axis(text: str) -> SweepAxis:
    """Read `WORD=VALUE,VALUE,...`; a comma inside brackets or quotes belongs to its value.

    Raises:
        RecipeError: there is no value, or one stands twice.
    """
    word, _, rest = text.partition("=")
    values = tuple(part.strip() for part in re.findall(r"(?:\[[^]]*\]|\"[^\"]*\"|[^,])+", rest))
    if not word.strip() or not values or not all(values) or len(set(values)) < len(values):
        raise RecipeError(
            f"expected WORD=VALUE,VALUE,..., each value once, found {text!r}",
            where="--over",
            next_step='for example --over "batch=32,64,128" --over "replicas=1,2" --over "seed=1,2,3"',
        )
    return SweepAxis(word.strip(), values)


def build_cells(axes: Sequence[SweepAxis]) -> list[SweepCell]:
    """Every combination; the last axis changes fastest.

    Raises:
        RecipeError: an axis stands twice.
    """
    words = [axis.word for axis in axes]
    if len(set(map(recipe_key, words))) < len(words):
        raise RecipeError(
            "an axis stands twice", where="--over", next_step="give all its values in one --over"
        )
    spanned = itertools.product(*(axis.values for axis in axes))
    return [SweepCell(dict(zip(words, values, strict=True))) for values in spanned]
