"""The base class of all recipe tables, and what turns failed validation into an error that a user can act on.

A table is a frozen, strict pydantic model. Its fields carry three kinds of markers in `Annotated`:
`ExpectedText` and `WordChoice` describe the accepted values where the type does not, and `FieldNeed` states
when a key has an effect, or what its value excludes. Error messages, the reference page and the JSON schema
are all read from these fields, so a new field or bound needs no change here.

Invariants: an instance that exists is valid. Types are not coerced (`"3"` and `true` are no integers); only
lists become tuples and integers become floats, because TOML and Python write them so. Every problem names its
key, what was expected and what was found, and all problems of a recipe come in one error.

This module knows no key of any table, and it does not know where a key was written (file and line, override,
Python call): the caller passes a `KeyLocator`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from paceline.errors import RecipeError
from paceline.recipe.toml_text import KeyPath, closest_word, dotted_key, shown_value, toml_value

# ---------------------------------------------------------------------- which values a field accepts


class ExpectedText(NamedTuple):
    """A marker in `Annotated` with the description of the accepted values, where the type alone is not
    enough.
    """

    text: str


class WordChoice(NamedTuple):
    """A marker in `Annotated` for one of a few words; installed packages can add to them."""

    words: Callable[[], tuple[str, ...]]

    @property
    def text(self) -> str:
        return _one_of(self.words())


_TYPES = {
    int: "an integer",
    float: "a finite number",
    bool: "true or false",
    str: "a string",
    dict: "a table",
}
_BOUNDS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))


def expected(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Describe the values of a type: "an integer >= 1", "one of adamw, adam, sgd".

    Args:
        annotation: the type of a field, or of one element of it.
        metadata: its bounds and markers, as pydantic or `Annotated` hold them.
    """
    metadata = tuple(_flatten_markers(metadata))
    for marker in metadata:
        if isinstance(marker, ExpectedText | WordChoice):
            return marker.text
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return expected(arguments[0], (*metadata, *arguments[1:]))
    if origin in (Union, UnionType):
        return expected(arguments[0], metadata)
    if origin is Literal:
        return _one_of(arguments)
    if origin is tuple:
        length = "a list" if arguments[-1] is Ellipsis else f"a list of {len(arguments)}"
        return f"{length}, each {expected(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return str(getattr(annotation, "expects", "a table"))
    return _TYPES.get(origin or annotation, "another value") + _describe_bounds(metadata)


def _one_of(values: Iterable[Any]) -> str:
    return "one of " + ", ".join(toml_value(value) for value in values)


def _flatten_markers(metadata: Iterable[Any]) -> Iterator[Any]:
    """Yield single markers: a pydantic `Field` inside `Annotated` holds several."""
    for marker in metadata:
        yield from getattr(marker, "metadata", (marker,))


def _describe_bounds(metadata: Iterable[Any]) -> str:
    bounds = {name: getattr(bound, name) for bound in metadata for name, _ in _BOUNDS if hasattr(bound, name)}
    text = " and ".join(f"{sign} {bounds[name]}" for name, sign in _BOUNDS if name in bounds)
    lengths = [bound.min_length for bound in metadata if hasattr(bound, "min_length")]
    return (f" {text}" if text else "") + (" that is not empty" if lengths else "")


def expected_at(model: type[BaseModel], path: KeyPath) -> str:
    """Describe the values that the key at `path` of this model accepts."""
    annotation, metadata = _type_at(model, path)
    return expected(annotation, metadata)


def choices_at(model: type[BaseModel], path: KeyPath) -> tuple[str, ...]:
    """Return the words that the key at `path` accepts; empty if it is not one of a few words."""
    annotation, metadata = _type_at(model, path)
    choices = [marker.words() for marker in _flatten_markers(metadata) if isinstance(marker, WordChoice)]
    return get_args(annotation) if get_origin(annotation) is Literal else next(iter(choices), ())


def _type_at(model: type[BaseModel], path: KeyPath) -> tuple[Any, tuple[Any, ...]]:
    annotation: Any = model
    metadata: tuple[Any, ...] = ()
    for step in path:
        if isinstance(step, int):
            annotation, metadata = get_args(annotation)[step], ()
        elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
            field = annotation.model_fields[step]
            annotation, metadata = field.annotation, tuple(field.metadata)
    return annotation, metadata


def keys_at(model: type[BaseModel], path: KeyPath) -> tuple[str, ...]:
    """Return the keys of the table at `path`; empty if it is not a table with fixed keys."""
    annotation, _ = _type_at(model, path)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return tuple(annotation.model_fields)
    return ()


def known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every key of a model and of its tables, dotted: `seed`, `optimizer`, `optimizer.lr`, ..."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from known_keys(field.annotation, f"{prefix}{name}.")


