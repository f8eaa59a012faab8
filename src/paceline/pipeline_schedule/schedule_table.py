"""What a schedule is: for every stage, in which order it runs which operation of which micro-batch.

A rank runs one stage, or several chunks of the model: chunk c of rank r is number c P + r of all v P chunks,
which follow each other in the model. A stage may run a micro-batch in parts, by its samples; its neighbours
may run it in more, or in fewer. Pure values, without torch.

Run a schedule without doing anything: that it can run, how long it takes, and what it keeps.

A forward takes 1, a backward 2; where it is split, 1 for each half; a chunk of v takes a v-th of it, and so
does a part of v. What travels takes no time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import NamedTuple

from paceline.errors import StrategyError

ActionKey = tuple[int, int, int]
"""Micro-batch, chunk and part."""


class PipelineAction(NamedTuple):
    """One operation on one micro-batch; what it needs is received before it, what it makes is sent after it.

    Args:
        kind: "F" forward; "B" backward; "W" gradients of weights. Where a stage has a W of the same
            micro-batch and chunk, its B makes the gradients of what came in only.
        micro_batch: counted from 0 in a step, on every rank of a replica alike.
        chunk: which of the rank's chunks.
        part: which of the parts in which the stage runs a micro-batch.
    """

    kind: str
    micro_batch: int
    chunk: int = 0
    part: int = 0

    @property
    def place(self) -> ActionKey:
        """Micro-batch, chunk and part: what a forward and its backward have in common."""
        return self.micro_batch, self.chunk, self.part

    def ends(self, split: Collection[ActionKey]) -> bool:
        """Whether it is the last of its micro-batch there, if these backwards are split."""
        return self.kind == "W" or (self.kind == "B" and self.place not in split)


@dataclass(frozen=True)
class ScheduleTable:
    """A schedule.

    Args:
        orders: by stage, what it does one after another.
        chunks: how many chunks of the model each stage has.
    """

    orders: Sequence[Sequence[PipelineAction]]
    chunks: int = 1

    @property
    def num_stages(self) -> int:
        """Ranks of a pipeline."""
        return len(self.orders)

    @property
    def num_micro_batches(self) -> int:
        """In a step."""
        return 1 + max((action.micro_batch for order in self.orders for action in order), default=-1)

    @property
    def parts(self) -> list[int]:
        """By stage, in how many parts it runs each micro-batch."""
        return [1 + max((action.part for action in order), default=0) for order in self.orders]

    @property
    def splits(self) -> bool:
        """Whether a backward is split into the gradients of inputs and those of weights."""
        return any(action.kind == "W" for order in self.orders for action in order)

    def first(self, num_micro_batches: int) -> ScheduleTable:
        """The same for fewer micro-batches: whatever waits for whom is inside one micro-batch."""
        kept = [[a for a in order if a.micro_batch < num_micro_batches] for order in self.orders]
        return ScheduleTable(kept, self.chunks)


ScheduleFactory = Callable[..., ScheduleTable]
"""From numbers of stages and of micro-batches; and what stands behind the colon of its word, if anything."""


def previous_chunk(stage: int, action: PipelineAction, num_stages: int) -> tuple[int, PipelineAction] | None:
    """Stage and forward whose result a forward needs; None: it is the first."""
    if stage > 0:
        return stage - 1, action
    return (num_stages - 1, action._replace(chunk=action.chunk - 1)) if action.chunk else None


def next_chunk(
    stage: int, action: PipelineAction, num_stages: int, chunks: int
) -> tuple[int, PipelineAction] | None:
    """Stage and backward whose result a backward needs; None: it is the last chunk's."""
    if stage < num_stages - 1:
        return stage + 1, action
    return (0, action._replace(chunk=action.chunk + 1)) if action.chunk < chunks - 1 else None


def count_messages_by_source(table: ScheduleTable, stage: int) -> Mapping[int, int]:
    """By neighbour, how many messages it sends; nothing where there are parts, which may be empty."""
    if max(table.parts) > 1:
        return {}
    sources = {
        "F": lambda action: previous_chunk(stage, action, table.num_stages),
        "B": lambda action: next_chunk(stage, action, table.num_stages, table.chunks),
    }
    found = [sources[action.kind](action) for action in table.orders[stage] if action.kind in sources]
    return Counter(source[0] for source in found if source is not None)


def max_messages_in_flight(table: ScheduleTable, stage: int, to: int) -> int:
    """The most messages of one stage that another may not have taken yet; the order of both says so.

    Forwards of which no gradient has come back, and gradients of forwards that the other has not followed up.
    """
    own = table.parts[stage]
    return _max_open_forwards(table, stage, to, own) + _max_open_forwards(table, to, stage, own)


