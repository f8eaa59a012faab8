"""What a recipe key expects, said in words: read off the types and bounds of the models, never repeated.

Invariant: pure functions of the model classes; a new field or bound needs no change here.

From what validation found to one error that a user can act on.

Invariant: every problem names its key, what was expected and what was found; all problems of a recipe
come in one message. Where a key stands (file and line, override, Python call) is the caller's answer.

When a key of a recipe acts: what else has to be so that it changes anything.

Invariant: a key that is set to something else than its default and cannot act is an error that names what it
needs. Each table says so of its own keys in `needs`, the recipe of what reaches over several tables. What
only the task or the number of processes can tell is said when a session is built (`training.idle`).

The base of every table of a recipe: frozen, strict, and wrong values are RecipeErrors.

Invariant: an instance that exists is valid. Types are not coerced (`"3"` and `true` are no integers);
only lists become tuples and integers become floats, because TOML and Python write them so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, UnionType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from paceline.errors import RecipeError
from paceline.recipe.toml_text import KeyPath, closest_word, dotted_key, shown_value, toml_value


class ExpectedText(NamedTuple):
    """A marker in `Annotated`: says what the field expects where its type alone does not."""

    text: str


class WordChoice(NamedTuple):
    """A marker in `Annotated`: one of a few words, which other packages may add to."""

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
    """Say what a value of this type may be: "an integer >= 1", "one of adamw, adam, sgd".

    Args:
        annotation: the type of a field, or of one element of it.
        metadata: its bounds, as pydantic or `Annotated` hold them.
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
        return f"a list of {len(arguments)}, each {expected(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return str(getattr(annotation, "expects", "a table"))
    return _TYPES.get(origin or annotation, "another value") + _bounds(metadata)


def _one_of(values: Iterable[Any]) -> str:
    return "one of " + ", ".join(toml_value(value) for value in values)


def _flatten_markers(metadata: Iterable[Any]) -> Iterator[Any]:
    """The markers themselves: in `Annotated`, a pydantic `Field` holds several."""
    for marker in metadata:
        yield from getattr(marker, "metadata", (marker,))


def _bounds(metadata: Iterable[Any]) -> str:
    found = {name: getattr(bound, name) for bound in metadata for name, _ in _BOUNDS if hasattr(bound, name)}
    text = " and ".join(f"{sign} {found[name]}" for name, sign in _BOUNDS if name in found)
    lengths = [bound.min_length for bound in metadata if hasattr(bound, "min_length")]
    return (f" {text}" if text else "") + (" that is not empty" if lengths else "")


def expected_at(model: type[BaseModel], path: KeyPath) -> str:
    """Say what the value at `path` of this model may be."""
    annotation, metadata = _type_at(model, path)
    return expected(annotation, metadata)


def choices_at(model: type[BaseModel], path: KeyPath) -> tuple[str, ...]:
    """The words that the value at `path` may be; empty if it is not one of a few words."""
    annotation, metadata = _type_at(model, path)
    found = [marker.words() for marker in _flatten_markers(metadata) if isinstance(marker, WordChoice)]
    return get_args(annotation) if get_origin(annotation) is Literal else next(iter(found), ())


def _type_at(model: type[BaseModel], path: KeyPath) -> tuple[Any, tuple[Any, ...]]:
    annotation: Any = model
    metadata: tuple[Any, ...] = ()
    for part in path:
        if isinstance(part, int):
            annotation, metadata = get_args(annotation)[part], ()
        elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
            field = annotation.model_fields[part]
            annotation, metadata = field.annotation, tuple(field.metadata)
    return annotation, metadata


def keys_at(model: type[BaseModel], path: KeyPath) -> tuple[str, ...]:
    """The keys of the table at `path`; empty if it is not a table with fixed keys."""
    annotation, _ = _type_at(model, path)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return tuple(annotation.model_fields)
    return ()


def known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of the model and of its tables, dotted: `seed`, `optimizer`, `optimizer.lr`, ..."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from known_keys(field.annotation, f"{prefix}{name}.")


class RecipeProblem(NamedTuple):
    """One thing that is wrong.

    Args:
        paths: the keys that are involved, the one to change first.
        message: what was expected and what was found.
        idle: the first key is right, but cannot act.
    """

    paths: tuple[KeyPath, ...]
    message: str
    idle: bool = False