# ---------------------------------------------------------------------- problems and their error


class RecipeProblem(NamedTuple):
    """One error of a recipe.

    Args:
        paths: the keys involved, the one to change first.
        message: what was expected and what was found.
        can_drop: the first key is valid but has no effect, so an override may remove it.
        next_step: what to write instead; empty: a sentence is made from the keys.
    """

    paths: tuple[KeyPath, ...]
    message: str
    can_drop: bool = False
    next_step: str = ""

    @property
    def advice(self) -> str:
        """Return the next step."""
        key, *others = dict.fromkeys(dotted_key(path) for path in self.paths)
        if self.next_step or not key:
            return self.next_step or "correct it; docs/reference/recipe.md describes every key"
        changes = f"remove {key}" if self.can_drop else f"change {key}"
        return changes + (f", or change {' or '.join(others)}" if others else "")


class KeyConflict(NamedTuple):
    """Keys that are valid alone and contradict each other.

    Args:
        keys: dotted from one table on, the one to change first.
        message: what was expected and what was found.
        can_drop: the first key only has no effect, so an override may remove it.
        next_step: as in `RecipeProblem`.
    """

    keys: tuple[str, ...]
    message: str
    can_drop: bool = False
    next_step: str = ""


KeyLocator = Callable[[Sequence[KeyPath]], str]  # keys -> the place where the first of them was written


def value_error(message: str, next_step: str = "") -> PydanticCustomError:
    """Make the error that a validator raises to have its message shown word for word."""
    return PydanticCustomError("refused", "{message}", {"message": message, "next_step": next_step})


def conflict_error(conflicts: Sequence[KeyConflict]) -> PydanticCustomError:
    """Make the error that a table raises for its conflicts."""
    return PydanticCustomError("conflicts", "fields do not agree", {"conflicts": tuple(conflicts)})


def expected_message(expectation: str, value: Any, words: Sequence[str] = ()) -> str:
    """Return "expected ..., found ...", with the one of `words` that was probably meant."""
    message = f"expected {expectation}, found {shown_value(value)}"
    near = closest_word(value, words) if isinstance(value, str) else None
    return f'{message}; did you mean "{near}"?' if near else message


BYTES_EXPECTED = 'bytes, such as "2GiB", "512MiB", "2GB" or 4096'
_BYTES_TEXT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(value: Any) -> Any:
    """Convert an amount of memory such as "2GiB" to a number of bytes; None stays None.

    KiB, MiB, GiB and TiB are powers of 1,024; kB, MB, GB and TB powers of 1,000.
    """
    if value is None or type(value) is int:
        return value
    match = _BYTES_TEXT.fullmatch(value.strip()) if isinstance(value, str) else None
    prefix = match[2].lower() if match else "i"
    if match is None or prefix == "i":
        raise value_error(expected_message(BYTES_EXPECTED, value))
    base = 1024 if prefix.endswith("i") else 1000
    return int(float(match[1]) * base ** _POWERS[prefix.removesuffix("i")])


def read_problems(error: ValidationError, model: type[BaseModel]) -> Iterator[RecipeProblem]:
    """Yield the problems in a validation error that pydantic raised for `model`."""
    for item in error.errors(include_url=False):
        yield from _READERS.get(item["type"], _read_wrong_value)(item, model)


def recipe_error(
    problems: Sequence[RecipeProblem], locate: KeyLocator, kind: type[RecipeError]
) -> RecipeError:
    """Make one error of all problems, with the place of each.

    Args:
        problems: at least one.
        locate: returns where the keys of a problem were written.
        kind: the class of the error.
    """
    if len(problems) == 1:
        problem = problems[0]
        return kind(_problem_line(problem), where=locate(problem.paths), next_step=problem.advice)
    lines = [f"{locate(problem.paths)}: {_problem_line(problem)}" for problem in problems]
    next_step = "; ".join(dict.fromkeys(problem.advice for problem in problems))
    return kind("\n  ".join([f"{len(lines)} errors:", *lines]), next_step=next_step)


def _problem_line(problem: RecipeProblem) -> str:
    key = dotted_key(problem.paths[0])
    return f"{key}: {problem.message}" if key else problem.message


def _read_wrong_value(item: ErrorDetails, model: type[BaseModel]) -> Iterator[RecipeProblem]:
    path, value = item["loc"], item["input"]
    message = expected_message(expected_at(model, path), value, choices_at(model, path))
    if item["type"] == "int_type" and isinstance(value, float) and value.is_integer():
        message += f"; write {int(value)}"
    yield RecipeProblem((path,), message, next_step=_setting_advice(path, model))


def _setting_advice(path: KeyPath, model: type[BaseModel]) -> str:
    key = dotted_key(path)
    return f"set {key} to {expected_at(model, path)}, or leave it out" if key else ""


