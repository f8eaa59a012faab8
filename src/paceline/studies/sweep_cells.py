"""The axes of a sweep and the cells of its grid. Pure.

A cell is a set of overrides of the recipe, as `--set` takes them; the recipe validates their values.
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
    """An axis of a sweep: a word of `--over` and its values, as written."""

    word: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class SweepCell:
    """One run of a sweep.

    Args:
        values: one value by the word of each axis.
        settings: overrides of the recipe, if the values are names; None: each word is a key.
    """

    values: Mapping[str, str]
    settings: tuple[str, ...] | None = None

    @property
    def label(self) -> str:
        """The values as text, for tables and messages."""
        return " ".join(f"{word}={value}" for word, value in self.values.items())

    @property
    def folder(self) -> str:
        """The name of its folder inside the folder of the sweep."""
        # Values can be paths or strategies, with characters that no folder name can have.
        return re.sub(r"[^A-Za-z0-9=.+-]+", "_", "_".join(f"{w}={v}" for w, v in self.values.items()))

    @property
    def overrides(self) -> list[str]:
        """The overrides of the recipe, without `accumulation`, which depends on the number of replicas."""
        if self.settings is not None:
            return [*self.settings]
        return [f"{recipe_key(word)}={value}" for word, value in self.values.items() if word != ACCUMULATION]

    @property
    def accumulation(self) -> int | None:
        """Micro-batches of each replica per step; None if that is no axis.

        Raises:
            RecipeError: it is not a positive integer.
        """
        value = self.values.get(ACCUMULATION)
        if value is not None and not (value.isdecimal() and int(value) > 0):
            raise RecipeError(f"accumulation: expected an integer >= 1, found {value}", where="--over")
        return None if value is None else int(value)


def recipe_key(word: str) -> str:
    """Return the recipe key of an axis: `batch` is batch.size, `replicas` is strategy.replicas."""
    from paceline.recipe.strategy import Strategy

    return f"strategy.{word}" if word in Strategy.model_fields else _KEY_ALIASES.get(word, word)


def parse_axis(text: str) -> SweepAxis:
    """Read `WORD=VALUE,VALUE,...`; a comma inside brackets or quotes belongs to its value.

    Raises:
        RecipeError: there is no value, or the same value twice.
    """
    word, _, values_text = text.partition("=")
    values = tuple(value.strip() for value in re.findall(r"(?:\[[^]]*\]|\"[^\"]*\"|[^,])+", values_text))
    if not word.strip() or not values or not all(values) or len(set(values)) < len(values):
        raise RecipeError(
            f"expected WORD=VALUE,VALUE,... with different values, found {text!r}",
            where="--over",
            next_step='for example --over "batch=32,64,128" --over "replicas=1,2" --over "seed=1,2,3"',
        )
    return SweepAxis(word.strip(), values)


def build_cells(axes: Sequence[SweepAxis]) -> list[SweepCell]:
    """Return every combination of values; the last axis changes fastest.

    Raises:
        RecipeError: two axes change the same key.
    """
    words = [axis.word for axis in axes]
    # Two words can mean one key, as `batch` and `batch.size` do.
    if len(set(map(recipe_key, words))) < len(words):
        raise RecipeError(
            "two axes change the same key", where="--over", next_step="give all its values in one --over"
        )
    grid = itertools.product(*(axis.values for axis in axes))
    return [SweepCell(dict(zip(words, values, strict=True))) for values in grid]
