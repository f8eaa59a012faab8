"""The file of a study: what is searched, by which rule, and the space of recipe keys. Torch-free.

Invariants: a `StudyPlan` that exists is consistent, and every value of its space is one that the recipe's key
accepts by its type and bounds. Values are rounded to six significant digits, as they are printed, so two
values that print alike are one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from paceline.errors import RecipeError, StrategyError
from paceline.recipe.recipe import Recipe
from paceline.recipe.strategy import Strategy
from paceline.recipe.toml_text import (
    KeyPath,
    closest_word,
    dotted_key,
    locate_keys,
    parse_toml,
    shown_value,
    toml_value,
)
from paceline.recipe.validation import FieldNeed, KeyLocator, RecipeTable, expected_at, known_keys
from paceline.search.objective import Objective

Params = dict[str, Any]
"""The values of a trial by recipe key, in the order of the space."""

_SIGNIFICANT_DIGITS = 6
_OF_THE_STUDY = {
    "seed": "runs of a trial have the recipe's seed and those after it",
    "run_dir": "every trial has a folder of its own in that of the study",
    "evaluate.validation": "all trials share the split of [study] validation",
    "task": "results of different tasks cannot be compared",
}
_FREE_TABLES = ("options", "tensor")  # their keys are the task's and the model's
_RANGE_LENGTH = 2


class ConfirmRecipe(RecipeTable):
    """The confirmation: the best trials are repeated with new seeds."""

    top: int = Field(default=3, ge=1, description="number of trials that are repeated")
    seeds: int = Field(default=5, ge=1, description="new seeds of each")


class StudyRecipe(RecipeTable):
    """What is searched for, and how."""

    objective: str = Field(description='"validation accuracy", "seconds to accuracy>=0.95", ...')
    direction: Literal["minimize", "maximize"] | None = Field(
        default=None,
        description="left out: losses, errors, perplexities and costs are minimized, others maximized",
    )
    search: str = Field(
        default="tpe", description='grid, random, tpe, gp, cma-es, "optuna:FILE" or "module:function"'
    )
    proposals: int = Field(default=4, ge=1, description="trials that are proposed together")
    seed: int = Field(default=1, ge=0, lt=2**32, description="the key of all proposals")
    seeds: int = Field(default=1, ge=1, description="runs of a trial, whose mean counts")
    confirm: ConfirmRecipe | None = Field(default=None, description="repeat the best trials with new seeds")
    validation: float = Field(default=0.15, gt=0, lt=1, description="share of the training samples")
    alone: bool | None = Field(
        default=None, description="run one trial at a time; left out: if the objective is in seconds"
    )


_NEEDS_RULE = FieldNeed(
    lambda table: table.rule != "none",
    'with rule = "halving", "median" or "asha"',
    'found "none"',
    keys=("rule",),
)
_NEEDS_HALVING = FieldNeed(
    lambda table: table.rule in ("halving", "asha"),
    'with rule = "halving" or "asha"',
    'found "{t.rule}"',
    keys=("rule",),
)
StopRule = Literal["none", "halving", "median", "asha"]


class StopRecipe(RecipeTable):
    """When a trial is stopped before its end."""

    rule: StopRule = Field(default="none", description="how trials are chosen that stop")
    first: Annotated[str | None, _NEEDS_RULE] = Field(
        default=None, description='first rung, "epochs:2" or "steps:100"; each following one is twice as far'
    )
    keep: Annotated[float, _NEEDS_HALVING] = Field(
        default=0.5, gt=0, lt=1, description="share that continues at a rung"
    )


class StudyFile(RecipeTable):
    """The file of a study."""

    study: StudyRecipe
    stop: StopRecipe = Field(default_factory=StopRecipe)
    space: dict[str, Any] = Field(description="by recipe key: log, range or choice")


def rounded(value: float) -> float:
    """Return a number with the digits that are printed."""
    return float(f"{value:.{_SIGNIFICANT_DIGITS}g}")


@dataclass(frozen=True)
class Dimension:
    """One key of the space.

    Args:
        key: dotted recipe key; "strategy" is the whole strategy.
        kind: "log": log-uniform; "range": uniform, with `step` only multiples of it; "choice": one of a list.
        low, high: bounds, both included; 0 for a choice.
        step: 0: none. A range of integers has the step 1.
        choices: of a choice.
        whole: values are integers.
    """

    key: str
    kind: Literal["log", "range", "choice"]
    low: float = 0
    high: float = 0
    step: float = 0
    choices: tuple[Any, ...] = ()
    whole: bool = False

    @property
    def size(self) -> int | None:
        """Number of values; None: a continuum."""
        if self.kind == "choice":
            return len(self.choices)
        if self.whole and self.kind == "log":
            return int(self.high - self.low) + 1
        return round((self.high - self.low) / self.step) + 1 if self.step else None

    def value_at(self, index: int) -> Any:
        """Return the value with an index in range(size)."""
        if self.kind == "choice":
            return self.choices[index]
        return self.bounded(self.low + index * (self.step or 1))

    def value_of(self, uniform: float) -> Any:
        """Return the value at a quantile of the distribution, in [0, 1)."""
        if self.kind != "log":
            size = self.size
            if size is not None:
                return self.value_at(int(uniform * size))
            return self.bounded(self.low + uniform * (self.high - self.low))
        # an integer has the share of the log scale from half below to half above it
        margin = 0.5 if self.whole else 0.0
        low, high = math.log(self.low - margin), math.log(self.high + margin)
        return self.bounded(math.exp(low + uniform * (high - low)))

    def bounded(self, value: float) -> Any:
        """Return a number inside of the bounds, with the digits that are printed."""
        inside = min(max(value, self.low), self.high)
        return round(inside) if self.whole else rounded(inside)


@dataclass(frozen=True)
class Space:
    """The keys that are searched, in the order of the file."""

    dimensions: tuple[Dimension, ...]

    @property
    def size(self) -> int | None:
        """Number of combinations; None: a continuum."""
        sizes = [dimension.size for dimension in self.dimensions]
        return None if None in sizes else math.prod(size for size in sizes if size is not None)

    def combination(self, index: int) -> Params:
        """Return a combination by its index in range(size); the last key changes fastest."""
        values: Params = {}
        for dimension in reversed(self.dimensions):
            index, position = divmod(index, dimension.size or 1)
            values[dimension.key] = dimension.value_at(position)
        return {dimension.key: values[dimension.key] for dimension in self.dimensions}


def label(params: Mapping[str, Any]) -> str:
    """Return the values of a trial as text; equal values have equal texts."""
    return " ".join(f"{name}={_shown(value)}" for name, value in params.items())


def _shown(value: Any) -> str:
    return f"{value:.{_SIGNIFICANT_DIGITS}g}" if isinstance(value, float) else toml_value(value)


@dataclass(frozen=True)
class StudyPlan:
    """A study file that was checked.

    Args:
        file: its tables.
        values: its plain values, for the comparison with an earlier call.
    """

    file: StudyFile
    objective: Objective
    space: Space
    values: Mapping[str, Any]

    @property
    def study(self) -> StudyRecipe:
        """The table [study]."""
        return self.file.study

    @property
    def stop(self) -> StopRecipe:
        """The table [stop]."""
        return self.file.stop

    @property
    def alone(self) -> bool:
        """Return whether one trial runs at a time."""
        return self.objective.cost == "seconds" if self.study.alone is None else self.study.alone

    def rung(self, number: int) -> str | None:
        """Return the rung with a number, "epochs:4"; None without a stopping rule."""
        if self.stop.first is None:
            return None
        unit, _, amount = self.stop.first.partition(":")
        return f"{unit}:{float(amount) * 2**number:g}"


def read_study_file(path: Path) -> StudyPlan:
    """Read the file of a study.

    Raises:
        RecipeError: it cannot be read, or something in it is wrong; names the key, its line and the next
            step.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = parse_toml(text)
    except (OSError, ValueError) as error:
        raise RecipeError(f"the study cannot be read: {error}", where=str(path)) from error
    lines = locate_keys(text)

    def locate(paths: Sequence[KeyPath]) -> str:
        for key in paths:
            for depth in range(len(key), 0, -1):
                if key[:depth] in lines:
                    return f"{path}:{lines[key[:depth]]}"
        return str(path)

    return plan_study(values, locate)


