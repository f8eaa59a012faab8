"""Recipes, the bytes that their runs allocate, and what `plan_memory` says of them before a start.

Allocated: the most that PyTorch's allocator had given out at a time in the steps, of all that was allocated
since before the task was built (the memory events of its profiler). The profiler does not see what another
thread frees, as Gloo's do with what they have carried: a finalizer of the memory records it there. What Gloo
takes for itself is not in it.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from paceline.job.cluster import Cluster
from paceline.plan import plan_memory
from paceline.plan.activation_memory import LiveBytes
from paceline.recipe import Recipe, Strategy
from paceline.testing.parity import build_test_session
from tests.mapped import Mapped
from tests.peak import bytes_now
from tests.planned_tasks import TASKS

STEPS = "all steps"
SMALL_BYTES = 2**16  # numbers, one batch, tallies
NUMBERS_BYTES = 2**14


class Case(NamedTuple):
    """A recipe, and the task that it trains."""

    recipe: Recipe
    task: str


def case(
    strategy: str, task: str = "gpt", *, shards: int = 4, optimizer: str = "adamw", **more: object
) -> Case:
    buckets = {"runtime": {"bucket_bytes": 2**17}} if Strategy.parse(strategy).sync_spec.sums else {}
    recipe = {
        "task": "sum",
        "steps": 3,
        "batch": {"size": 16, "shards": shards},
        "optimizer": {"name": optimizer, "lr": 1e-3},
        "precision": {"compute": "fp32"},
        "strategy": Strategy.parse(strategy),
    }
    return Case(Recipe.model_validate(recipe | buckets | more), task)


def most_allocated(record: profile, first: int, freed: Sequence[tuple[int, int]]) -> int:
    """The most bytes that were in use at a time in the steps.

    Args:
        first: how many before the steps.
        freed: (nanoseconds, bytes) of what other threads have freed, and of what is other ranks'.
    """
    assert record.profiler is not None
    events = record.profiler.kineto_results.events()
    begin = next(event.start_ns() for event in events if event.name() == STEPS)
    changes = [(at, -size) for at, size in freed]
    changes += [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    total = most = first
    for _, size in sorted(change for change in changes if change[0] >= begin):
        total += size
        most = max(most, total)
    return most


class FreedElsewhere(LiveBytes):
    """Notes what other threads than this one free of the memory that is made inside: when, and its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[int, int]] = []
        self._thread = threading.get_ident()

    def _gone(self, place: int) -> None:
        if threading.get_ident() != self._thread:
            self.noted.append((time.time_ns(), self._sizes.get(place, 0)))
        super()._gone(place)


def allocated(cluster: Cluster, cases: list[Case]) -> list[int]:
    """By case, the most bytes of this rank in a step."""
    torch.set_num_threads(1)
    found = []
    for one in cases:
        others, elsewhere, before = Mapped(), FreedElsewhere(), bytes_now()
        recording = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with others.counting(), recording as record, elsewhere:
            session = build_test_session(cluster, one.recipe, TASKS[one.task])
            first = bytes_now() - before - others.num_bytes
            with record_function(STEPS):
                for _ in session.rounds():
                    pass
        found.append(most_allocated(record, first, [*elsewhere.noted, *others.noted]))
        session.close()
        del session
        gc.collect()
    return found


def planned(one: Case, ranks: int) -> list[int]:
    """Return the planned peak of each rank in the steps of a run, without the building of the model."""
    plan = plan_memory(one.recipe, TASKS[one.task](), ranks)
    return [
        max(parts.total for when, parts in rank.moments.items() if not when.startswith("building"))
        for rank in plan.ranks
    ]


def named(one: Case) -> str:
    recipe = one.recipe
    words = (one.task, recipe.strategy, recipe.optimizer.name, recipe.memory.recompute, recipe.batch.shards)
    return " ".join(map(str, words))


def require_exact(cases: list[Case], ranks: int, found: list[list[int]]) -> None:
    """What was allocated, but for numbers, tallies and norms."""
    wrong = []
    for number, one in enumerate(cases):
        for rank, plan in enumerate(planned(one, ranks)):
            real = found[rank][number]
            if not 0 <= real - plan <= NUMBERS_BYTES:
                wrong.append(f"{named(one)}, rank {rank}: planned {plan}, allocated {real}")
    assert not wrong, "\n".join(wrong)


def require_close(cases: list[Case], ranks: int, found: list[list[int]]) -> None:
    """Never less than was allocated, and at most a tenth more."""
    wrong = []
    for number, one in enumerate(cases):
        for rank, plan in enumerate(planned(one, ranks)):
            real = found[rank][number]
            if not real - SMALL_BYTES <= plan <= 1.1 * real + SMALL_BYTES:
                wrong.append(f"{named(one)}, rank {rank}: planned {plan}, allocated {real}")
    assert not wrong, "\n".join(wrong)
