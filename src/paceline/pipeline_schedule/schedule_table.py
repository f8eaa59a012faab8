"""Schedule tables: the order in which every stage runs its actions, and a simulation that checks a table.

A rank runs one stage, or several chunks of the model: chunk c of rank r is number c P + r of all v P chunks,
which follow each other in the model. A stage may run a micro-batch in parts, by its samples; its neighbours
may run it in more parts, or in fewer. Everything is a pure value, without torch.

In the simulation a forward takes 1 and a backward 2; where it is split, each half takes 1. A chunk of v
takes a v-th of that, and so does a part of v. Messages take no time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import NamedTuple

from paceline.errors import StrategyError, format_count

ActionKey = tuple[int, int, int]
"""Micro-batch, chunk and part."""


class PipelineAction(NamedTuple):
    """One action on one micro-batch; its inputs are received before it, and its outputs are sent after it.

    Args:
        kind: "F" for forward, "B" for backward, "W" for gradients of weights. If a stage has a W of the same
            micro-batch and chunk, its B computes only the gradients of the inputs.
        micro_batch: counted from 0 in a step, equally on every rank of a replica.
        chunk: index of the chunk on the rank.
        part: index of the part of the micro-batch.
    """

    kind: str
    micro_batch: int
    chunk: int = 0
    part: int = 0

    @property
    def place(self) -> ActionKey:
        """Micro-batch, chunk and part, which a forward and its backward share."""
        return self.micro_batch, self.chunk, self.part

    def ends(self, split: Collection[ActionKey]) -> bool:
        """Return whether this ends its micro-batch, given the actions whose backward is split."""
        return self.kind == "W" or (self.kind == "B" and self.place not in split)


@dataclass(frozen=True)
class ScheduleTable:
    """Order of actions of all stages.

    Args:
        orders: by stage, its actions in order.
        chunks: number of chunks of the model on each stage.
    """

    orders: Sequence[Sequence[PipelineAction]]
    chunks: int = 1

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.orders)

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches in a step."""
        return 1 + max((action.micro_batch for order in self.orders for action in order), default=-1)

    @property
    def parts(self) -> list[int]:
        """By stage, the number of parts in which it runs each micro-batch."""
        return [1 + max((action.part for action in order), default=0) for order in self.orders]

    @property
    def splits(self) -> bool:
        """Return whether backward passes are split into input gradients and weight gradients."""
        return any(action.kind == "W" for order in self.orders for action in order)

    def first(self, num_micro_batches: int) -> ScheduleTable:
        """Return the same table with fewer micro-batches: actions wait only for the same micro-batch."""
        orders = [[a for a in order if a.micro_batch < num_micro_batches] for order in self.orders]
        return ScheduleTable(orders, self.chunks)


ScheduleFactory = Callable[..., ScheduleTable]
"""Function of the numbers of stages and micro-batches, and of the word's argument if it has one."""


def previous_chunk(stage: int, action: PipelineAction, num_stages: int) -> tuple[int, PipelineAction] | None:
    """Return the stage and the forward whose output a forward needs, or None for the first chunk."""
    if stage > 0:
        return stage - 1, action
    # Chunks go around: the last stage hands on to the first, which runs the next chunk.
    return (num_stages - 1, action._replace(chunk=action.chunk - 1)) if action.chunk else None


def next_chunk(
    stage: int, action: PipelineAction, num_stages: int, chunks: int
) -> tuple[int, PipelineAction] | None:
    """Return the stage and the backward whose output a backward needs, or None for the last chunk."""
    if stage < num_stages - 1:
        return stage + 1, action
    return (0, action._replace(chunk=action.chunk + 1)) if action.chunk < chunks - 1 else None