def plan_study(values: Mapping[str, Any], locate: KeyLocator = lambda paths: "the study") -> StudyPlan:
    """Check the plain values of a study file.

    Raises:
        RecipeError: see `read_study_file`.
    """
    flat = {**values, "space": _flat_keys(values.get("space", {}))}
    file = StudyFile.read(flat, locate)
    where = locate([("study", "objective")])
    objective = Objective.parse(file.study.objective, file.study.direction, where)
    if not file.space:
        raise RecipeError("the space is empty", where=locate([("space",)]), next_step=_SPACE_EXAMPLE)
    space = Space(tuple(_read_dimension(key, value, locate) for key, value in file.space.items()))
    _check_stop(file.stop, locate)
    _check_search(file.study.search, space, locate)
    return StudyPlan(file, objective, space, json.loads(json.dumps(flat, default=str)))


_SPACE_EXAMPLE = 'for example "optimizer.lr" = { log = [1e-4, 1e-1] }'


def _flat_keys(values: Any, prefix: str = "") -> Any:
    """Return a space by dotted keys: `optimizer.lr = {...}` without quotes is a nested table in TOML."""
    if not isinstance(values, Mapping):
        return values
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = isinstance(value, Mapping) and value and not {"log", "range", "choice", "step"} & value.keys()
        flat |= _flat_keys(value, f"{prefix}{name}.") if inner else {prefix + name: value}
    return flat


