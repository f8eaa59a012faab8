"""Recipes, the bytes that their runs allocate, and what `plan_memory` says of them before a start.

Allocated: the most that PyTorch's allocator had given out at a time in the steps, of all that was allocated
since before the task was built (the memory events of its profiler), with what waits in a channel, or has come
in part, which no tensor has. The profiler does not see what another thread frees, as Gloo's do with what they
have carried: the memory itself says when it goes there. What Gloo takes for itself is not in it.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from paceline.comm.channel.socket_channel import SocketSendBuffer
from paceline.job.cluster import Cluster
from paceline.plan import plan_memory
from paceline.plan.activation_memory import LiveBytes
from paceline.recipe import Recipe, Strategy
from paceline.testing.parity import build_test_session
from tests.mapped import Mapped
from tests.peak import bytes_now
from tests.planned_tasks import TASKS

STEPS, FRAMES = "all steps", "bytes in frames:"
SMALL_BYTES = 2**16  # numbers, one batch, tallies
NUMBERS_BYTES = 2**14


class Case(NamedTuple):
    """A recipe, and the task that it trains."""

    recipe: Recipe
    task: str


def case(
    strategy: str, task: str = "gpt", *, shards: int = 4, optimizer: str = "adamw", **more: object
) -> Case:
    buckets = {"runtime": {"bucket_bytes": 2**17}} if Strategy.parse(strategy).rule.sums else {}
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
    changes = [(at, -size, False) for at, size in freed]
    for event in events:
        if event.name() == "[memory]":
            changes.append((event.start_ns(), event.nbytes(), False))
        elif event.name().startswith(FRAMES):
            changes.append((event.start_ns(), int(event.name().removeprefix(FRAMES)), True))
    total = most = first
    frames = 0
    for _, size, waits in sorted(change for change in changes if change[0] >= begin):
        if waits:
            frames = size
        else:
            total += size
        most = max(most, total + frames)
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


class Frames:
    """Says in a profile how many bytes wait in a channel as copies; tensors that wait are seen anyway."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._plain = {
            (SocketSendBuffer, "put"): SocketSendBuffer.put,
            (SocketSendBuffer, "write"): SocketSendBuffer.write,
        }

    def __enter__(self) -> None:
        for (kind, name), plain in self._plain.items():
            setattr(kind, name, self._telling(plain))

    def __exit__(self, *error: object) -> None:
        for (kind, name), plain in self._plain.items():
            setattr(kind, name, plain)

    def _telling(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(owner: SocketSendBuffer, *args: Any, **options: Any) -> Any:
            found = plain(owner, *args, **options)
            now = sum(len(part) for part in owner._waiting if isinstance(part.obj, bytes))
            if now != self._sizes.get(id(owner), 0):
                self._sizes[id(owner)] = now
                with record_function(f"{FRAMES}{sum(self._sizes.values())}"):
                    pass
            return found

        return call


def allocated(cluster: Cluster, cases: list[Case]) -> list[int]:
    """By case, the most bytes of this rank in a step."""
    torch.set_num_threads(1)
    found = []
    for one in cases:
        others, elsewhere, before = Mapped(), FreedElsewhere(), bytes_now()
        recording = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with others.counting(), Frames(), recording as record, elsewhere:
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


def planned(one: Case, ranks: int) -> list[tuple[int, int]]:
    """By rank, the most bytes in a step, and of them messages, whose number is a matter of time."""
    plan = plan_memory(one.recipe, TASKS[one.task](), ranks)
    most = []
    for rank in plan.ranks:
        steps = [parts for when, parts in rank.moments.items() if not when.startswith("building")]
        most.append(max(steps, key=lambda parts: parts.total))
    return [(parts.total, parts.messages) for parts in most]


def kept(cluster: Cluster, cases: list[Case]) -> list[int]:
    """By case, the bytes of this rank's tensors once all steps are over."""
    torch.set_num_threads(1)
    found = []
    for one in cases:
        others, before = Mapped(), bytes_now()
        with others.counting():
            session = build_test_session(cluster, one.recipe, TASKS[one.task])
            for _ in session.rounds():
                pass
        found.append(bytes_now() - before - others.num_bytes)
        session.close()
        del session
        gc.collect()
    return found


def named(one: Case) -> str:
    recipe = one.recipe
    words = (one.task, recipe.strategy, recipe.optimizer.name, recipe.memory.recompute, recipe.batch.shards)
    return " ".join(map(str, words))


def require_exact(cases: list[Case], ranks: int, found: list[list[int]]) -> None:
    """What was allocated, but for numbers, tallies and norms."""
    wrong = []
    for number, one in enumerate(cases):
        for rank, (plan, _) in enumerate(planned(one, ranks)):
            real = found[rank][number]
            if not 0 <= real - plan <= NUMBERS_BYTES:
                wrong.append(f"{named(one)}, rank {rank}: planned {plan}, allocated {real}")
    assert not wrong, "\n".join(wrong)


def require_close(cases: list[Case], ranks: int, found: list[list[int]]) -> None:
    """Never less than was allocated, and at most a tenth more, beside messages that may be there."""
    wrong = []
    for number, one in enumerate(cases):
        for rank, (plan, messages) in enumerate(planned(one, ranks)):
            real = found[rank][number]
            if not real - SMALL_BYTES <= plan <= 1.1 * real + messages + SMALL_BYTES:
                wrong.append(f"{named(one)}, rank {rank}: planned {plan}, allocated {real}")
    assert not wrong, "\n".join(wrong)
