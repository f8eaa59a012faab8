"""The base of every table of a recipe: frozen, strict, and wrong values are RecipeErrors.

Invariant: an instance that exists is valid. Types are not coerced (`"3"` and `true` are no integers);
only lists become tuples and integers become floats, because TOML and Python write them so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from paceline.errors import RecipeError
from paceline.recipe.acting import Need, find_idle
from paceline.recipe.problems import Conflict, Locate, in_conflict, problems_of, recipe_error
from paceline.recipe.spell import KeyPath


class Table(BaseModel):
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
    needs: ClassVar[Mapping[str, Need]] = {}

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _explain(error, type(self), _called(type(self))) from None

    # pydantic calls a custom __init__ for nested tables too, which would end validation at the first of
    # them; with this mark it builds nested tables itself, and all their errors arrive together.
    __init__.__dict__["__pydantic_base_init__"] = True

    @classmethod
    def read(cls, values: Any, locate: Locate) -> Self:
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
            raise _explain(error, cls, locate) from None

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated like a new one."""
        kept = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**kept, **changes})

    def conflicts(self) -> Iterator[Conflict]:
        """The fields of this table that do not agree; called when each of them is valid alone."""
        return iter(())

    @model_validator(mode="after")
    def _agree(self) -> Self:
        found = (*find_idle(self), *self.conflicts())
        if found:
            raise in_conflict(found)
        return self


def _explain(error: ValidationError, model: type[Table], locate: Locate) -> RecipeError:
    return recipe_error(tuple(problems_of(error, model)), locate, model.error_class)


def _called(model: type[Table]) -> Locate:
    def locate(paths: Sequence[KeyPath]) -> str:
        return f"{model.__name__}(...)"

    return locate