class KeyConflict(NamedTuple):
    """Keys, dotted from one table on, that are right alone and wrong together; the one to change first.

    Args:
        idle: nothing is wrong but that the first cannot act.
    """

    fields: tuple[str, ...]
    message: str
    idle: bool = False


KeyLocator = Callable[[Sequence[KeyPath]], str]  # keys -> where the first of them was written


def value_error(message: str) -> PydanticCustomError:
    """The error that a validator raises to be shown word for word."""
    return PydanticCustomError("refused", "{message}", {"message": message})


def conflict_error(conflicts: Sequence[KeyConflict]) -> PydanticCustomError:
    """The error that a table raises for its conflicts."""
    return PydanticCustomError("conflicts", "fields do not agree", {"conflicts": tuple(conflicts)})


def expected_message(expectation: str, value: Any, words: Sequence[str] = ()) -> str:
    """Say what was expected and found, and which of `words` is near."""
    message = f"expected {expectation}, found {shown_value(value)}"
    near = closest_word(value, words) if isinstance(value, str) else None
    return f'{message}; did you mean "{near}"?' if near else message


def read_problems(error: ValidationError, model: type[BaseModel]) -> Iterator[RecipeProblem]:
    """The problems in what pydantic reports about `model`."""
    for item in error.errors(include_url=False):
        yield from _READERS.get(item["type"], _wrong_value)(item, model)


def recipe_error(
    problems: Sequence[RecipeProblem], locate: KeyLocator, kind: type[RecipeError]
) -> RecipeError:
    """One error for all problems, with the place of each.

    Args:
        problems: at least one.
        locate: says where the keys of a problem were written.
        kind: the class of the error.
    """
    if len(problems) == 1:
        problem = problems[0]
        return kind(_line(problem), where=locate(problem.paths))
    lines = [f"{locate(problem.paths)}: {_line(problem)}" for problem in problems]
    return kind("\n  ".join([f"{len(lines)} errors:", *lines]))


def _line(problem: RecipeProblem) -> str:
    key = dotted_key(problem.paths[0])
    return f"{key}: {problem.message}" if key else problem.message


def _wrong_value(item: ErrorDetails, model: type[BaseModel]) -> Iterator[RecipeProblem]:
    path, value = item["loc"], item["input"]
    message = expected_message(expected_at(model, path), value, choices_at(model, path))
    if item["type"] == "int_type" and isinstance(value, float) and value.is_integer():
        message += f"; write {int(value)}"
    yield RecipeProblem((path,), message)


def _no_text(item: ErrorDetails, model: type[BaseModel]) -> Iterator[RecipeProblem]:
    """A name of a file or folder that is not UTF-8, or that the locale of this process cannot say."""
    found = shown_value(item["input"])
    yield RecipeProblem(
        (item["loc"],), f"expected text in UTF-8, found {found}; rename it, or set PYTHONUTF8=1"
    )


def _missing(item: ErrorDetails, model: type[BaseModel]) -> Iterator[RecipeProblem]:
    path = item["loc"]
    yield RecipeProblem((path,), f"expected {expected_at(model, path)}, but it is missing")


def _unknown_key(item: ErrorDetails, model: type[BaseModel]) -> Iterator[RecipeProblem]:
    path = item["loc"]
    keys = keys_at(model, path[:-1])
    near = _closest_key(path, keys, model)
    advice = f"did you mean {near}?" if near else f"expected one of {', '.join(keys)}"
    yield RecipeProblem((path,), f"unknown key, found {shown_value(item['input'])}; {advice}")


def _closest_key(path: KeyPath, keys: Sequence[str], model: type[BaseModel]) -> str | None:
    """The key that was meant: in the same table, else of the same name anywhere, else of a near spelling."""
    known = tuple(known_keys(model))
    near = closest_word(str(path[-1]), keys)
    if near:
        return dotted_key((*path[:-1], near))
    elsewhere = [key for key in known if key.rpartition(".")[2] == path[-1]]
    return elsewhere[0] if elsewhere else closest_word(str(path[-1]), known)


def _read_refusal(item: ErrorDetails, model: type[BaseModel]) -> Iterator[RecipeProblem]:
    yield RecipeProblem((item["loc"],), item["msg"])


def _read_conflicts(item: ErrorDetails, model: type[BaseModel]) -> Iterator[RecipeProblem]:
    for fields, message, idle in item["ctx"]["conflicts"]:
        yield RecipeProblem(tuple((*item["loc"], *field.split(".")) for field in fields), message, idle)


