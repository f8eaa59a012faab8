"""Run a schedule without doing anything: that it can run, how long it takes, and what it keeps.

A forward takes 1, a backward 2; where it is split, 1 for each half; a chunk of v takes a v-th of it. What
travels takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.errors import StrategyError
from paceline.schedule.table import Action, Table, after, before

_NEXT_STEP = 'repair the rows; "paceline schedule show gpipe --csv FILE" writes some that are right'


class Row(NamedTuple):
    """One operation in time."""

    time: float
    stage: int
    operation: str
    micro_batch: int
    chunk: int
    seconds: float


@dataclass(frozen=True)
class Proof:
    """What is known of a schedule that can run.

    Args:
        rows: in the order of time.
        total: until the last stage has ended; 1 is the time of a forward of one stage.
        in_flight: by stage, the most micro-batches (of v chunks each counts a v-th) whose activations it
            keeps at a time: from the forward to the end of the backward.
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
            its forward, or stages wait for each other.
    """
    split = [_require_complete(table, stage, num_micro_batches) for stage in range(table.num_stages)]
    ends: dict[tuple[int, Action], float] = {}
    clocks, done = [0.0] * table.num_stages, [0] * table.num_stages
    rows: list[Row] = []
    while moved := _ready(table, done, ends):
        for stage, starts in moved:
            action = table.orders[stage][done[stage]]
            seconds = _seconds(action, split[stage]) / table.chunks
            start = max(starts, clocks[stage])
            clocks[stage] = ends[stage, action] = start + seconds
            rows.append(Row(start, stage, *action, seconds))
            done[stage] += 1
    stuck = [(s, table.orders[s][n]) for s, n in enumerate(done) if n < len(table.orders[s])]
    if stuck:
        waits = ", ".join(f"stage {s} at {a.kind}{a.micro_batch} of chunk {a.chunk}" for s, a in stuck)
        raise StrategyError(f"the schedule's stages wait for each other: {waits}", next_step=_NEXT_STEP)
    kept = [
        _most_kept(order, splits) / table.chunks for order, splits in zip(table.orders, split, strict=True)
    ]
    return Proof(sorted(rows), max(clocks), kept)


def _ready(
    table: Table, done: Sequence[int], ends: dict[tuple[int, Action], float]
) -> list[tuple[int, float]]:
    """Stages whose next operation has what it needs, and since when."""
    found = []
    for stage, order in enumerate(table.orders):
        if done[stage] < len(order) and (since := _needs(table, stage, order[done[stage]], ends)) is not None:
            found.append((stage, since))
    return found


def _needs(table: Table, stage: int, action: Action, ends: dict[tuple[int, Action], float]) -> float | None:
    """When what an operation needs is there; None: not yet."""
    if action.kind == "F":
        source = before(stage, action, table.num_stages)
    elif action.kind == "B":
        source = after(stage, action, table.num_stages, table.chunks)
    else:
        source = None
    return 0.0 if source is None else ends.get(source)


def _require_complete(table: Table, stage: int, num_micro_batches: int) -> set[tuple[int, int]]:
    """Which backwards of a stage are split."""
    order = table.orders[stage]
    places = {action: place for place, action in enumerate(order)}
    pairs = [(k, c) for k in range(num_micro_batches) for c in range(table.chunks)]
    wanted = {Action(kind, *pair) for kind in "FB" for pair in pairs}
    split = {(a.micro_batch, a.chunk) for a in order if a.kind == "W"}
    if len(places) < len(order) or {a for a in places if a.kind != "W"} != wanted or not split <= {*pairs}:
        raise StrategyError(
            f"the schedule of stage {stage} does not run each of {num_micro_batches} micro-batches forward"
            f" and backward once{f' in each of {table.chunks} chunks' if table.chunks > 1 else ''}",
            next_step=_NEXT_STEP,
        )
    for pair in pairs:
        own = [places[Action(kind, *pair)] for kind in "FBW" if kind != "W" or pair in split]
        if own != sorted(own):
            raise StrategyError(
                f"the schedule of stage {stage} runs micro-batch {pair[0]} of chunk {pair[1]} backward before"
                " forward, or makes gradients of weights before those of what came in",
                next_step=_NEXT_STEP,
            )
    _require_ascending(table, stage)
    return split


def _require_ascending(table: Table, stage: int) -> None:
    forwards = [(a.chunk, a.micro_batch) for a in table.orders[stage] if a.kind == "F"]
    if sorted(forwards, key=lambda pair: pair[0]) != sorted(forwards):
        raise StrategyError(
            f"the schedule of stage {stage} runs forwards out of order: give the micro-batch that comes first"
            " the smaller number",
            next_step=_NEXT_STEP,
        )


def _seconds(action: Action, split: set[tuple[int, int]]) -> float:
    whole = action.kind == "B" and (action.micro_batch, action.chunk) not in split
    return 2.0 if whole else 1.0


def _most_kept(order: Sequence[Action], split: set[tuple[int, int]]) -> int:
    held = most = 0
    for action in order:
        ends = action.kind == "W" or (action.kind == "B" and (action.micro_batch, action.chunk) not in split)
        held += (action.kind == "F") - ends
        most = max(most, held)
    return most
