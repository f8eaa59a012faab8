"""How many messages one stage may have sent that another has not taken: counted beside the slowest reader."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from paceline.pipeline_schedule import (
    PipelineAction,
    ScheduleTable,
    gpipe,
    interleaved,
    max_messages_in_flight,
    next_chunk,
    one_f_one_b,
    overlapping_parts,
    previous_chunk,
    zero_bubble,
)

Sent = tuple[int, int, PipelineAction]
"""From which stage to which, and the operation that needs it, with the part of the sender."""

TABLES = {
    "gpipe": [gpipe(p, m) for p, m in product((2, 3, 4), (1, 2, 5, 8))],
    "1f1b": [one_f_one_b(p, m) for p, m in product((2, 3, 4), (1, 2, 5, 8))],
    "zero-bubble": [zero_bubble(p, m) for p, m in product((2, 4), (2, 8))],
    "interleaved": [interleaved(p, m, "2") for p, m in ((2, 2), (2, 4), (3, 6), (4, 8))],
    "rechunk": [one_f_one_b(len(parts), 5, parts) for parts in ((1, 2), (2, 1), (1, 2, 4), (4, 2, 2))],
}


def sent_by(table: ScheduleTable, stage: int, action: PipelineAction) -> Sent | None:
    if action.kind == "W":
        return None
    if action.kind == "F":
        there = next_chunk(stage, action, table.num_stages, table.chunks)
    else:
        there = previous_chunk(stage, action, table.num_stages)
    return None if there is None else (stage, *there)


def needed_by(table: ScheduleTable, stage: int, action: PipelineAction) -> Iterator[Sent]:
    if action.kind == "W":
        return
    if action.kind == "F":
        there = previous_chunk(stage, action, table.num_stages)
    else:
        there = next_chunk(stage, action, table.num_stages, table.chunks)
    if there is not None:
        for part in overlapping_parts(action.part, table.parts[stage], table.parts[there[0]]):
            yield there[0], stage, action._replace(part=part)


def most_untaken(table: ScheduleTable, stage: int, to: int) -> int:
    """All stages run as far as they can before the reader does anything."""
    done, sent, taken, most = [0] * table.num_stages, set[Sent](), set[Sent](), 0

    def step(number: int) -> bool:
        if done[number] == len(table.orders[number]):
            return False
        action = table.orders[number][done[number]]
        needed = set(needed_by(table, number, action))
        if not needed <= sent:
            return False
        taken.update(needed)
        sent.update({sent_by(table, number, action)} - {None})
        done[number] += 1
        return True

    goes_on = True
    while goes_on:
        while any(step(number) for number in range(table.num_stages) if number != to):
            pass
        most = max(most, sum(one[:2] == (stage, to) for one in sent - taken))
        goes_on = step(to)
    assert done == [len(order) for order in table.orders]
    return most


def ways(table: ScheduleTable) -> Iterator[tuple[int, int]]:
    return ((a, b) for a, b in product(range(table.num_stages), repeat=2) if a != b)


@pytest.mark.capability("D1", "L3")
@pytest.mark.parametrize("name", TABLES)
def test_no_more_messages_are_on_the_way_than_the_table_says(name: str) -> None:
    """And beside a slow reader so many are, where no chunk waits for another of its stage."""
    for table in TABLES[name]:
        for way in ways(table):
            most, said = most_untaken(table, *way), max_messages_in_flight(table, *way)
            assert most == said if name in ("gpipe", "1f1b", "zero-bubble") else most <= said, (table, way)
