"""Ranks that hold parts of the state lose one of them: the others rebuild it from copies in memory."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import pytest

from paceline.comm.group_collectives import all_gather_texts
from paceline.errors import CommunicationError
from paceline.job.cluster import Cluster
from paceline.parallel import buddy_copies
from paceline.parallel.buddy_copies import divided_pieces
from paceline.recipe import Recipe
from paceline.session.membership_change import change_members
from paceline.session.session import Session
from paceline.state.slot import TensorPiece
from paceline.testing import run_ranks
from paceline.testing.parity import Trajectory, build_test_session, make_task, whole_trajectory
from tests.parity.training_runs import train_whole

STEPS, CHANGE = 6, 3


def digits(strategy: str) -> Recipe:
    return Recipe(
        task="digits",
        options={"model": "mlp", "dropout": 0.1},
        steps=STEPS,
        batch={"size": 46, "shards": 6},
        optimizer={"name": "adamw", "lr": 1e-3, "clip_norm": 0.5},
        precision={"compute": "fp32"},
        average={"decay": 0.9},
        reproducible=True,
        strategy=strategy,
        elastic={"redundancy": "buddy"},
    )


def until(session: Session, step: int, losses: dict[int, float]) -> None:
    for stats in session.rounds():
        losses[session.state.step - 1] = stats.loss
        if session.state.step == step:
            return


def end_of(session: Session, losses: dict[int, float]) -> Trajectory:
    found = whole_trajectory([losses[step] for step in sorted(losses)], session)
    session.close()
    session.cluster.disconnect()
    return found


def survive(cluster: Cluster, recipe: Recipe, victim: int, is_stale: bool) -> Any:
    """One rank is killed in a backward; the steps that are taken again, and the end of the run."""
    session, losses = build_test_session(cluster, recipe), {}
    if is_stale:
        plan_copy, earlier = buddy_copies.plan_copy, []

        def plan_earlier(state: Any, pieces: Any) -> Any:
            """The values of the step before, under the number of this one."""
            values = [type(piece)(piece.slot, piece.tensor.clone()) for piece in pieces]
            earlier.append(values)
            same = [one for one in earlier[-2:] if len(one) == len(values)]
            return plan_copy(state, same[0])

        vars(buddy_copies)["plan_copy"] = plan_earlier
    until(session, CHANGE, losses)
    # the neighbour reads where this rank has written, and one more buffer is free for the next step
    assert session.copies is not None and session.copies.cost()["bytes"] == 3 * session.copies.num_bytes
    if cluster.global_rank == victim:
        for parameter in session.runner.sharded_model.computes.values():
            parameter.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(CommunicationError):
        until(session, STEPS, losses)
    change_members(session, 60.0, partial(make_task, recipe))
    began = session.state.step
    until(session, STEPS, losses)
    return session.cluster.world_size, began, end_of(session, losses)


@cache
def undisturbed() -> Trajectory:
    """The end of a run of two plain replicas that loses nobody."""
    plain = digits("replicas=1 shard=2 zero=1").replace(strategy="replicas=2", elastic={})
    return run_ranks(train_whole, 2, plain)[0]


def run(strategy: str, victim: int, is_stale: bool = False) -> list[Any]:
    num_ranks = 4 if "replicas=2" in strategy else 2 if "pipeline" in strategy else 3
    found = run_ranks(
        survive, num_ranks, digits(strategy), victim, is_stale, group_deadline=60.0, may_die=(victim,)
    )
    return [one for one in found if one is not None]


@pytest.mark.capability("N8", "N11", clause="parts of the state from copies in memory")
@pytest.mark.parametrize(
    ("strategy", "victim"),
    [
        ("replicas=1 shard=3 zero=1", 0),
        pytest.param("replicas=1 shard=3 zero=2", 1, marks=pytest.mark.soak),
        ("replicas=1 shard=3 zero=3", 2),
        pytest.param("replicas=2 shard=2 zero=1", 1, marks=pytest.mark.soak),
        ("replicas=1 pipeline=2", 1),
    ],
)
def test_the_others_rebuild_the_part_of_a_lost_rank_and_end_with_the_same_bits(
    strategy: str, victim: int
) -> None:
    for world_size, began, end in run(strategy, victim):
        assert world_size == (3 if "replicas=2" in strategy else 1 if "pipeline" in strategy else 2)
        assert began == CHANGE and end.distance(undisturbed()) == 0.0
        assert end.losses == undisturbed().losses


@pytest.mark.capability("N8", clause="parts of the state from copies in memory")
def test_a_stage_that_waits_for_one_that_has_seen_the_loss_does_not_stay_behind() -> None:
    """The first of three stages waits for a message of the second when the last one is lost."""
    recipe = digits("replicas=1 pipeline=3").replace(options={"model": "mlp", "hidden": [32, 24]})
    found = run_ranks(survive, 3, recipe, 2, False, group_deadline=30.0, may_die=(2,))
    right = run_ranks(train_whole, 2, recipe.replace(strategy="replicas=2", elastic={}))[0]
    ends = [one for one in found if one is not None]
    assert [(world_size, began) for world_size, began, _ in ends] == [(2, CHANGE)] * 2
    assert all(end.distance(right) == 0.0 for _, _, end in ends)


@pytest.mark.capability("N8", clause="parts of the state from copies in memory")
def test_a_copy_that_is_a_step_old_is_seen() -> None:
    """The mutation twin: neighbours keep the values of the step before."""
    ends = [end for _, _, end in run("replicas=1 shard=3 zero=1", 1, True)]
    assert ends[0].distance(undisturbed()) > 1e-5


def digest(pieces: Sequence[TensorPiece]) -> str:
    """The hash of some tensors with their names and parts."""
    values = [(piece.slot.name, piece.slot.part, piece.tensor.numpy().tobytes()) for piece in pieces]
    return hashlib.sha256(repr(sorted(values)).encode()).hexdigest()


def compare_generations(cluster: Cluster, keeps: bool) -> list[tuple[int, int, bool]]:
    """Return, by step and age in steps, whether the copies of the own and the neighbour's part are right."""
    if not keeps:
        vars(buddy_copies)["_NUM_KEPT"] = 0
    session = build_test_session(cluster, digits("replicas=1 shard=3 zero=3"))
    copies, world, right = session.copies, session.mesh.world, list[list[str]]()
    assert copies is not None
    found = []
    for step in range(6):
        own = digest(divided_pieces(session.state)[0])
        right.append(all_gather_texts(own, world, session.net))
        until(session, step + 1, {})
        for age in range(min(2, step + 1)):
            mine, neighbours = copies.contribution(step - age, ())[0]
            expected = [right[step - age][rank] for rank in (world.rank, (world.rank - 1) % 3)]
            found.append((step, age, [digest(mine.pieces), digest(neighbours.pieces)] == expected))
    session.close()
    session.cluster.disconnect()
    return found


@pytest.mark.capability("N8", "N11", clause="parts of the state from copies in memory")
@pytest.mark.parametrize("keeps", [True, False])
def test_the_copies_of_two_steps_are_whole_while_the_next_one_is_taken(keeps: bool) -> None:
    """The mutation twin writes the next copy over that of the step before."""
    for found in run_ranks(compare_generations, 3, keeps, group_deadline=60.0):
        assert all(is_right for _, age, is_right in found if age == 0)
        assert all(is_right for _, age, is_right in found if age == 1) == keeps
