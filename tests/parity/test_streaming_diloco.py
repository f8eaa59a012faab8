"""Fragments that travel while replicas go on: exact limits, the paper's steps by hand, what they learn."""

from __future__ import annotations

from statistics import mean, stdev
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from paceline.data import work
from paceline.errors import RecipeError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.sync.streaming_diloco import FragmentSchedule, StreamingDiLoCo
from paceline.testing import run_ranks
from paceline.testing.contracts import RuleContract
from paceline.testing.parity import Trajectory, build_test_session, whole_trajectory
from tests.parity.training_runs import asked_to_stop, held_out_losses

STEPS = 24


def digits(strategy: str, outer: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "task": "digits",
        "options": {"model": "mlp", "hidden": [32, 16]},
        "steps": STEPS,
        "batch": {"size": 46, "shards": 4},
        "optimizer": {"name": "adamw", "lr": 2e-3},
        "strategy": Strategy.parse(strategy),
        "outer": outer or {},
    }
    return Recipe(**(settings | changes))


def limits(cluster: Cluster) -> list[tuple[Trajectory, Trajectory]]:
    """One fragment that all wait for, by the rule of rounds and by that of fragments."""
    found = []
    for strategy in ("sync=diloco:4", "sync=diloco:4 codec=int8"):
        ends = []
        for is_whole in (True, False):
            with patch.object(FragmentSchedule, "is_whole", is_whole):
                session = build_test_session(cluster, digits(strategy))
                assert isinstance(session.rule, StreamingDiLoCo) != is_whole
                ends.append(whole_trajectory([stats.loss for stats in session.rounds()], session))
        found.append((ends[0], ends[1]))
    return found


@pytest.mark.capability("I6", clause="streamed fragments that overlap with compute")
def test_one_fragment_that_all_wait_for_is_diloco_to_the_bit() -> None:
    for rank in run_ranks(limits, 2):
        for plain, streamed in rank:
            assert streamed.losses == plain.losses and streamed.distance(plain) == 0.0


def by_hand(cluster: Cluster, outer: dict[str, Any], steps: int) -> tuple[float, float]:
    """How far a round is from the paper's steps, each sum made at once and kept; and how far it moved."""
    recipe = digits(
        "sync=diloco:6", outer, steps=steps, checkpoint={"every_steps": steps}, batch={"size": 48}
    )
    session, alone = build_test_session(cluster, recipe), build_test_session(cluster, recipe)
    start = [p.detach().clone() for p in session.runner.sharded_model.computes.values()]
    with patch.object(work, "_MIN_PAUSES", 1):  # one round over all steps
        list(session.rounds())
    mine = [*alone.runner.sharded_model.computes.values()]
    slots, rule = [*alone.runner.sharded_model.computes], alone.rule
    parts = [[slots.index(slot) for slot in one.anchors] for one in rule.fragments]
    anchors, momentum = [p.detach().clone() for p in mine], [torch.zeros_like(p) for p in mine]
    flying: dict[int, tuple[int, list[Tensor]]] = {}

    def leave(number: int, step: int) -> None:
        moved = [(anchors[i] - mine[i].detach()) for i in parts[number]]
        flying[number] = step, [alone.net.all_reduce(m, alone.mesh.replica).wait() / 2 for m in moved]

    def arrive(number: int, mixing: float) -> None:
        for i, d in zip(parts[number], flying.pop(number)[1], strict=True):
            momentum[i] = 0.9 * momentum[i] + d
            anchors[i] -= 0.7 * (d + 0.9 * momentum[i])
            mine[i].data.copy_(mixing * mine[i].detach() + (1 - mixing) * anchors[i])

    with alone.feed.from_step(0) as stream:
        for step in range(1, steps + 1):
            rule.inner.step(alone.work, stream, alone.runner, alone.update_step)
            alone.state.step += 1
            for number in [n for n, (left, _) in flying.items() if step - left >= outer["delay_steps"]]:
                arrive(number, outer["mixing"])
            for number in range(len(parts)):
                if step % 6 == number * 6 // len(parts) and step < steps:
                    leave(number, step)
    for number in [*flying]:
        arrive(number, outer["mixing"])
    for number in range(len(parts)):
        leave(number, steps)
        arrive(number, 0.0)
    pairs = zip(session.runner.sharded_model.computes.values(), mine, strict=True)
    off = max(float((a - b).detach().abs().max()) for a, b in pairs)
    return off, max(float((a - b).detach().abs().max()) for a, b in zip(start, mine, strict=True))