def _max_open_forwards(table: ScheduleTable, stage: int, there: int, parts: int) -> int:
    """The most forwards of a stage that went on to another and whose backward has not been.

    Args:
        parts: in how many of a micro-batch they are counted.
    """
    open_places, most = set[ActionKey](), 0
    for action in table.orders[stage]:
        then = (
            next_chunk(stage, action, table.num_stages, table.chunks) if action.kind in ("F", "B") else None
        )
        if then is None or then[0] != there:
            continue
        found = overlapping_parts(action.part, table.parts[stage], parts)
        places = {action._replace(part=part).place for part in found}
        open_places = open_places | places if action.kind == "F" else open_places - places
        most = max(most, len(open_places))
    return most


def overlapping_parts(part: int, own: int, theirs: int) -> range:
    """Which parts of a neighbour, who has so many, have samples of one of the own parts."""
    return range(part * theirs // own, -(-(part + 1) * theirs // own))


def part_samples(num_samples: int, parts: int, part: int) -> range:
    """The samples of a part. With fewer samples than parts the first are empty; the last never is."""
    return range(num_samples * part // parts, num_samples * (part + 1) // parts)


def parts_divide_evenly(parts: Sequence[int]) -> bool:
    """Whether neighbours can join each other's parts, or divide them, by an integer."""
    return all(max(pair) % min(pair) == 0 for pair in pairwise(parts))


_NEXT_STEP = 'repair the rows; "paceline schedule show gpipe --csv FILE" writes some that are right'


class TimelineRow(NamedTuple):
    """One operation in time."""

    time: float
    stage: int
    operation: str
    micro_batch: int
    chunk: int
    part: int
    seconds: float


@dataclass(frozen=True)
class ScheduleTimeline:
    """What is known of a schedule that can run.

    Args:
        rows: in the order of time.
        total: until the last stage has ended; 1 is the time of a forward of one stage.
        in_flight: by stage, the most micro-batches (of v chunks each counts a v-th, and so does a part of v)
            whose activations it keeps at a time: from the forward to the end of the backward.
    """

    rows: Sequence[TimelineRow]
    total: float
    in_flight: Sequence[float]

    @property
    def bubble(self) -> float:
        """Share of the time in which a stage is idle, from 0 to 1, over all stages."""
        busy = sum(row.seconds for row in self.rows)
        return 1.0 - busy / (self.total * len(self.in_flight)) if self.total else 0.0


def simulate_schedule(table: ScheduleTable, num_micro_batches: int) -> ScheduleTimeline:
    """Run it.

    Raises:
        StrategyError: an operation is missing or twice, forwards are out of order, a backward comes before
            its forward, parts of neighbours do not fit together, or stages wait for each other.
    """
    parts = table.parts
    _require_divisible_parts(table, parts)
    split = [_require_complete(table, parts, s, num_micro_batches) for s in range(table.num_stages)]
    ends: EndTimes = {}
    clocks, done = [0.0] * table.num_stages, [0] * table.num_stages
    rows: list[TimelineRow] = []
    while moved := _ready_stages(table, parts, done, ends):
        for stage, starts in moved:
            action = table.orders[stage][done[stage]]
            seconds = _action_seconds(action, split[stage]) / (table.chunks * parts[stage])
            start = max(starts, clocks[stage])
            clocks[stage] = ends[stage, action] = start + seconds
            rows.append(TimelineRow(start, stage, *action, seconds))
            done[stage] += 1
    stuck = [(s, table.orders[s][n]) for s, n in enumerate(done) if n < len(table.orders[s])]
    if stuck:
        waits = ", ".join(f"stage {s} at {_describe_action(a, parts[s])}" for s, a in stuck)
        raise StrategyError(f"the schedule's stages wait for each other: {waits}", next_step=_NEXT_STEP)
    kept = [
        _max_in_flight(order, splits) / (table.chunks * n)
        for order, splits, n in zip(table.orders, split, parts, strict=True)
    ]
    return ScheduleTimeline(sorted(rows), max(clocks), kept)


EndTimes = dict[tuple[int, PipelineAction], float]
"""When an operation of a stage has ended."""


def _ready_stages(
    table: ScheduleTable, parts: Sequence[int], done: Sequence[int], ends: EndTimes
) -> list[tuple[int, float]]:
    """Stages whose next operation has what it needs, and since when."""
    found = []
    for stage, order in enumerate(table.orders):
        if done[stage] < len(order):
            since = _inputs_ready_at(table, parts, stage, order[done[stage]], ends)
            found += [] if since is None else [(stage, since)]
    return found


def _inputs_ready_at(
    table: ScheduleTable, parts: Sequence[int], stage: int, action: PipelineAction, ends: EndTimes
) -> float | None:
    """When what an operation needs is there; None: not yet."""
    if action.kind == "F":
        source = previous_chunk(stage, action, table.num_stages)
    elif action.kind == "B":
        source = next_chunk(stage, action, table.num_stages, table.chunks)
    else:
        source = None
    if source is None:
        return 0.0
    there, wanted = source
    within = overlapping_parts(action.part, parts[stage], parts[there])
    found = [ends.get((there, wanted._replace(part=part))) for part in within]
    return None if None in found else max(end for end in found if end is not None)


def _require_divisible_parts(table: ScheduleTable, parts: Sequence[int]) -> None:
    """Chunks go round, so the last stage is a neighbour of the first."""
    if not parts_divide_evenly([*parts, *parts[: int(table.chunks > 1)]]):
        raise StrategyError(
            f"stages run micro-batches in {', '.join(map(str, parts))} parts, and what one sends the next can"
            " neither be divided nor joined by an integer",
            next_step="choose numbers of which each divides its neighbours', or is divided by them",
        )


def _require_complete(
    table: ScheduleTable, divided: Sequence[int], stage: int, num_micro_batches: int
) -> set[ActionKey]:
    """Which backwards of a stage are split."""
    order, parts = table.orders[stage], divided[stage]
    at = {action: number for number, action in enumerate(order)}
    places = [*product(range(num_micro_batches), range(table.chunks), range(parts))]
    wanted = {PipelineAction(kind, *place) for kind in "FB" for place in places}
    split = {a.place for a in order if a.kind == "W"}
    if len(at) < len(order) or {a for a in at if a.kind != "W"} != wanted or not split <= {*places}:
        raise StrategyError(
            f"the schedule of stage {stage} does not run each of {num_micro_batches} micro-batches forward"
            f" and backward once{f' in each of {table.chunks} chunks' if table.chunks > 1 else ''}"
            f"{f' in each of {parts} parts' if parts > 1 else ''}",
            next_step=_NEXT_STEP,
        )
    for place in places:
        own = [at[PipelineAction(kind, *place)] for kind in "FBW" if kind != "W" or place in split]
        if own != sorted(own):
            raise StrategyError(
                f"the schedule of stage {stage} runs micro-batch {place[0]} of chunk {place[1]} backward"
                " before forward, or makes gradients of weights before those of what came in",
                next_step=_NEXT_STEP,
            )
    _require_ascending(order, stage)
    _require_parts_in_order(order, split, stage, parts)
    return split


def _require_ascending(order: Sequence[PipelineAction], stage: int) -> None:
    forwards = [(a.chunk, a.micro_batch, a.part) for a in order if a.kind == "F"]
    if sorted(forwards, key=lambda place: place[0]) != sorted(forwards):
        raise StrategyError(
            f"the schedule of stage {stage} runs forwards out of order: give the micro-batch that comes first"
            " the smaller number",
            next_step=_NEXT_STEP,
        )


def _require_parts_in_order(
    order: Sequence[PipelineAction], split: set[ActionKey], stage: int, parts: int
) -> None:
    """The gradient of a micro-batch is complete with its last part, before another's begins."""
    ends = sorted((a for a in order if a.ends(split)), key=lambda a: a.chunk)
    if [a.part for a in ends] != [*range(parts)] * (len(ends) // parts) or any(
        len({a.micro_batch for a in ends[k : k + parts]}) > 1 for k in range(0, len(ends), parts)
    ):
        raise StrategyError(
            f"the schedule of stage {stage} mixes backwards of the parts of several micro-batches, or runs"
            " them out of order",
            next_step="end the parts of a micro-batch one after another, from the first to the last",
        )


def _describe_action(action: PipelineAction, parts: int) -> str:
    part = f".{action.part}" if parts > 1 else ""
    return f"{action.kind}{action.micro_batch}{part} of chunk {action.chunk}"


def _action_seconds(action: PipelineAction, split: set[ActionKey]) -> float:
    return 2.0 if action.kind == "B" and action.place not in split else 1.0


def _max_in_flight(order: Sequence[PipelineAction], split: set[ActionKey]) -> int:
    held = most = 0
    for action in order:
        held += (action.kind == "F") - action.ends(split)
        most = max(most, held)
    return most
