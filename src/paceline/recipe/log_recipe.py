"""The table `[log]` of a recipe: what a run logs, and where to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from paceline.recipe.constraints import WIRE_NEEDS
from paceline.recipe.registry import SinkSpec, known_specs
from paceline.recipe.registry.sink_specs import check_sinks, complete_sinks
from paceline.recipe.strategy_text import check_word
from paceline.recipe.tables import STEP_RANGE_EXPECTED, check_step_range
from paceline.recipe.toml_text import toml_value
from paceline.recipe.validation import ExpectedText, RecipeTable, WordChoice, value_error

_MIN_SAMPLE_SECONDS = 0.1


def _sinks() -> tuple[str, ...]:
    return tuple(known_specs(SinkSpec))


def _check_sinks(words: Sequence[str]) -> tuple[str, ...]:
    if problem := check_sinks(words):
        raise value_error(problem)
    return complete_sinks(words)


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT"; an IPv6 address is in brackets.

    Raises:
        ValueError: it has another form.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not host or not (port.isascii() and port.isdecimal() and int(port) < 2**16):
        raise ValueError(text)
    return host, int(port)


def check_address(text: str) -> str:
    """Check "HOST:PORT", for a field of a recipe."""
    try:
        split_address(text)
    except ValueError:
        raise value_error(f'expected HOST:PORT, as "127.0.0.1:9400", found {toml_value(text)}') from None
    return text


def _check_sample_seconds(seconds: float) -> float:
    if 0 < seconds < _MIN_SAMPLE_SECONDS:
        raise value_error(f"expected 0 or at least {_MIN_SAMPLE_SECONDS}, found {seconds}")
    return seconds


class LogRecipe(RecipeTable):
    """The log files of a run: `metrics.jsonl` for programs, `log.txt` for people."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description='the lowest level in log.txt; "debug" adds records to metrics.jsonl'
    )
    rotate_bytes: int = Field(
        default=64 * 2**20, ge=0, description="size at which a new file begins; 0: one file"
    )
    sinks: Annotated[
        tuple[Annotated[str, AfterValidator(lambda s: check_word(s, SinkSpec)), WordChoice(_sinks)], ...],
        AfterValidator(_check_sinks),
    ] = Field(
        default=("jsonl", "text", "terminal"),
        strict=False,
        description="where steps and events go; jsonl is always among them",
    )
    prometheus: Annotated[str, AfterValidator(check_address)] | None = Field(
        default=None,
        description='"HOST:PORT" at which Prometheus scrapes the run; port 0: any; left out: no exporter',
    )
    sample_seconds: Annotated[float, AfterValidator(_check_sample_seconds)] = Field(
        default=0.0,
        ge=0,
        description="time between two samples of CPU, memory, network, disk and GPU; 0: no sampler",
    )
    wire: Annotated[bool, *WIRE_NEEDS] = Field(
        default=False,
        description="list every message of network clients in wire.jsonl: kind, fields, shapes and bytes",
    )
    trace: Annotated[str | None, AfterValidator(check_step_range), ExpectedText(STEP_RANGE_EXPECTED)] = Field(
        default=None,
        description='steps whose spans every rank records for `paceline trace`, as "10:13"; left out: those'
        " that it asks for",
    )
