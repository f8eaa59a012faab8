"""What `plan_memory` says of lanes, beside the bytes that are allocated in the steps of a run.

A profile sees one thread. So lanes run there one after another, and what each takes at most beside what was
there when it began counts as if all took it at a time, as they may.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from paceline.cluster import Cluster
from paceline.layout.threads import Threads
from paceline.testing import run_ranks
from paceline.testing.parity import session_of
from tests.allocations import TASKS, Case, FreedElsewhere, case, require_close
from tests.mapped import Mapped

BEGIN, END = "lane begins", "lane ends"

ALONE = [
    case("replicas=1 lanes=2"),
    case("replicas=1 lanes=2", shards=8),
    case("replicas=1 lanes=4", "chain"),
    case("replicas=1 lanes=2", memory={"recompute": "blocks"}, shards=2),
]
TWO = [
    case("replicas=2 lanes=2"),
    case("replicas=2 lanes=2 route=native", "chain", shards=8),
    case("replicas=2 lanes=2 route=native", "chain", shards=4),
    case("replicas=2 lanes=3", "chain", shards=8),
]


def in_turn(threads: Threads, functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """In place of `Threads.run`."""
    found = []
    for function in functions:
        with record_function(BEGIN):
            pass
        found.append(function())
        with record_function(END):
            pass
    return found


def moments(record: profile, freed: Sequence[tuple[int, int]]) -> Iterator[tuple[int, str, int]]:
    """When, what (empty: memory), and its bytes."""
    assert record.profiler is not None
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            yield event.start_ns(), "", event.nbytes()
        elif event.name() in (BEGIN, END):
            yield event.start_ns(), event.name(), 0
    yield from ((at, "", -size) for at, size in freed)


def most_side_by_side(record: profile, freed: Sequence[tuple[int, int]], number: int) -> int:
    """The most bytes at a time, if all `number` lanes have most at a time."""
    now = most = begin = peak = before = 0
    taken: list[int] = []
    for _, what, size in sorted(moments(record, freed)):
        now += size
        if what == BEGIN:
            begin, peak, before = now, now, before if taken else now
        elif what == END:
            taken.append(peak - begin)
            if len(taken) == number:
                most, taken = max(most, before + sum(taken)), []
        peak, most = max(peak, now), max(most, now)
    return most


def allocated(cluster: Cluster, cases: list[Case]) -> list[int]:
    """By case, the most bytes of this rank."""
    torch.set_num_threads(1)
    found = []
    for one in cases:
        others, elsewhere, number = Mapped(), FreedElsewhere(), one.recipe.strategy.lanes
        recording = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with patch.object(Threads, "run", in_turn), others.counting(), recording as record, elsewhere:
            session = session_of(cluster, one.recipe, TASKS[one.task])
            for _ in session.rounds():
                pass
        found.append(most_side_by_side(record, [*elsewhere.noted, *others.noted], number))
        session.close()
        del session
        gc.collect()
    return found


@pytest.mark.capability("L3", "A7")
def test_lanes_allocate_what_was_planned() -> None:
    few = [ALONE[0], ALONE[2]]
    require_close(few, 1, run_ranks(allocated, 1, few))
    require_close(TWO[1:2], 2, run_ranks(allocated, 2, TWO[1:2]))


@pytest.mark.soak
@pytest.mark.capability("L3")
def test_all_lanes_allocate_what_was_planned() -> None:
    require_close(ALONE, 1, run_ranks(allocated, 1, ALONE))
    require_close(TWO, 2, run_ranks(allocated, 2, TWO))