def count_messages_by_source(table: ScheduleTable, stage: int) -> Mapping[int, int]:
    """Return how many messages each neighbour sends; empty if there are parts, which may be empty."""
    if max(table.parts) > 1:
        return {}
    sources = {
        "F": lambda action: previous_chunk(stage, action, table.num_stages),
        "B": lambda action: next_chunk(stage, action, table.num_stages, table.chunks),
    }
    senders = [sources[action.kind](action) for action in table.orders[stage] if action.kind in sources]
    return Counter(source[0] for source in senders if source is not None)


def max_messages_in_flight(table: ScheduleTable, stage: int, to: int) -> int:
    """Return the most messages of a stage that another may not have received yet, by the orders of both.

    These are outputs whose gradient has not returned, and gradients for which the other stage has not run its
    backward.
    """
    num_parts = table.parts[stage]
    return _max_open_forwards(table, stage, to, num_parts) + _max_open_forwards(table, to, stage, num_parts)


def _max_open_forwards(table: ScheduleTable, stage: int, receiver: int, num_parts: int) -> int:
    """Return the largest number of forward passes sent to `receiver` whose backward pass has not run yet.

    Args:
        num_parts: number of parts of a micro-batch in which they are counted.
    """
    open_places, most = set[ActionKey](), 0
    for action in table.orders[stage]:
        next_action = (
            next_chunk(stage, action, table.num_stages, table.chunks) if action.kind in ("F", "B") else None
        )
        if next_action is None or next_action[0] != receiver:
            continue
        part_range = overlapping_parts(action.part, table.parts[stage], num_parts)
        places = {action._replace(part=part).place for part in part_range}
        # A backward that returns shows that the forward was received, so no acknowledgement is counted.
        open_places = open_places | places if action.kind == "F" else open_places - places
        most = max(most, len(open_places))
    return most