OUTER = {"fragments": 3, "delay_steps": 2, "mixing": 0.25}


@pytest.mark.capability("I6", clause="streamed fragments that overlap with compute")
def test_fragments_move_as_the_paper_says() -> None:
    for off, moved in run_ranks(by_hand, 2, OUTER, 14):
        assert off <= 2e-6 and moved > 1e-3


def test_without_the_delay_it_would_be_something_else() -> None:
    """The twin: the rule arrives at once, and the steps by hand do not."""

    def hasty(cluster: Cluster) -> tuple[float, float]:
        travel = StreamingDiLoCo._exchange_fragments

        def at_once(self: Any, *given: Any, **named: Any) -> None:
            self.streaming = self.streaming._replace(delay=0)
            travel(self, *given, **named)

        with patch.object(StreamingDiLoCo, "_exchange_fragments", at_once):
            return by_hand(cluster, OUTER, 14)

    assert all(off > 1e-4 for off, _ in run_ranks(hasty, 2))


def stopped(cluster: Cluster) -> tuple[int, float]:
    session = asked_to_stop(cluster, digits("sync=diloco:6", OUTER))
    stops = [stats.stops for stats in session.rounds()]
    return session.state.step, stops[-1]


def test_a_stop_ends_all_where_the_next_fragment_arrives() -> None:
    """One leaves every two steps, and arrives two later; the next pause is at step 2,004."""
    first, other = run_ranks(stopped, 2)
    assert first == other == (14, 1)


@pytest.mark.capability("I6", "Z1", clause="streamed fragments that overlap with compute")
class TestStreamedDiLoCo(RuleContract):
    strategy, num_ranks = "replicas=2 sync=diloco:4 codec=int8", 2

    def recipe(self, **changes: Any) -> Recipe:
        return super().recipe(outer={"fragments": 2, "delay_steps": 1, "mixing": 0.5}, **changes)


@pytest.mark.parametrize(
    "outer", [{"fragments": 5}, {"fragments": 2, "delay_steps": 3}, {"delay_steps": 5}, {"mixing": 1.0}]
)
def test_more_than_one_under_way_is_refused(outer: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="outer"):
        digits("replicas=2 sync=diloco:4", outer)


def learned(cluster: Cluster) -> dict[str, list[float]]:
    """Two pauses a run, so that fragments do travel; at a pause all meet."""
    work._MIN_PAUSES = 2
    streamed = {"fragments": 2, "delay_steps": 2, "mixing": 0.5}
    cases = {
        "every-step": ("replicas=2", {}),
        "diloco:8": ("sync=diloco:8", {}),
        "streamed": ("sync=diloco:8", streamed),
        "streamed int4": ("sync=diloco:8 codec=int4", streamed),
    }
    return {
        name: held_out_losses(cluster, (digits(*case, steps=160, seed=seed) for seed in (1, 2, 3, 4, 5)))
        for name, case in cases.items()
    }


@pytest.mark.soak
@pytest.mark.capability("I6", clause="streamed fragments that overlap with compute")
def test_it_learns_as_diloco_does() -> None:
    """Five seeds: the mean loss within 15 % and two deviations of that of diloco that waits."""
    found = run_ranks(learned, 2, deadline=600.0)[0]
    right = found["diloco:8"]
    for name in ("streamed", "streamed int4"):
        losses = found[name]
        assert mean(losses) <= 1.15 * mean(right) + 2 * max(stdev(right), stdev(losses)), found
