"""Whether a record that was read can be what a run has written: a crash or a bad disk may have changed it.

Invariant: whatever the report computes with is there and of its kind; other fields may be missing or unknown,
as in runs of an older or a newer version.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from paceline.observe.phases import PHASES
from paceline.observe.schema import EVENTS

_LARGEST = 2**53
_LATEST = 4e9  # seconds since the epoch
_MOST_LETTERS = 10_000
_NAMES = ("nan", "inf", "-inf")

Kind = Callable[[Any], bool]


def is_sound(record: Mapping[str, Any]) -> bool:
    """Whether the report can use a record."""
    event = record.get("event")
    if type(event) is not str or not all(_plain(value) for value in record.values()):
        return False
    common = _optional(record, "time", _moment) and _optional(record, "rank", _count)
    return (
        common
        and all(kind(record.get(name)) for name, kind in _NEEDED.get(event, {}).items())
        and all(_typed(record[name], words) for name, words in _fields(event).items() if name in record)
    )


def is_certificate(found: Mapping[str, Any]) -> bool:
    """Whether the report can use a certificate."""
    return type(found.get("conclusion")) is str and bool(found["conclusion"].strip()) and _plain(dict(found))


def _fields(event: str) -> Mapping[str, str]:
    return EVENTS[event].fields if event in EVENTS else {}


def _typed(value: Any, words: str) -> bool:
    """As the schema says it."""
    kinds = {"int": _count, "float": _loose, "str": _text, "bool": _truth, "table": _table, "list": _list}
    return kinds[words.partition(":")[0]](value)


def _plain(value: Any, depth: int = 6) -> bool:
    """No number that cannot be computed with, no text without end, no nesting without end."""
    if depth == 0:
        return False
    if type(value) is dict:
        return all(_plain(inside, depth - 1) for inside in value.values())
    if type(value) is list:
        return all(_plain(inside, depth - 1) for inside in value)
    return (
        len(value) <= _MOST_LETTERS if type(value) is str else type(value) is not int or abs(value) < _LARGEST
    )


def _optional(record: Mapping[str, Any], name: str, kind: Kind) -> bool:
    return name not in record or kind(record[name])


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < 1e100


def _amount(value: Any) -> bool:
    return _number(value) and value >= 0


def _moment(value: Any) -> bool:
    return _amount(value) and value < _LATEST


def _loose(value: Any) -> bool:
    """A number, or the name of one that is not finite."""
    return _number(value) or value in _NAMES


def _text(value: Any) -> bool:
    return type(value) is str


def _truth(value: Any) -> bool:
    return type(value) is bool


def _table(value: Any) -> bool:
    return type(value) is dict


def _list(value: Any) -> bool:
    return type(value) is list


def _means(value: Any) -> bool:
    return _table(value) and all(map(_loose, value.values()))


def _phases(value: Any) -> bool:
    return (
        _table(value)
        and all(_amount(value.get(phase)) for phase in PHASES)
        and all(map(_amount, value.values()))
    )


def _books(value: Any) -> bool:
    kinds = {"calls": _count, "payload_bytes": _amount, "sent_bytes": _amount, "hidden_fraction": _amount}
    return _table(value) and all(
        _table(row) and all(kind(row.get(name)) for name, kind in kinds.items()) for row in value.values()
    )


def _some(value: Any) -> bool:
    return _count(value) and value > 0


_NEEDED: Mapping[str, Mapping[str, Kind]] = {
    "run": {
        **dict.fromkeys(("step", "num_steps", "parameters", "gradient_bytes", "tally_bytes"), _count),
        **dict.fromkeys(("strategy", "devices", "host"), _text),
        "ranks": _some,
        "ordered": _truth,
        "versions": _table,
    },
    "step": {
        **dict.fromkeys(("step", "num_samples"), _count),
        **dict.fromkeys(("loss", "grad_norm", "lr"), _loose),
        **dict.fromkeys(("seconds", "samples_per_second"), _amount),
        "metrics": _means,
        "applied": _truth,
    },
    "ranks": {
        **dict.fromkeys(("step", "rank"), _count),
        **dict.fromkeys(
            ("seconds", "slowest_seconds", "waiting_seconds", "hidden_seconds", "sent_bytes"), _amount
        ),
        **dict.fromkeys(("cpu_seconds", "peak_bytes"), _amount),
        "rounds": _some,
        "phases": _phases,
    },
    "evaluation": {"step": _count, "loss": _loose, "metrics": _means},
    "communication": {"rows": _books},
    "end": {"step": _count},
}