def _check_stop(stop: StopRecipe, locate: KeyLocator) -> None:
    if stop.rule == "none":
        return
    unit, colon, amount = (stop.first or "").partition(":")
    try:
        number = float(amount)
    except ValueError:
        number = math.nan
    if unit not in ("steps", "epochs") or not colon or not 0 < number < math.inf:
        raise RecipeError(
            f'stop.first: expected "epochs:2" or "steps:100", found {shown_value(stop.first or "")}',
            where=locate([("stop", "first"), ("stop", "rule")]),
            next_step="name the first rung, at which trials are compared",
        )


OPTUNA = "optuna:"
"""Begins the name of a search that continues from a storage of Optuna."""

SEARCHES = ("grid", "random", "tpe", "gp", "cma-es")


def _check_search(search: str, space: Space, locate: KeyLocator) -> None:
    if search not in SEARCHES and ":" not in search:
        near = closest_word(search, SEARCHES)
        raise RecipeError(
            f'study.search: expected one of {", ".join(SEARCHES)}, "optuna:FILE" or "module:function",'
            f' found "{search}"' + (f'; did you mean "{near}"?' if near else ""),
            where=locate([("study", "search")]),
        )
    endless = [dimension.key for dimension in space.dimensions if dimension.size is None]
    if search == "grid" and endless:
        raise RecipeError(
            f"a grid needs a fixed number of values, and {', '.join(endless)} has a continuum of them",
            where=locate([("space", endless[0])]),
            next_step="write choice = [...] or range = [...] with a step, or another search",
        )


def _read_dimension(key: str, value: Any, locate: KeyLocator) -> Dimension:
    where = locate([("space", key), ("space", *key.split(".")), ("space",)])
    _check_key(key, where)
    kinds = [kind for kind in ("log", "range", "choice") if isinstance(value, Mapping) and kind in value]
    known = {"step"} if kinds == ["range"] else set()
    if len(kinds) != 1 or set(value) - {*kinds, *known}:
        raise RecipeError(
            f"{key}: expected log = [low, high], range = [low, high] with or without step, or choice ="
            " [...], found"
            f" {toml_value(value) if isinstance(value, Mapping) else shown_value(value)}",
            where=where,
            next_step=_SPACE_EXAMPLE,
        )
    if kinds == ["choice"]:
        return _read_choice(key, value["choice"], where)
    return _read_interval(key, "log" if kinds == ["log"] else "range", value, where)


def _check_key(key: str, where: str) -> None:
    if key in _OF_THE_STUDY:
        raise RecipeError(
            f"{key} cannot be searched: {_OF_THE_STUDY[key]}",
            where=where,
            next_step="leave it out of the space",
        )
    known = tuple(known_keys(Recipe))
    if key in known or (key.partition(".")[0] in _FREE_TABLES and "." in key):
        return
    near = closest_word(key, known)
    raise RecipeError(
        f"{key} is no key of a recipe" + (f"; did you mean {near}?" if near else ""),
        where=where,
        next_step="docs/reference/recipe.md lists all keys",
    )


