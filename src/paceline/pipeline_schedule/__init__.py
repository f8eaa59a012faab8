"""Pipeline schedules as tables of actions: standard schedules, files and a simulation; without torch."""

from paceline.pipeline_schedule.schedule_formats import (
    describe_timeline,
    read_schedule_csv,
    render_svg,
    render_text,
    write_schedule_csv,
)
from paceline.pipeline_schedule.schedule_table import (
    ActionKey,
    PipelineAction,
    ScheduleFactory,
    ScheduleTable,
    ScheduleTimeline,
    TimelineRow,
    count_messages_by_source,
    max_messages_in_flight,
    next_chunk,
    overlapping_parts,
    part_samples,
    parts_divide_evenly,
    previous_chunk,
    simulate_schedule,
)
from paceline.pipeline_schedule.standard_schedules import (
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream_2bw,
    zero_bubble,
)

__all__ = [
    "ActionKey",
    "PipelineAction",
    "ScheduleFactory",
    "ScheduleTable",
    "ScheduleTimeline",
    "TimelineRow",
    "count_messages_by_source",
    "describe_timeline",
    "gpipe",
    "interleaved",
    "max_messages_in_flight",
    "next_chunk",
    "one_f_one_b",
    "overlapping_parts",
    "part_samples",
    "parts_divide_evenly",
    "pipedream_2bw",
    "previous_chunk",
    "read_schedule_csv",
    "render_svg",
    "render_text",
    "simulate_schedule",
    "write_schedule_csv",
    "zero_bubble",
]
