"""Schedules as data: for every stage, the order of its forwards and backwards.

Invariant: a schedule is validated before it runs: every stage does each micro-batch once forward and once
backward, and no stage waits for something that its neighbour sends later than it waits itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from paceline.errors import StrategyError


class Action(NamedTuple):
    """One forward ("F") or backward ("B") of one micro-batch; receives before it and sends after it."""

    kind: str
    micro_batch: int


Schedule = Sequence[Sequence[Action]]
"""By stage."""

MakeSchedule = Callable[[int, int], Schedule]
"""From numbers of stages and of micro-batches."""


def gpipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """All forwards, then all backwards in the opposite order.

    A stage stores the activations of all micro-batches.
    Source: Huang et al. 2019, GPipe, arXiv:1811.06965, section 2.3 and figure 2c.
    """
    forwards = [Action("F", k) for k in range(num_micro_batches)]
    backwards = [Action("B", k) for k in reversed(range(num_micro_batches))]
    return [forwards + backwards for _ in range(num_stages)]


def one_f_one_b(num_stages: int, num_items: int) -> Schedule:
    """One forward, one backward in turn: stage s runs p-s-1 forwards ahead.

    A stage stores the activations of at most p-s items, however many there are. PipeDream runs it over steps,
    without a flush between them; a synchronous pipeline over the micro-batches of one step.
    Source: Narayanan et al. 2019, PipeDream, section 3.2 and figure 8 (1F1B); Narayanan et al. 2021,
    Memory-Efficient Pipeline-Parallel DNN Training, arXiv:2006.09503, section 2.2 (with a flush).
    """
    table = []
    for stage in range(num_stages):
        ahead = min(num_stages - 1 - stage, num_items)
        order = [Action("F", k) for k in range(ahead)]
        for k in range(num_items):
            order += [Action("F", k + ahead)] if k + ahead < num_items else []
            order.append(Action("B", k))
        table.append(order)
    return table


def validate(schedule: Schedule, num_micro_batches: int) -> int:
    """Run a schedule without doing anything.

    Returns:
        The largest number of micro-batches whose activations the first stage holds at once.
    Raises:
        StrategyError: an action is missing or twice, or the stages wait for each other.
    """
    wanted = sorted(Action(kind, k) for kind in "FB" for k in range(num_micro_batches))
    for stage, order in enumerate(schedule):
        if sorted(order) != wanted:
            raise StrategyError(
                f"the schedule of stage {stage} does not run each micro-batch forward and backward once",
                next_step="repair the schedule",
            )
    done: list[int] = [0] * len(schedule)
    finished: set[tuple[int, Action]] = set()
    while moved := _advance(schedule, done, finished):
        done = moved
    if any(count < len(order) for count, order in zip(done, schedule, strict=True)):
        stuck = [(s, schedule[s][n]) for s, n in enumerate(done) if n < len(schedule[s])]
        raise StrategyError(f"the stages wait for each other: {stuck}", next_step="repair the schedule")
    return _peak(schedule[0])


def _advance(schedule: Schedule, done: list[int], finished: set[tuple[int, Action]]) -> list[int] | None:
    """Every stage takes its next action if what it needs is there; None if no stage could."""
    moved = list(done)
    for stage, order in enumerate(schedule):
        if done[stage] < len(order) and _possible(stage, order[done[stage]], len(schedule), finished):
            moved[stage] += 1
    if moved == done:
        return None
    finished |= {(s, schedule[s][done[s]]) for s in range(len(schedule)) if moved[s] > done[s]}
    return moved


def _possible(stage: int, action: Action, num_stages: int, finished: set[tuple[int, Action]]) -> bool:
    if action.kind == "F":
        return stage == 0 or (stage - 1, action) in finished
    own = (stage, Action("F", action.micro_batch)) in finished
    return own and (stage == num_stages - 1 or (stage + 1, action) in finished)


def _peak(order: Sequence[Action]) -> int:
    held = largest = 0
    for action in order:
        held += 1 if action.kind == "F" else -1
        largest = max(largest, held)
    return largest