def _read_choice(key: str, choices: Any, where: str) -> Dimension:
    if not isinstance(choices, list) or not choices:
        raise RecipeError(
            f"{key}: expected choice = [...] with at least one value, found {shown_value(choices)}",
            where=where,
        )
    values = [rounded(value) if isinstance(value, float) else value for value in choices]
    for index, value in enumerate(values):
        twin = next((i for i in range(index) if _shown(values[i]) == _shown(value)), None)
        if twin is not None:
            raise RecipeError(
                f"{key}: choices {twin + 1} and {index + 1} are one value, {_shown(value)}: floats have"
                f" {_SIGNIFICANT_DIGITS} significant digits",
                where=where,
                next_step="remove one of them",
            )
        _check_value(key, value, where)
    return Dimension(key, "choice", choices=tuple(values))


def _read_interval(
    key: str, kind: Literal["log", "range"], value: Mapping[str, Any], where: str
) -> Dimension:
    bounds, step = value[kind], value.get("step", 0)
    if not (
        isinstance(bounds, list) and len(bounds) == _RANGE_LENGTH and all(map(_is_number, [*bounds, step]))
    ):
        raise RecipeError(
            f"{key}: expected {kind} = [low, high] with two finite numbers, found {shown_value(bounds)}",
            where=where,
            next_step=_SPACE_EXAMPLE,
        )
    low, high = bounds
    problem = ""
    if low >= high:
        problem = f"low = {low:g} is not below high = {high:g}"
    elif kind == "log" and low <= 0:
        problem = f"low = {low:g}, and the logarithm needs a number above 0"
    elif "step" in value and step <= 0:
        problem = f"step = {step:g} is not above 0"
    elif step and abs((high - low) / step - round((high - low) / step)) > 1e-6:
        problem = f"step = {step:g} does not divide {high:g} - {low:g}"
    if problem:
        raise RecipeError(f"{key}: {problem}", where=where, next_step="correct the bounds or the step")
    whole = all(type(number) is int for number in (low, high, step))
    for bound in (low, high):
        _check_value(key, bound, where)
    if kind == "range" and whole and not step:
        step = 1
    return Dimension(key, kind, low, high, step, whole=whole)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _check_value(key: str, value: Any, where: str) -> None:
    """Refuse a value that the recipe's key never accepts.

    One that only contradicts other keys is no error here: with other values of the space it may be possible.
    """
    if key.partition(".")[0] in _FREE_TABLES:
        return
    if key == "strategy":
        try:
            Strategy.parse(value if isinstance(value, str) else "")
        except StrategyError as error:
            raise RecipeError(f"strategy: {error.what}", where=where, next_step=error.next_step) from error
        return
    path = tuple(key.split("."))
    try:
        _key_type(path).validate_python(value)
    except ValidationError:
        raise RecipeError(
            f"{key}: the recipe expects {expected_at(Recipe, path)}, found {shown_value(value)} in the space",
            where=where,
            next_step="leave this value out, or correct the bounds",
        ) from None


@cache
def _key_type(path: KeyPath) -> TypeAdapter[Any]:
    """Return what accepts the values of a key, without what it needs of other keys."""
    model: Any = Recipe
    *tables, name = path
    for table in tables:
        model = model.model_fields[table].annotation
    field = model.model_fields[name]
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
        return TypeAdapter(field.annotation)
    annotated: Any = Annotated[(field.annotation, *field.metadata)]
    return TypeAdapter(annotated, config=ConfigDict(strict=True, allow_inf_nan=False))


def first_difference(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> str:
    """Return the first key by which two tables differ, as "key: before -> after"; empty: they are equal."""
    for name in [*before, *(name for name in after if name not in before)]:
        old, new = before.get(name), after.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            difference = first_difference(old, new, f"{prefix}{name}.")
            if difference:
                return difference
        elif old != new:
            return f"{prefix}{name}: {_spelled(old)} -> {_spelled(new)}"
    return ""


def _spelled(value: Any) -> str:
    return "left out" if value is None else json.dumps(value)


def override_texts(params: Mapping[str, Any]) -> list[str]:
    """Return the values of a trial as overrides of the recipe, without that of the whole strategy."""
    return [
        f"{dotted_key((name,)) if '.' not in name else name}={toml_value(value)}"
        for name, value in params.items()
        if name != "strategy"
    ]