_READERS = {
    "extra_forbidden": _unknown_key,
    "missing": _missing,
    "string_unicode": _no_text,
    "refused": _read_refusal,
    "conflicts": _read_conflicts,
}

NEEDS_HELD_OUT = "with held-out data"
_NEEDS_SUMS = "where several ranks sum gradients"
SESSION_NEEDS: Mapping[str, str] = MappingProxyType(
    {
        "batch.sync_batchnorm": "where the model has BatchNorm",
        "evaluate.every_steps": NEEDS_HELD_OUT,
        "evaluate.batch": NEEDS_HELD_OUT,
        "evaluate.max_samples": NEEDS_HELD_OUT,
        "security.tls": "with a server, or where a job has several nodes",
        "tensor": "where the strategy has tensor",
        "strategy.balance": "where several replicas share a batch",
        "strategy.codec": _NEEDS_SUMS,
        "strategy.route": "where several ranks send each other tensors",
        "runtime.bucket_bytes": _NEEDS_SUMS,
        "runtime.bucket_latency": "where ranks of several hosts sum gradients",
        "runtime.link_profile": "where ranks of several hosts sum gradients",
    }
)
"""When a key acts, of those that a recipe alone cannot tell."""


class FieldNeed(NamedTuple):
    """What a key needs to act.

    Args:
        of: the keys that decide, from the same table on, dotted.
        met: whether a table gives it.
        acts: when it acts, in a few words: "with workers".
        found: what was found instead; `{t}` is the table.
    """

    of: tuple[str, ...]
    met: Callable[[Any], bool]
    acts: str
    found: str

    def conflict(self, name: str, table: BaseModel) -> KeyConflict:
        """Of the key `name`, which is set and cannot act."""
        return KeyConflict(
            (name, *self.of), f"expected only {self.acts}, {self.found.format(t=table)}", idle=True
        )


def find_unmet_needs(table: Any) -> Iterator[KeyConflict]:
    """The keys of a table that are set and cannot act."""
    for name, need in table.needs.items():
        if not need.met(table) and get_value(table, name) != default_value(type(table), name):
            yield need.conflict(name, table)


def get_value(table: Any, key: str) -> Any:
    """The value of a dotted key."""
    for part in key.split("."):
        table = getattr(table, part)
    return table


def default_value(model: type[BaseModel], key: str) -> Any:
    """The default of a dotted key."""
    *tables, name = key.split(".")
    for part in tables:
        inside: Any = model.model_fields[part].annotation
        model = inside
    return model.model_fields[name].get_default(call_default_factory=True)


def need_text(model: type[BaseModel], key: str) -> str:
    """When a dotted key acts, in a few words; empty: always."""
    return next((need.acts for name, need in list_needs(model) if name == key), SESSION_NEEDS.get(key, ""))


def list_needs(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldNeed]]:
    """Every need of a model and of its tables, each by its dotted key."""
    for name, need in getattr(model, "needs", {}).items():
        yield prefix + name, need
    for name, field in model.model_fields.items():
        inside: Any = field.annotation
        if isinstance(inside, type) and issubclass(inside, BaseModel):
            yield from list_needs(inside, f"{prefix}{name}.")


class RecipeTable(BaseModel):
    """A frozen table of a recipe.

    Raises:
        RecipeError: a key is unknown or missing, or a value is of the wrong type, impossible, or does
            not agree with another; one error names them all.
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
    needs: ClassVar[Mapping[str, FieldNeed]] = {}

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
            values: a mapping of plain values (or what else this table accepts).
            locate: says where a key was written.
        Raises:
            RecipeError: as for the constructor, with these places.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise _to_recipe_error(error, cls, locate) from None

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated like a new one."""
        kept = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**kept, **changes})

    def conflicts(self) -> Iterator[KeyConflict]:
        """The fields of this table that do not agree; called when each of them is valid alone."""
        return iter(())

    @model_validator(mode="after")
    def _agree(self) -> Self:
        found = (*find_unmet_needs(self), *self.conflicts())
        if found:
            raise conflict_error(found)
        return self


def _to_recipe_error(error: ValidationError, model: type[RecipeTable], locate: KeyLocator) -> RecipeError:
    return recipe_error(tuple(read_problems(error, model)), locate, model.error_class)


def _constructor_locator(model: type[RecipeTable]) -> KeyLocator:
    def locate(paths: Sequence[KeyPath]) -> str:
        return f"{model.__name__}(...)"

    return locate
