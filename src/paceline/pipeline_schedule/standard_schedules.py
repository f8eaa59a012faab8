"""Standard schedules: GPipe, 1F1B, PipeDream-2BW, interleaved 1F1B and zero bubble.

Each function makes a table from the numbers of stages and micro-batches. All tables pass `simulate_schedule`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import TypeVar

from paceline.errors import StrategyError
from paceline.pipeline_schedule.schedule_table import PipelineAction, ScheduleTable, simulate_schedule

T = TypeVar("T")


def gpipe(num_stages: int, num_micro_batches: int, parts: Sequence[int] = ()) -> ScheduleTable:
    """Return all forward passes, then all backward passes in reverse order.

    A stage stores the activations of all micro-batches.

    Args:
        parts: by stage, the number of parts in which it runs each micro-batch; 1 by default.
    Source: Huang et al. 2019, GPipe, arXiv:1811.06965, section 2.3 and figure 2c.
    """
    micro_batches = range(num_micro_batches)
    return ScheduleTable(
        [
            _actions_in_parts("F", micro_batches, n) + _actions_in_parts("B", reversed(micro_batches), n)
            for n in parts or [1] * num_stages
        ]
    )


def one_f_one_b(num_stages: int, num_items: int, parts: Sequence[int] = ()) -> ScheduleTable:
    """Return alternating forward and backward passes, where stage s of p runs p-s-1 forward passes ahead.

    A stage stores the activations of at most p-s items, however many there are. The items are the steps of
    PipeDream, which has no flush between them, or the micro-batches of one step of a synchronous pipeline. If
    items run in parts, no stage stores more than without parts; one whose next stage has smaller parts may
    store less.

    Args:
        parts: see `gpipe`.
    Source: Narayanan et al. 2019, PipeDream, section 3.2 and figure 8 (1F1B); Narayanan et al. 2021,
    Memory-Efficient Pipeline-Parallel DNN Training, arXiv:2006.09503, section 2.2 (with a flush).
    """
    parts = parts or [1] * num_stages
    orders = []
    for stage, (n, max_in_flight) in enumerate(zip(parts, _max_parts_in_flight(parts), strict=True)):
        forwards, backwards = (_actions_in_parts(kind, range(num_items), n) for kind in "FB")
        turn = _parts_per_turn(parts, stage)
        # Minus one: the forward of a turn is in flight, too, when its backward begins.
        ahead = -(-max_in_flight // turn) - 1
        orders.append(_alternate(_group_by_turn(forwards, turn), _group_by_turn(backwards, turn), ahead))
    return ScheduleTable([[*chain.from_iterable(order)] for order in orders])


def pipedream_2bw(num_stages: int, counts: Sequence[int]) -> ScheduleTable:
    """Return 1F1B over several steps without a flush between them, at most one update behind.

    A step's first forward waits for the last backward of the step two before it.

    Args:
        counts: micro-batches of each step.
    Source: Narayanan et al. 2021, Memory-Efficient Pipeline-Parallel DNN Training, arXiv:2006.09503, section
    3.1 (2BW).
    """
    before_steps = [*accumulate(counts, initial=0)]
    needed = [max(0, before_steps[k - 1]) if k else 0 for k, n in enumerate(counts) for _ in range(n)]
    return ScheduleTable(
        [[*_bounded_staleness_order(num_stages - 1 - stage, needed)] for stage in range(num_stages)]
    )


def _bounded_staleness_order(ahead: int, needed: Sequence[int]) -> Iterator[PipelineAction]:
    """Yield forward passes up to `ahead` ahead, and before each the backward passes that it needs."""
    done = 0
    # The last entry has no forward: it stands for the backwards that are left at the end.
    for number, least in enumerate([*needed, len(needed)]):
        until = max(least, number - ahead) if number < len(needed) else len(needed)
        yield from (PipelineAction("B", k) for k in range(done, until))
        done = max(done, until)
        if number < len(needed):
            yield PipelineAction("F", number)


def interleaved(num_stages: int, num_micro_batches: int, chunks: int | str = 2) -> ScheduleTable:
    """Return 1F1B over v chunks of the model on every rank.

    It has 1/v of the bubble of 1F1B, and more micro-batches in flight. Micro-batches go through the chunks in
    groups of p. If the last group is smaller, stages run further ahead, by as few forward passes as can run.

    Source: Narayanan et al. 2021, Efficient Large-Scale Language Model Training, arXiv:2104.04473, section
    2.2.2.
    """
    p, m, chunks = num_stages, num_micro_batches, int(chunks)
    groups = [range(start, min(start + p, m)) for start in range(0, m, p)]
    forwards = [PipelineAction("F", k, c) for group in groups for c in range(chunks) for k in group]
    backwards = [
        PipelineAction("B", k, c) for group in groups for c in reversed(range(chunks)) for k in group
    ]
    # An incomplete last group can deadlock with the usual lead: take the smallest lead that runs.
    for more in range(len(forwards) + 1):
        ahead = [min(2 * (p - 1 - s) + (chunks - 1) * p + more, len(forwards)) for s in range(p)]
        table = ScheduleTable([_alternate(forwards, backwards, n) for n in ahead], chunks)
        if _can_run(table, m):
            return table
    raise AssertionError("internal error: all forwards before all backwards can always run")


def zero_bubble(num_stages: int, num_micro_batches: int, parts: Sequence[int] = ()) -> ScheduleTable:
    """Return 1F1B with split backward passes: weight gradients fill the time in which a stage would wait.

    Stage s defers the gradients of weights by s micro-batches. So each stage keeps at most p micro-batches,
    and the last stages have work while the first ones fill and drain.

    Args:
        parts: see `gpipe`.
    Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2.3 (ZB-H1).
    """
    parts = parts or [1] * num_stages
    in_turn = one_f_one_b(num_stages, num_micro_batches, parts).orders
    orders = enumerate(zip(in_turn, parts, strict=True))
    return ScheduleTable([[*_defer_weight_gradients(order, stage * n)] for stage, (order, n) in orders])


def _defer_weight_gradients(order: Sequence[PipelineAction], later: int) -> Iterator[PipelineAction]:
    """Defer the weight gradients of each backward pass by `later` backward passes, or to the end."""
    waiting = deque[PipelineAction]()
    for action in order:
        yield action
        if action.kind == "B":
            waiting.append(action._replace(kind="W"))
        if len(waiting) > later:
            yield waiting.popleft()
    yield from waiting


def _actions_in_parts(kind: str, micro_batches: Iterable[int], num_parts: int) -> list[PipelineAction]:
    return [PipelineAction(kind, k, 0, index) for k in micro_batches for index in range(num_parts)]


def _max_parts_in_flight(parts: Sequence[int]) -> list[int]:
    """Return by stage how many parts 1F1B keeps, counting those that the next stage still holds in part.

    The parts of two stages need not begin at the same samples. The number is never larger than without parts.
    """
    max_parts = [1]
    for later, earlier in pairwise(reversed(parts)):
        travelling, joined = min(later, earlier), max(1, later // earlier)
        touched = (max_parts[-1] + joined - 2) // joined + 1
        max_parts.append(min((touched + 1) * earlier // travelling, (len(max_parts) + 1) * earlier))
    return max_parts[::-1]


def _parts_per_turn(parts: Sequence[int], stage: int) -> int:
    """Return how many parts 1F1B runs in one turn: as many as both neighbours have joined, else one."""
    around = parts[max(0, stage - 1) : stage + 2]
    return parts[stage] // min(parts[stage], max(around[0], around[-1]))


def _group_by_turn(actions: Sequence[PipelineAction], turn: int) -> list[Sequence[PipelineAction]]:
    return [actions[start : start + turn] for start in range(0, len(actions), turn)]


def _alternate(forwards: Sequence[T], backwards: Sequence[T], ahead: int) -> list[T]:
    """Return `ahead` forward passes, then both kinds in turn, then the remaining backward passes."""

    def order() -> Iterator[T]:
        yield from forwards[:ahead]
        for index, backward in enumerate(backwards):
            # A slice, since no forward is left for the last backwards.
            yield from forwards[ahead + index : ahead + index + 1]
            yield backward

    return list(order())


def _can_run(table: ScheduleTable, num_micro_batches: int) -> bool:
    try:
        simulate_schedule(table, num_micro_batches)
    except StrategyError:
        return False
    return True
