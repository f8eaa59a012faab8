"""The schema of the metrics: the page says what it is, and a record that does not fit is found."""

from typing import Any

import pytest

from paceline.observe.metrics_schema import (
    COMMON_FIELDS,
    EVENT_SCHEMAS,
    LEVELS,
    event_level,
    find_schema_errors,
    passes_level,
)
from tests.unit.observe.test_sinks import make_stats
from tools import metrics_page

RECORD = {"event": "warning", "level": "warning", "rank": 0, "time": 1.5, "text": "slow disk"}


@pytest.mark.capability("P2")
def test_the_page_is_what_the_schema_says() -> None:
    for place, text in metrics_page.pages().items():
        assert place.read_text(encoding="utf-8") == text, "run `make docs`"
    for name, event in EVENT_SCHEMAS.items():
        assert f"### `{name}`" in metrics_page.page()
        assert event.level in LEVELS and not event.fields.keys() & COMMON_FIELDS.keys()


def test_a_step_fits() -> None:
    assert find_schema_errors({"level": "info", "rank": 0, "time": 1.0, **make_stats().record()}) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"text": 1}, "warning.text is no str: 1"),
        ({"rank": True}, "warning.rank is no int: True"),
        ({"time": "now"}, "warning.time is no float: 'now'"),
        ({"color": "red"}, "warning has color, which the schema does not know"),
        ({"event": "step"}, "step lacks loss"),
        ({"event": "strange"}, "unknown event strange"),
    ],
)
def test_what_does_not_fit_is_said(changes: dict[str, Any], said: str) -> None:
    assert find_schema_errors(RECORD) == []
    assert said in find_schema_errors({**RECORD, **changes})


def test_a_field_that_is_missing_is_said() -> None:
    assert find_schema_errors({name: value for name, value in RECORD.items() if name != "text"}) == [
        "warning lacks text"
    ]


def test_numbers_that_are_not_finite_are_numbers() -> None:
    assert not find_schema_errors({**RECORD, "time": "inf"})
    assert find_schema_errors({**RECORD, "time": "infinite"})


def test_levels_are_ordered_and_what_nobody_named_is_information() -> None:
    assert event_level("strange") == "info"
    assert [event for event in ("cache", "step", "warning", "error") if passes_level(event, "warning")] == [
        "warning",
        "error",
    ]
    assert passes_level("cache", "debug") and not passes_level("cache", "info")
