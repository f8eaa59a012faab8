"""The pictures of a pipeline in the report: a step as its schedule plans it, and as it ran. Pure.

Both have the same colours and the same scale: a unit of the plan is as wide as it took on average, so that
all boxes together are equally long in both, and a longer picture has more idle time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from paceline.pipeline_schedule.schedule_formats import PictureScale, render_svg
from paceline.pipeline_schedule.schedule_table import ScheduleTimeline, TimelineRow
from paceline.report.html import Html, join, tag
from paceline.report.number_format import format_duration, format_percent
from paceline.report.run_reader import RecordedRun

_MAX_ROWS = 4096
_MAX_STAGES = 256
_PIXELS = 960.0  # of the longer picture
_NOTE = (
    "The planned picture is the table of the schedule, in which a backward takes as long as two forwards and"
    " messages take no time. The measured one is a step of the first replica, in which an action begins when"
    " its inputs have arrived. On several hosts, rows are as exact as the clocks of the hosts agree; on a GPU"
    " these are times of the host."
)


def render_pipeline(run: RecordedRun) -> Html:
    """Return the last step that was measured of a pipeline, planned and measured; nothing without one."""
    timelines = [record for record in run.of("timeline") if type(record.get("step")) is int]
    if not timelines:
        return Html("")
    planned, measured = (_parse_timeline(timelines[-1].get(name)) for name in ("planned", "measured"))
    if planned is None or measured is None or len(planned.in_flight) != len(measured.in_flight):
        return Html("")
    unit = _busy(measured) / _busy(planned)
    width = max(measured.total, planned.total * unit)
    measured_caption = f"idle: {format_percent(measured.bubble)} of {format_duration(measured.total)}"
    pictures = [
        render_svg(
            planned,
            "planned",
            caption=f"idle: {format_percent(planned.bubble)} of {format_duration(planned.total * unit)}",
            scale=PictureScale(_PIXELS * unit / width, width / unit),
        ),
        render_svg(
            measured,
            f"measured in step {timelines[-1]['step']}",
            caption=measured_caption,
            scale=PictureScale(_PIXELS / width, width),
        ),
    ]
    cards = [tag("div", Html(picture), class_="card words") for picture in pictures]
    return join([tag("h2", "Pipeline schedule"), cards, tag("p", _NOTE, class_="note")])


def _busy(timeline: ScheduleTimeline) -> float:
    return sum(row.seconds for row in timeline.rows)


def _parse_timeline(rows: Any) -> ScheduleTimeline | None:
    """Return the timeline of an event, or None if it is not one that a run writes."""
    if type(rows) is not list or not 0 < len(rows) <= _MAX_ROWS or not all(map(_is_row, rows)):
        return None
    parsed = sorted(TimelineRow(*row) for row in rows)
    total = max(row.time + row.seconds for row in parsed)
    timeline = ScheduleTimeline(parsed, total, [0.0] * (1 + max(row.stage for row in parsed)))
    return timeline if _busy(timeline) > 0 else None


def _is_row(row: Any) -> bool:
    if type(row) is not list or len(row) != len(TimelineRow._fields):
        return False
    time, stage, operation, *counts, seconds = row
    return (
        _are_counts([stage, *counts])
        and stage < _MAX_STAGES
        and type(operation) is str
        and operation in ("F", "B", "W")
        and all(type(x) in (int, float) and math.isfinite(x) and 0 <= x < 1e9 for x in (time, seconds))
    )


def _are_counts(values: Sequence[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 10**6 for value in values)