def overlapping_parts(part: int, num_parts: int, num_other_parts: int) -> range:
    """Return which parts of a neighbour share samples with a part of this stage."""
    return range(part * num_other_parts // num_parts, -(-(part + 1) * num_other_parts // num_parts))


def part_samples(num_samples: int, num_parts: int, part: int) -> range:
    """Return the samples of a part; with fewer samples than parts, some are empty, but never the last."""
    return range(num_samples * part // num_parts, num_samples * (part + 1) // num_parts)


def parts_divide_evenly(parts_by_stage: Sequence[int]) -> bool:
    """Return whether neighbours can join or divide each other's parts by an integer."""
    return all(max(pair) % min(pair) == 0 for pair in pairwise(parts_by_stage))


_NEXT_STEP = 'fix the rows; "paceline schedule show gpipe --csv FILE" writes a valid schedule'


class TimelineRow(NamedTuple):
    """One action on the time axis."""

    time: float
    stage: int
    operation: str
    micro_batch: int
    chunk: int
    part: int
    seconds: float


@dataclass(frozen=True)
class ScheduleTimeline:
    """Timeline of a schedule that can run.

    Args:
        rows: actions in order of time.
        total: time until the last stage has ended; 1 is the time of a forward of one stage.
        in_flight: by stage, the most micro-batches whose activations it keeps at a time, from the forward to
            the end of the backward. Each of v chunks counts a v-th, and so does a part of v.
    """

    rows: Sequence[TimelineRow]
    total: float
    in_flight: Sequence[float]

    @property
    def bubble(self) -> float:
        """Share of the time in which stages are idle, from 0 to 1."""
        busy = sum(row.seconds for row in self.rows)
        return 1.0 - busy / (self.total * len(self.in_flight)) if self.total else 0.0


@dataclass(frozen=True)
class MeasuredSchedule:
    """A step of a pipeline as it was planned and as it ran.

    Args:
        planned: of all stages.
        measured: actions that this rank ran, in their order; times in seconds, of `time.perf_counter`. An
            action begins when its inputs are there, and ends when its outputs are handed to the transport.
    """

    planned: ScheduleTimeline
    measured: Sequence[TimelineRow]


def join_measured(rows: Sequence[TimelineRow], planned: ScheduleTimeline) -> ScheduleTimeline:
    """Return the timeline of what was measured on all stages; the first action begins at 0.

    Args:
        rows: of all stages; at least one.
        planned: for what stages keep in memory, which follows from the order.
    """
    first = min(row.time for row in rows)
    moved = sorted(row._replace(time=row.time - first) for row in rows)
    return ScheduleTimeline(moved, max(row.time + row.seconds for row in moved), planned.in_flight)


def simulate_schedule(table: ScheduleTable, num_micro_batches: int) -> ScheduleTimeline:
    """Simulate a schedule and return its timeline.

    Raises:
        StrategyError: an action is missing or occurs twice, forwards are out of order, a backward comes
            before its forward, parts of neighbours do not fit together, or stages wait for each other.
    """
    parts_by_stage = table.parts
    _require_divisible_parts(table, parts_by_stage)
    split = [_require_complete(table, parts_by_stage, s, num_micro_batches) for s in range(table.num_stages)]
    ends: EndTimes = {}
    clocks, done = [0.0] * table.num_stages, [0] * table.num_stages
    rows: list[TimelineRow] = []
    while ready := _ready_stages(table, parts_by_stage, done, ends):
        for stage, starts in ready:
            action = table.orders[stage][done[stage]]
            seconds = _action_seconds(action, split[stage]) / (table.chunks * parts_by_stage[stage])
            start = max(starts, clocks[stage])
            clocks[stage] = ends[stage, action] = start + seconds
            rows.append(TimelineRow(start, stage, *action, seconds))
            done[stage] += 1
    stuck = [(s, table.orders[s][n]) for s, n in enumerate(done) if n < len(table.orders[s])]
    if stuck:
        waits = ", ".join(f"stage {s} at {_describe_action(a, parts_by_stage[s])}" for s, a in stuck)
        raise StrategyError(f"the schedule's stages wait for each other: {waits}", next_step=_NEXT_STEP)
    in_flight = [
        _max_in_flight(order, splits) / (table.chunks * n)
        for order, splits, n in zip(table.orders, split, parts_by_stage, strict=True)
    ]
    return ScheduleTimeline(sorted(rows), max(clocks), in_flight)


EndTimes = dict[tuple[int, PipelineAction], float]
"""End time of an action, by stage and action."""


def _ready_stages(
    table: ScheduleTable, parts_by_stage: Sequence[int], done: Sequence[int], ends: EndTimes
) -> list[tuple[int, float]]:
    """Return the stages whose next action has its inputs, and since when."""
    ready = []
    for stage, order in enumerate(table.orders):
        if done[stage] < len(order):
            since = _inputs_ready_at(table, parts_by_stage, stage, order[done[stage]], ends)
            ready += [] if since is None else [(stage, since)]
    return ready


def _inputs_ready_at(
    table: ScheduleTable, parts_by_stage: Sequence[int], stage: int, action: PipelineAction, ends: EndTimes
) -> float | None:
    """Return the time at which the inputs of an action are complete, or None if they are not."""
    if action.kind == "F":
        source = previous_chunk(stage, action, table.num_stages)
    elif action.kind == "B":
        source = next_chunk(stage, action, table.num_stages, table.chunks)
    else:
        source = None
    if source is None:
        return 0.0
    source_stage, wanted = source
    part_range = overlapping_parts(action.part, parts_by_stage[stage], parts_by_stage[source_stage])
    end_times = [ends.get((source_stage, wanted._replace(part=source_part))) for source_part in part_range]
    return None if None in end_times else max(end for end in end_times if end is not None)


def _require_divisible_parts(table: ScheduleTable, parts_by_stage: Sequence[int]) -> None:
    """Require that parts of neighbours can be joined or divided.

    Chunks go around, so the last stage is a neighbour of the first.
    """
    if not parts_divide_evenly([*parts_by_stage, *parts_by_stage[: int(table.chunks > 1)]]):
        raise StrategyError(
            f"stages run micro-batches in {', '.join(map(str, parts_by_stage))} parts, and those of"
            " neighbours cannot be divided or joined by an integer",
            next_step="choose numbers of which each is a multiple or a divisor of its neighbours'",
        )


def _require_complete(
    table: ScheduleTable, parts_by_stage: Sequence[int], stage: int, num_micro_batches: int
) -> set[ActionKey]:
    """Check that a stage runs every action once and in order; return the backward passes that it splits.

    Raises:
        StrategyError: an action is missing or out of order.
    """
    order, num_parts = table.orders[stage], parts_by_stage[stage]
    at = {action: number for number, action in enumerate(order)}
    keys = [*product(range(num_micro_batches), range(table.chunks), range(num_parts))]
    wanted = {PipelineAction(kind, *key) for kind in "FB" for key in keys}
    split = {a.place for a in order if a.kind == "W"}
    # Fewer keys than actions: one occurs twice.
    if len(at) < len(order) or {a for a in at if a.kind != "W"} != wanted or not split <= {*keys}:
        raise StrategyError(
            f"the schedule of stage {stage} does not run each of"
            f" {format_count(num_micro_batches, 'micro-batch')} forward and backward"
            f" once{f' in each of {table.chunks} chunks' if table.chunks > 1 else ''}"
            f"{f' in each of {num_parts} parts' if num_parts > 1 else ''}",
            next_step=_NEXT_STEP,
        )
    for key in keys:
        positions = [at[PipelineAction(kind, *key)] for kind in "FBW" if kind != "W" or key in split]
        if positions != sorted(positions):
            raise StrategyError(
                f"the schedule of stage {stage} runs micro-batch {key[0]} of chunk {key[1]} backward"
                " before forward, or computes gradients of weights before those of the inputs",
                next_step=_NEXT_STEP,
            )
    _require_ascending(order, stage)
    _require_parts_in_order(order, split, stage, num_parts)
    return split


def _require_ascending(order: Sequence[PipelineAction], stage: int) -> None:
    forwards = [(a.chunk, a.micro_batch, a.part) for a in order if a.kind == "F"]
    # The sort is stable, so within a chunk it keeps the order in which the stage runs them.
    if sorted(forwards, key=lambda entry: entry[0]) != sorted(forwards):
        raise StrategyError(
            f"the schedule of stage {stage} runs forward passes out of order: give the micro-batch that comes"
            " first the smaller number",
            next_step=_NEXT_STEP,
        )


def _require_parts_in_order(
    order: Sequence[PipelineAction], split: set[ActionKey], stage: int, num_parts: int
) -> None:
    """Require that the parts of a micro-batch end one after another, before those of the next begin.

    The gradient of a micro-batch is complete with its last part.
    """
    ends = sorted((a for a in order if a.ends(split)), key=lambda a: a.chunk)
    if [a.part for a in ends] != [*range(num_parts)] * (len(ends) // num_parts) or any(
        len({a.micro_batch for a in ends[k : k + num_parts]}) > 1 for k in range(0, len(ends), num_parts)
    ):
        raise StrategyError(
            f"the schedule of stage {stage} interleaves the backward passes of parts of different"
            " micro-batches, or runs those of one micro-batch out of order",
            next_step="end the parts of a micro-batch one after another, from the first to the last",
        )


def _describe_action(action: PipelineAction, num_parts: int) -> str:
    suffix = f".{action.part}" if num_parts > 1 else ""
    return f"{action.kind}{action.micro_batch}{suffix} of chunk {action.chunk}"


def _action_seconds(action: PipelineAction, split: set[ActionKey]) -> float:
    # A backward computes two products for each of the forward: gradients of inputs and of weights.
    return 2.0 if action.kind == "B" and action.place not in split else 1.0


def _max_in_flight(order: Sequence[PipelineAction], split: set[ActionKey]) -> int:
    held = most = 0
    for action in order:
        held += (action.kind == "F") - action.ends(split)
        most = max(most, held)
    return most
