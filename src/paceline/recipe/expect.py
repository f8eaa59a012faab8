"""What a recipe key expects, said in words: read off the types and bounds of the models, never repeated.

Invariant: pure functions of the model classes; a new field or bound needs no change here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel

from paceline.recipe.spell import KeyPath, spell


class Words(NamedTuple):
    """A marker in `Annotated`: says what the field expects where its type alone does not."""

    text: str


class OneOf(NamedTuple):
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
    metadata = tuple(_flat(metadata))
    for marker in metadata:
        if isinstance(marker, Words | OneOf):
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
    return "one of " + ", ".join(spell(value) for value in values)


def _flat(metadata: Iterable[Any]) -> Iterator[Any]:
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
    found = [marker.words() for marker in _flat(metadata) if isinstance(marker, OneOf)]
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
