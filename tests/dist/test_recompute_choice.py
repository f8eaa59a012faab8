"""A run that was given a budget: what it computes again keeps it, as measured, and changes no bit."""

from __future__ import annotations

import pytest
import torch

from paceline.job.cluster import Cluster
from paceline.plan import plan_memory
from paceline.recipe import Recipe
from paceline.testing import run_ranks
from paceline.testing.parity import Trajectory, build_test_session, trajectory_of
from tests.allocations import SMALL_BYTES, Case, allocated, case
from tests.planned_tasks import small_gpt

STAGES = "replicas=1 pipeline=2"


def train(cluster: Cluster, recipe: Recipe) -> tuple[Trajectory, str, dict[str, object]]:
    """Where it ended, what it computed again, and what the folder would be told of it."""
    torch.set_num_threads(1)
    session = build_test_session(cluster, recipe, small_gpt)
    losses = [stats.loss for stats in session.rounds()]
    told = dict(session.events.take())
    found = trajectory_of(losses, session), session.recipe.memory.recompute, told
    session.close()
    return found


def both(cluster: Cluster, plain: Recipe, recipe: Recipe) -> tuple[bool, str, dict[str, object], list[int]]:
    """Whether the ends are equal to the bit; the choice, what was told, and the bytes of both."""
    ends, (found, word, told) = train(cluster, plain)[0], train(cluster, recipe)
    equal = found.losses == ends.losses and all(
        torch.equal(found.parameters[name], ends.parameters[name]) for name in ends.parameters
    )
    return equal, word, told, allocated(cluster, [Case(recipe, "gpt"), Case(plain, "gpt")])


@pytest.mark.capability("L2")
def test_a_run_keeps_its_budget_with_the_bits_of_no_recomputation() -> None:
    plain = case(STAGES, shards=4).recipe
    needs = {
        how: plan_memory(plain.replace(memory={"recompute": how}), small_gpt(), 2).peak
        for how in ("none", "blocks")
    }
    budget = (2 * needs["none"] + needs["blocks"]) // 3
    found = run_ranks(both, 2, plain, plain.replace(memory={"budget": budget}))
    words = {word for _, word, _, _ in found}
    assert len(words) == 1 and words < {"0", "1", "2", "3", "0,1", "0,2", "1,2"}  # some, and not all
    assert all(equal for equal, _, _, _ in found)
    assert all(used <= budget + SMALL_BYTES for _, _, _, (used, _) in found)
    assert found[0][2]["recompute"]["recompute"] in words
    assert max(plainly for _, _, _, (_, plainly) in found) > budget + SMALL_BYTES  # the twin
