"""What many tests of runs share: cases in one job, runs to their end, slow samples and a recording sink."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from paceline.data.work import TrainingFeed
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.session import Session, build_session, evaluate
from paceline.testing.parity import (
    CPU,
    TaskFactory,
    Trajectory,
    build_test_session,
    make_task,
    whole_trajectory,
)


def each_case(cluster: Cluster, measure: Callable[..., Any], cases: Iterable[Sequence[Any]]) -> list[Any]:
    """What a function of a rank finds of each case, in the same processes: for `run_ranks`."""
    return [measure(cluster, *case) for case in cases]


def train_whole(cluster: Cluster, recipe: Recipe, task: TaskFactory | None = None) -> Trajectory:
    """Train to the end; return losses and the state of all ranks."""
    session = build_test_session(cluster, recipe, task)
    found = whole_trajectory([stats.loss for stats in session.rounds()], session)
    session.close()
    return found


def held_out_losses(cluster: Cluster, recipes: Iterable[Recipe]) -> list[float]:
    """Train each recipe to its end; return its loss on held-out samples."""
    found = []
    for recipe in recipes:
        session = build_test_session(cluster, recipe)
        list(session.rounds())
        evaluation = evaluate(session)
        assert evaluation is not None
        found.append(evaluation.loss)
        session.close()
    return found


class SlowSamples:
    """Samples of a rank that takes its time."""

    def __init__(self, data: Any, seconds: float) -> None:
        self.data, self.seconds = data, seconds

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return self.data[index]


def pause_seldom(session: Session, pause_steps: int = 10**9) -> Session:
    """Let a session pause only after so many steps, so that much can happen between two pauses."""

    class LongRounds(TrainingFeed):
        def next_pause(self, step: int) -> int:
            return min(self.num_steps, step + pause_steps)

    session.parts.feed = LongRounds(session.feed.work, session.feed.loader, session.feed.num_steps)
    return session


def asked_to_stop(cluster: Cluster, recipe: Recipe) -> Session:
    """A session of a long job without pauses, in which rank 1 is asked to stop in its tenth step."""

    def stop_requested() -> bool:
        return cluster.global_rank == 1 and session.state.step >= 10

    session = build_session(recipe, make_task(recipe), cluster, CPU, stop_requested=stop_requested)
    session.parts.feed = replace(session.feed, intervals=(), num_steps=40_000)
    return session


class RecordingSink:
    """A sink that remembers steps, whether each was applied, and events."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, bool]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    def step(self, stats: Any) -> None:
        self.steps.append((stats.step, stats.applied))

    def event(self, name: str, record: Any) -> None:
        self.events.append((name, dict(record)))

    def close(self) -> None: ...