def _read_undecodable_text(item: ErrorDetails, model: type[BaseModel]) -> Iterator[RecipeProblem]:
    """Report the name of a file that is not UTF-8, or that the locale of this process cannot decode."""
    shown = shown_value(item["input"])
    yield RecipeProblem(
        (item["loc"],), f"expected text in UTF-8, found {shown}; rename it, or set PYTHONUTF8=1"
    )


def _read_missing_key(item: ErrorDetails, model: type[BaseModel]) -> Iterator[RecipeProblem]:
    path = item["loc"]
    message = f"expected {expected_at(model, path)}, but it is missing"
    yield RecipeProblem((path,), message, next_step=f"add {dotted_key(path)}")


def _read_unknown_key(item: ErrorDetails, model: type[BaseModel]) -> Iterator[RecipeProblem]:
    path = item["loc"]
    keys = keys_at(model, path[:-1])
    near = _closest_key(path, keys, model)
    advice = f"did you mean {near}?" if near else f"expected one of {', '.join(keys)}"
    key = dotted_key(path)
    next_step = f"write {near} instead of {key}" if near else f"remove {key}, or use one of these keys"
    message = f"unknown key, found {shown_value(item['input'])}; {advice}"
    yield RecipeProblem((path,), message, next_step=next_step)


def _closest_key(path: KeyPath, keys: Sequence[str], model: type[BaseModel]) -> str | None:
    """Return the key that was probably meant.

    That is a similar key of the same table, else a key of the same name in any table, else any similar key.
    """
    known = tuple(known_keys(model))
    near = closest_word(str(path[-1]), keys)
    if near:
        return dotted_key((*path[:-1], near))
    elsewhere = [key for key in known if key.rpartition(".")[2] == path[-1]]
    return elsewhere[0] if elsewhere else closest_word(str(path[-1]), known)


def _read_refusal(item: ErrorDetails, model: type[BaseModel]) -> Iterator[RecipeProblem]:
    next_step = item.get("ctx", {}).get("next_step", "")
    yield RecipeProblem((item["loc"],), item["msg"], next_step=next_step)


def _read_conflicts(item: ErrorDetails, model: type[BaseModel]) -> Iterator[RecipeProblem]:
    for keys, message, can_drop, next_step in item["ctx"]["conflicts"]:
        paths = tuple((*item["loc"], *key.split(".")) for key in keys)
        yield RecipeProblem(paths, message, can_drop, next_step)


_READERS = {
    "extra_forbidden": _read_unknown_key,
    "missing": _read_missing_key,
    "string_unicode": _read_undecodable_text,
    "refused": _read_refusal,
    "conflicts": _read_conflicts,
}

# ---------------------------------------------------------------------- what a key needs to have an effect

NeedScope = Literal["table", "strategy", "recipe", "session"]
"""What `FieldNeed.met` is called with: the table of the field, a Strategy with its replicas filled in, the
Recipe, or the `SessionFacts` of a session that is about to start."""


@dataclass(frozen=True)
class FieldNeed:
    """A marker in `Annotated`: what must hold for the value of a field to have an effect, or to be possible.

    Needs of scope "table" and "recipe" are errors of the constructor. Those of scope "strategy" are reasons
    of `support` (a strategy has to be parsed before the nearest supported one can be named), and those of
    scope "session" are warnings when a session starts, because only the task and the processes decide them.

    Args:
        met: whether the need is met, given the object of its scope.
        only: for the reference page, when the key has an effect: "with workers". Empty for a contradiction.
        found: what was found instead; `{t}` is the object of the scope.
        keys: the other keys that decide, dotted from the scope on.
        scope: see `NeedScope`.
        when: the values that have this need; None: all but the default.
        reason: the whole message, in place of "expected only {only}, {found}": text with `{t}`, or a
            function.
        change_first: the key to change, where that is another one than the field's.
        is_conflict: the value contradicts other keys. An override that causes it does not remove the key, as
            it does for one that only loses its effect.
        next_step: as in `RecipeProblem`; text with `{t}`.
    """

    met: Callable[[Any], Any]
    only: str = ""
    found: str = ""
    keys: tuple[str, ...] = ()
    scope: NeedScope = "table"
    when: Callable[[Any], Any] | None = None
    reason: str | Callable[[Any], str] = ""
    change_first: str = ""
    is_conflict: bool = False
    next_step: str = ""

    def is_unmet(self, key: str, scope: Any, default: Any) -> bool:
        """Return whether the value of `key` has this need, and it is not met.

        Args:
            key: dotted from `scope` on.
            scope: the object that `met` takes; for scope "session" its `recipe` holds the key.
            default: of the key.
        """
        value = get_value(scope.recipe if self.scope == "session" else scope, key)
        concerned = self.when(value) if self.when else value != default
        return bool(concerned) and not self.met(scope)

    def message(self, scope: Any) -> str:
        """Return what was expected and what was found."""
        if callable(self.reason):
            return self.reason(scope)
        if self.reason:
            return self.reason.format(t=scope)
        return f"expected only {self.only}, {self.found.format(t=scope)}"

    def conflict(self, key: str, scope: Any) -> KeyConflict:
        """Return the conflict of `key`, whose need is not met."""
        keys = dict.fromkeys((self.change_first or key, key, *self.keys))
        next_step = self.next_step.format(t=scope)
        return KeyConflict(tuple(keys), self.message(scope), not self.is_conflict, next_step)


