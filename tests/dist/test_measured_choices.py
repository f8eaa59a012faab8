"""Buckets, stages and recomputation chosen by measurement: ranks agree, and no answer changes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from paceline import Loss, Task
from paceline.comm.link_profile import LinkModel, LinkProfile
from paceline.job.cluster import Cluster
from paceline.plan import plan_memory
from paceline.recipe import Recipe
from paceline.session import build_session
from paceline.testing import run_ranks
from paceline.testing.parity import Trajectory, build_test_session, make_task, trajectory_of
from paceline.tuning.bucket_choice import MIN_BUCKET_BYTES
from tests.allocations import SMALL_BYTES, Case, allocated, case
from tests.planned_tasks import small_gpt


def chosen(cluster: Cluster, recipe: Recipe) -> tuple[Recipe, list[str]]:
    said: list[str] = []
    session = build_session(recipe, make_task(recipe), cluster, torch.device("cpu"), warn=said.append)
    found = session.recipe
    session.close()
    return found, [text for text in said if text.startswith("buckets: ")]


@pytest.mark.capability("G10")
def test_links_are_measured_ranks_agree_and_a_run_that_goes_on_keeps_to_it() -> None:
    most = 1 << 24
    recipe = Recipe(
        task="digits",
        steps=1,
        strategy="replicas=2 route=native",
        runtime={"bucket_latency": 0.5, "bucket_bytes": most},
    )
    (first, said), (second, _) = run_ranks(chosen, 2, recipe)
    assert first == second and MIN_BUCKET_BYTES <= first.runtime.bucket_bytes <= most
    assert len(said) == 1 and "measured in" in said[0] and f"{first.runtime.bucket_bytes:,} bytes" in said[0]
    (again, silence), _ = run_ranks(chosen, 2, first)
    assert again.runtime == first.runtime and silence == []


@pytest.mark.capability("G10")
def test_links_that_are_known_are_not_measured(tmp_path: Path) -> None:
    LinkProfile(("h0", "h1"), (), LinkModel(5e-4, 8e-8, 0.0, ())).save(tmp_path / "links.json")
    runtime = {"bucket_latency": 0.05, "link_profile": str(tmp_path / "links.json")}
    recipe = Recipe(task="digits", steps=1, strategy="replicas=2 route=native", runtime=runtime)
    (first, said), _ = run_ranks(chosen, 2, recipe)
    assert first.runtime.bucket_bytes == 1 << 18 and "links.json" in said[0]
    assert run_ranks(chosen, 2, first)[0] == (first, [])


HEAVY, LINKS = 1, 6


class Slow(nn.Linear):
    """A layer that takes four times as long as all others, for no reason that its size could tell."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return super().forward(x)


def lopsided() -> Task:
    torch.manual_seed(0)
    layers = [Slow(8, 8) if k == HEAVY else nn.Linear(8, 8) for k in range(LINKS)]
    return Task(
        nn.Sequential(*layers),
        list(torch.rand(16, 8)),
        lambda model, x: Loss(model(x).square().sum(), len(x)),
    )


def recipe(strategy: str) -> Recipe:
    return Recipe.model_validate(
        {
            "task": "sum",
            "steps": 2,
            "batch": {"size": 8, "shards": 2},
            "strategy": strategy,
            "reproducible": True,
            "precision": {"compute": "fp32"},
            "runtime": {"threads": 1},
        }
    )


def train(cluster: Cluster, strategy: str) -> tuple[str, int, Trajectory, list[str]]:
    """The cut, how many modules this rank has, where it ended, and what the folder would be told."""
    torch.set_num_threads(1)
    session = build_test_session(cluster, recipe(strategy), lopsided)
    losses = [stats.loss for stats in session.rounds()]
    held = len({slot.name.partition(".")[0] for slot in session.runner.sharded_model.computes})
    told = [name for name, _ in session.events.take()]
    result = session.recipe.strategy.stages, held, trajectory_of(losses, session), told
    session.close()
    return result


@pytest.mark.capability("D8", clause="where the cut is, not the time of a step")
def test_the_slow_layer_has_a_stage_of_few_and_the_bits_are_those_of_one_process() -> None:
    _, _, alone, _ = train(Cluster.single(), "replicas=1")
    first, second = run_ranks(train, 2, "replicas=1 pipeline=2 stages=time")
    assert first[0] == second[0]
    assert first[0] in ("2,4", "1,5")  # the slow one with as few others as noise allows
    assert f"{first[1]},{second[1]}" == first[0]
    assert "stages" in first[3]
    for _, _, found, _ in (first, second):
        assert found.losses == alone.losses
        assert all(torch.equal(found.parameters[name], alone.parameters[name]) for name in found.parameters)
    even = run_ranks(train, 2, "replicas=1 pipeline=2")
    assert [one[1] for one in even] == [3, 3]  # the twin: by parameters


STAGES = "replicas=1 pipeline=2"


def train_of_recompute(cluster: Cluster, recipe: Recipe) -> tuple[Trajectory, str, dict[str, object]]:
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
    ends, (found, word, told) = train_of_recompute(cluster, plain)[0], train_of_recompute(cluster, recipe)
    equal = found.losses == ends.losses and all(
        torch.equal(found.parameters[name], ends.parameters[name]) for name in ends.parameters
    )
    return equal, word, told, allocated(cluster, [Case(recipe, "gpt"), Case(plain, "gpt")])


@pytest.mark.soak
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
