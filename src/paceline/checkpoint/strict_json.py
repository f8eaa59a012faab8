"""Strict parsing of JSON that others may have written or damaged, and the seal of sealed tables.

Every way in which a value can be wrong is a ValueError. Values are validated by strict pydantic models: no
type is converted, and no unknown key is accepted. `validate` turns the first error of pydantic into a
sentence that names the place of the value.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

Count = Annotated[int, Field(ge=0, le=2**62)]
"""A whole number that fits 64 bits."""
Number = Annotated[float, Field(gt=-1e308, lt=1e308, allow_inf_nan=False)]
"""An integer or a finite float, but no bool."""
T = TypeVar("T")


class StrictModel(BaseModel):
    """The base of models that convert no value and accept no unknown key."""

    model_config = ConfigDict(strict=True, extra="forbid")


def parse(data: bytes | str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is no JSON, or is nested too deeply.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def seal(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a table of JSON values, in hexadecimal."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def validate(adapter: TypeAdapter[T], value: Any, what: str = "") -> T:
    """Return the validated value.

    Args:
        adapter: of the expected type.
        value: parsed JSON.
        what: name of the value, in front of the place of an error in it.
    Raises:
        ValueError: it is not of this type; names the first place that is wrong.
    """
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        # Not all errors are rendered: a damaged file can have as many as it has values.
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        position = "".join(f"[{key}]" if isinstance(key, int) else f".{key[:80]}" for key in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{what}{position}: {message}".lstrip(".:").strip()) from None
