"""Run a schedule without doing anything: that it can run, how long it takes, and what it keeps.

A forward takes 1, a backward 2; where it is split, 1 for each half; a chunk of v takes a v-th of it, and so
does a part of v. What travels takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from paceline.errors import StrategyError
from paceline.schedule.table import Action, Place, Table, after, before, fit_together, parts_within

_NEXT_STEP = 'repair the rows; "paceline schedule show gpipe --csv FILE" writes some that are right'


class Row(NamedTuple):
    """One operation in time."""

    time: float
    stage: int
    operation: str
    micro_batch: int
    chunk: int
    part: int
    seconds: float


@dataclass(frozen=True)
class Proof:
    """What is known of a schedule that can run.

    Args:
        rows: in the order of time.
        total: until the last stage has ended; 1 is the time of a forward of one stage.
        in_flight: by stage, the most micro-batches (of v chunks each counts a v-th, and so does a part of v)
            whose activations it keeps at a time: from the forward to the end of the backward.
    """

    rows: Sequence[Row]
    total: float
    in_flight: Sequence[float]

    @property
    def bubble(self) -> float:
        """Share of the time in which a stage is idle, from 0 to 1, over all stages."""
        busy = sum(row.seconds for row in self.rows)
        return 1.0 - busy / (self.total * len(self.in_flight)) if self.total else 0.0


def prove(table: Table, num_micro_batches: int) -> Proof:
    """Run it.

    Raises:
        StrategyError: an operation is missing or twice, forwards are out of order, a backward comes before
            its forward, parts of neighbours do not fit together, or stages wait for each other.
    """
    parts = table.parts
    _require_fit(table, parts)
    split = [_require_complete(table, parts, s, num_micro_batches) for s in range(table.num_stages)]
    ends: Ends = {}
    clocks, done = [0.0] * table.num_stages, [0] * table.num_stages
    rows: list[Row] = []
    while moved := _ready(table, parts, done, ends):
        for stage, starts in moved:
            action = table.orders[stage][done[stage]]
            seconds = _seconds(action, split[stage]) / (table.chunks * parts[stage])
            start = max(starts, clocks[stage])
            clocks[stage] = ends[stage, action] = start + seconds
            rows.append(Row(start, stage, *action, seconds))
            done[stage] += 1
    stuck = [(s, table.orders[s][n]) for s, n in enumerate(done) if n < len(table.orders[s])]
    if stuck:
        waits = ", ".join(f"stage {s} at {_spelled(a, parts[s])}" for s, a in stuck)
        raise StrategyError(f"the schedule's stages wait for each other: {waits}", next_step=_NEXT_STEP)
    kept = [
        _most_kept(order, splits) / (table.chunks * n)
        for order, splits, n in zip(table.orders, split, parts, strict=True)
    ]
    return Proof(sorted(rows), max(clocks), kept)


Ends = dict[tuple[int, Action], float]
"""When an operation of a stage has ended."""


def _ready(table: Table, parts: Sequence[int], done: Sequence[int], ends: Ends) -> list[tuple[int, float]]:
    """Stages whose next operation has what it needs, and since when."""
    found = []
    for stage, order in enumerate(table.orders):
        if done[stage] < len(order):
            since = _needs(table, parts, stage, order[done[stage]], ends)
            found += [] if since is None else [(stage, since)]
    return found


def _needs(table: Table, parts: Sequence[int], stage: int, action: Action, ends: Ends) -> float | None:
    """When what an operation needs is there; None: not yet."""
    if action.kind == "F":
        source = before(stage, action, table.num_stages)
    elif action.kind == "B":
        source = after(stage, action, table.num_stages, table.chunks)
    else:
        source = None
    if source is None:
        return 0.0
    there, wanted = source
    within = parts_within(action.part, parts[stage], parts[there])
    found = [ends.get((there, wanted._replace(part=part))) for part in within]
    return None if None in found else max(end for end in found if end is not None)


def _require_fit(table: Table, parts: Sequence[int]) -> None:
    """Chunks go round, so the last stage is a neighbour of the first."""
    if not fit_together([*parts, *parts[: int(table.chunks > 1)]]):
        raise StrategyError(
            f"stages run micro-batches in {', '.join(map(str, parts))} parts, and what one sends the next can"
            " neither be divided nor joined by an integer",
            next_step="choose numbers of which each divides its neighbours', or is divided by them",
        )


def _require_complete(table: Table, divided: Sequence[int], stage: int, num_micro_batches: int) -> set[Place]:
    """Which backwards of a stage are split."""
    order, parts = table.orders[stage], divided[stage]
    at = {action: number for number, action in enumerate(order)}
    places = [*product(range(num_micro_batches), range(table.chunks), range(parts))]
    wanted = {Action(kind, *place) for kind in "FB" for place in places}
    split = {a.place for a in order if a.kind == "W"}
    if len(at) < len(order) or {a for a in at if a.kind != "W"} != wanted or not split <= {*places}:
        raise StrategyError(
            f"the schedule of stage {stage} does not run each of {num_micro_batches} micro-batches forward"
            f" and backward once{f' in each of {table.chunks} chunks' if table.chunks > 1 else ''}"
            f"{f' in each of {parts} parts' if parts > 1 else ''}",
            next_step=_NEXT_STEP,
        )
    for place in places:
        own = [at[Action(kind, *place)] for kind in "FBW" if kind != "W" or place in split]
        if own != sorted(own):
            raise StrategyError(
                f"the schedule of stage {stage} runs micro-batch {place[0]} of chunk {place[1]} backward"
                " before forward, or makes gradients of weights before those of what came in",
                next_step=_NEXT_STEP,
            )
    _require_ascending(order, stage)
    _require_together(order, split, stage, parts)
    return split


def _require_ascending(order: Sequence[Action], stage: int) -> None:
    forwards = [(a.chunk, a.micro_batch, a.part) for a in order if a.kind == "F"]
    if sorted(forwards, key=lambda place: place[0]) != sorted(forwards):
        raise StrategyError(
            f"the schedule of stage {stage} runs forwards out of order: give the micro-batch that comes first"
            " the smaller number",
            next_step=_NEXT_STEP,
        )


def _require_together(order: Sequence[Action], split: set[Place], stage: int, parts: int) -> None:
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


def _spelled(action: Action, parts: int) -> str:
    part = f".{action.part}" if parts > 1 else ""
    return f"{action.kind}{action.micro_batch}{part} of chunk {action.chunk}"


def _seconds(action: Action, split: set[Place]) -> float:
    return 2.0 if action.kind == "B" and action.place not in split else 1.0


def _most_kept(order: Sequence[Action], split: set[Place]) -> int:
    held = most = 0
    for action in order:
        held += (action.kind == "F") - action.ends(split)
        most = max(most, held)
    return most
