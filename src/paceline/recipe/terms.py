"""The text of a strategy as terms by name: `NAME=VALUE`, or a preset and terms that change it."""

from __future__ import annotations

import re
from collections.abc import Collection

from paceline.recipe.presets import PRESETS
from paceline.recipe.problems import refused
from paceline.recipe.spell import nearest, spell


def read_terms(text: str, names: Collection[str]) -> dict[str, int | str]:
    """The terms of a text; `names` are those there are."""
    first, *rest = text.split() or [""]
    if not first:
        raise refused('expected terms such as "replicas=2 sync=every-step" or a preset, found nothing')
    if "=" in first:
        return _pairs([first, *rest])
    return {**_pairs(_expand(first, names).split()), **_pairs(rest)}


def _expand(name: str, names: Collection[str]) -> str:
    if name in PRESETS:
        return PRESETS[name].terms
    near = nearest(name, (*PRESETS, *names))
    advice = f'did you mean "{near}"?' if near else f"expected NAME=VALUE or one of {', '.join(PRESETS)}"
    raise refused(f"unknown preset {spell(name)}; {advice}")


def _pairs(words: list[str]) -> dict[str, int | str]:
    pairs: dict[str, int | str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise refused(f"expected NAME=VALUE, found {spell(word)}")
        if name in pairs:
            raise refused(f"{name} is given twice, {pairs[name]} and {value}")
        pairs[name] = int(value) if re.fullmatch(r"[+-]?[0-9]+", value) else value
    return pairs
