"""Schedules by name. Each makes a table from numbers of stages and of micro-batches; all are proven."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.errors import StrategyError
from paceline.schedule.proof import prove
from paceline.schedule.table import Action, Table, after, before


def gpipe(num_stages: int, num_micro_batches: int) -> Table:
    """All forwards, then all backwards in the opposite order.

    A stage stores the activations of all micro-batches.
    Source: Huang et al. 2019, GPipe, arXiv:1811.06965, section 2.3 and figure 2c.
    """
    forwards = [Action("F", k) for k in range(num_micro_batches)]
    backwards = [Action("B", k) for k in reversed(range(num_micro_batches))]
    return Table([forwards + backwards for _ in range(num_stages)])


def one_f_one_b(num_stages: int, num_items: int) -> Table:
    """One forward, one backward in turn: stage s runs p-s-1 forwards ahead.

    A stage stores the activations of at most p-s items, however many there are. PipeDream runs it over steps,
    without a flush between them; a synchronous pipeline over the micro-batches of one step.
    Source: Narayanan et al. 2019, PipeDream, section 3.2 and figure 8 (1F1B); Narayanan et al. 2021,
    Memory-Efficient Pipeline-Parallel DNN Training, arXiv:2006.09503, section 2.2 (with a flush).
    """
    forwards, backwards = ([Action(kind, k) for k in range(num_items)] for kind in "FB")
    ahead = [min(num_stages - 1 - stage, num_items) for stage in range(num_stages)]
    return Table([_in_turn(forwards, backwards, n) for n in ahead])


def interleaved(num_stages: int, num_micro_batches: int, chunks: int | str = 2) -> Table:
    """1F1B over several chunks of the model on every rank: the bubble is a v-th, for more in flight.

    Micro-batches go through the chunks in groups of p. Where the last group is smaller, stages run more
    forwards ahead, as few as can run.
    Source: Narayanan et al. 2021, Efficient Large-Scale Language Model Training, arXiv:2104.04473,
    section 2.2.2.
    """
    p, m, chunks = num_stages, num_micro_batches, int(chunks)
    groups = [range(start, min(start + p, m)) for start in range(0, m, p)]
    forwards = [Action("F", k, c) for group in groups for c in range(chunks) for k in group]
    backwards = [Action("B", k, c) for group in groups for c in reversed(range(chunks)) for k in group]
    for more in range(len(forwards) + 1):
        ahead = [min(2 * (p - 1 - s) + (chunks - 1) * p + more, len(forwards)) for s in range(p)]
        table = Table([_in_turn(forwards, backwards, n) for n in ahead], chunks)
        if _can_run(table, m):
            return table
    raise AssertionError("all forwards before all backwards can always run")


def zero_bubble(num_stages: int, num_micro_batches: int) -> Table:
    """The backward split in two: gradients of weights fill the time in which a stage would wait.

    Whoever is idle takes a backward that can run, else a forward while fewer than p micro-batches are in
    flight, else the gradients of weights that were put off.
    Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 3 (ZB-H1).
    """
    orders: list[list[Action]] = [[] for _ in range(num_stages)]
    ends: dict[tuple[int, Action], int] = {}
    clock = 0
    while any(len(order) < 3 * num_micro_batches for order in orders):
        taken = [
            (s, _choice(s, order, orders, ends, clock, num_micro_batches)) for s, order in enumerate(orders)
        ]
        for stage, action in taken:
            if action is not None:
                orders[stage].append(action)
                ends[stage, action] = clock + 1
        clock += 1
    return Table(orders)


def _choice(
    stage: int,
    order: Sequence[Action],
    orders: Sequence[Sequence[Action]],
    ends: dict[tuple[int, Action], int],
    clock: int,
    num_micro_batches: int,
) -> Action | None:
    """What an idle stage does next; None: it waits."""
    count = {kind: sum(action.kind == kind for action in order) for kind in "FBW"}
    backward, forward = Action("B", count["B"]), Action("F", count["F"])
    if count["B"] < count["F"] and _came(after(stage, backward, len(orders), 1), ends, clock):
        return backward
    may = count["F"] < num_micro_batches and count["F"] - count["W"] < len(orders)
    if may and _came(before(stage, forward, len(orders)), ends, clock):
        return forward
    return Action("W", count["W"]) if count["W"] < count["B"] else None


def _came(source: tuple[int, Action] | None, ends: dict[tuple[int, Action], int], clock: int) -> bool:
    return source is None or ends.get(source, clock + 1) <= clock


def _in_turn(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> list[Action]:
    """Some forwards ahead, then a forward and a backward in turn, then the rest of the backwards."""

    def order() -> Iterator[Action]:
        yield from forwards[:ahead]
        for place, backward in enumerate(backwards):
            yield from forwards[ahead + place : ahead + place + 1]
            yield backward

    return list(order())


def _can_run(table: Table, num_micro_batches: int) -> bool:
    try:
        prove(table, num_micro_batches)
    except StrategyError:
        return False
    return True