@cache
def list_needs(model: type[BaseModel]) -> tuple[tuple[str, FieldNeed], ...]:
    """Return the needs of a model and of its tables with their dotted keys, in the order of the fields."""
    needs: list[tuple[str, FieldNeed]] = []
    for name, field in model.model_fields.items():
        needs += [(name, marker) for marker in field.metadata if isinstance(marker, FieldNeed)]
        inner: Any = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            needs += [(f"{name}.{key}", need) for key, need in list_needs(inner)]
    return tuple(needs)


def find_unmet_needs(owner: BaseModel, scope: NeedScope) -> Iterator[KeyConflict]:
    """Yield a conflict for each need of one scope that `owner` does not meet.

    Args:
        owner: the object of the scope. For "table" only its own fields are checked, since a nested table has
            checked its fields itself.
    """
    for key, need, default in _needs_of_scope(type(owner), scope):
        if need.is_unmet(key, owner, default):
            yield need.conflict(key, owner)


@cache  # a recipe is validated several times, a study resolves one for each trial
def _needs_of_scope(model: type[BaseModel], scope: NeedScope) -> tuple[tuple[str, FieldNeed, Any], ...]:
    """Return the needs that are checked in one scope, each with the default of its key."""
    return tuple(
        (key, need, default_value(model, key))
        for key, need in list_needs(model)
        if need.scope == scope and not (scope == "table" and "." in key)
    )


def need_text(model: type[BaseModel], key: str) -> str:
    """Return in a few words when a dotted key has an effect; empty: always."""
    return ", and ".join(
        dict.fromkeys(need.only for name, need in list_needs(model) if name == key and need.only)
    )


def get_value(table: Any, key: str) -> Any:
    """Return the value of a dotted key."""
    for name in key.split("."):
        table = getattr(table, name)
    return table


def default_value(model: type[BaseModel], key: str) -> Any:
    """Return the default of a dotted key."""
    *tables, name = key.split(".")
    for table in tables:
        inner: Any = model.model_fields[table].annotation
        model = inner
    return model.model_fields[name].get_default(call_default_factory=True)


# ---------------------------------------------------------------------- the base class


class RecipeTable(BaseModel):
    """A frozen table of a recipe.

    Raises:
        RecipeError: a key is unknown or missing, or a value is of the wrong type, impossible, or contradicts
            another one; a single error names them all.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        defer_build=True,  # built at the first use, so that `paceline --help` does not pay for it
    )
    error_class: ClassVar[type[RecipeError]] = RecipeError
    expects: ClassVar[str] = "a table"
    checked_scopes: ClassVar[tuple[NeedScope, ...]] = ("table",)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _to_recipe_error(error, type(self), _constructor_locator(type(self))) from None

    # pydantic calls a custom __init__ for nested tables too, which would end validation at the first of
    # them; with this mark it builds nested tables itself, and all their errors arrive together.
    __init__.__dict__["__pydantic_base_init__"] = True

    @classmethod
    def read(cls, values: Any, locate: KeyLocator) -> Self:
        """Validate values that were written elsewhere.

        Args:
            values: a mapping of plain values (or whatever else this table accepts).
            locate: returns where a key was written.
        Raises:
            RecipeError: as for the constructor, with these places.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise _to_recipe_error(error, cls, locate) from None

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed, validated like a new one."""
        values = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**values, **changes})

    def _fill_defaults(self) -> None:
        """Replace defaults of keys that are left out by those that follow from other keys; most have none."""

    @model_validator(mode="after")
    def _check_needs(self) -> Self:
        self._fill_defaults()
        conflicts = [conflict for scope in self.checked_scopes for conflict in find_unmet_needs(self, scope)]
        if conflicts:
            raise conflict_error(conflicts)
        return self


def _to_recipe_error(error: ValidationError, model: type[RecipeTable], locate: KeyLocator) -> RecipeError:
    return recipe_error(tuple(read_problems(error, model)), locate, model.error_class)


def _constructor_locator(model: type[RecipeTable]) -> KeyLocator:
    return lambda paths: f"{model.__name__}(...)"
