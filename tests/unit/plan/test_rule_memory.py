"""What rules say that they keep, as it is planned. No process is started."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline import Loss, Task
from paceline.errors import StrategyError
from paceline.job.cluster import Cluster
from paceline.plan import check_budget, plan_memory
from paceline.recipe import Recipe
from paceline.recipe.registry.sync_specs import SYNC_SPECS
from paceline.recipe.registry.word_spec import import_object
from paceline.testing.parity import build_test_session
from tests.unit.plan.gpt_jobs import gpt, recipe


@pytest.mark.capability("L3")
def test_a_budget_holds_for_every_rule_of_a_run() -> None:
    """The second one keeps where a round began; while it takes over, the state is there again."""
    switching = {"task": "sum", "steps": 4, "strategy": "replicas=1 sync=every-step@2,diloco:2"}
    build_test_session(Cluster.single(), Recipe.model_validate(switching)).close()
    budget = switching | {"memory": {"budget": "64MiB"}}
    build_test_session(Cluster.single(), Recipe.model_validate(budget)).close()
    task, words = gpt(), "replicas=2 route=native sync="
    alone = {rule: plan_memory(recipe(words + rule), task, 2).peak for rule in ("every-step", "diloco:2")}
    both = plan_memory(recipe(words + "every-step@2,diloco:2"), task, 2)
    assert both.peak >= max(alone.values()) > alone["every-step"]
    tight = recipe(
        words + "every-step@2,diloco:2", memory={"budget": alone["every-step"], "recompute": "none"}
    )
    error = check_budget(tight, task, 2).refusal
    assert error is not None and ("under diloco:2" in error.what or "switch to diloco:2" in error.what)


def untied() -> Task:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    samples = list(torch.zeros(16, 64))
    return Task(model, samples, lambda m, x: Loss(m(x).sum(), len(x)), blocks=lambda m: [*m])


def copies(rule: str, stages: int) -> list[float]:
    """By stage, how many times its weights are there, at most; of 400 steps 20 are between two pauses."""
    words = f"replicas=1 pipeline={stages} sync={rule}"
    plan = plan_memory(recipe(words, steps=400), untied(), stages)
    return [
        max(parts.parameters for when, parts in rank.moments.items() if not when.startswith("building"))
        / rank.moments["building"].parameters
        for rank in plan.ranks
    ]


@pytest.mark.capability("L3", "D6")
def test_a_stage_keeps_the_weights_that_are_in_flight_or_two_versions() -> None:
    assert copies("pipedream", 3) == [4, 3, 2]
    assert copies("pipedream:2bw", 3) == [2, 2, 2]
    with pytest.raises(StrategyError, match="with the weights of today"):
        words = "replicas=1 pipeline=2 sync=pipedream"
        plan_memory(recipe(words, memory={"recompute": "0"}), untied(), 2)
    budget = {"budget": 1 << 10}  # which nothing keeps, and nothing may be computed again
    error = check_budget(recipe("replicas=1 pipeline=2 sync=pipedream", memory=budget), untied(), 2).refusal
    assert error is not None


@pytest.mark.capability("L3")
def test_a_server_holds_the_state_and_a_worker_what_comes_and_goes() -> None:
    words = "replicas=3 servers=1 sync="
    server, worker = plan_memory(recipe(words + "server"), gpt(), 4).ranks
    assert (server.rank, worker.rank) == (0, 1)
    assert server.peak.moments > 0 == worker.peak.moments
    assert "backward" in worker.moments and "backward" not in server.moments
    apart = plan_memory(recipe(words + "server-async"), gpt(), 4).ranks[0]
    more = server.moments["pushes"].gradients - server.stays.gradients
    assert more == apart.stays.gradients > 0  # the sum of what three have pushed
    assert "pushes" not in apart.moments


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("replicas=2 codec=int8 sync=every-step@2,local:1", "codec=int8 where a rule follows another"),
        ("replicas=1 servers=1 sync=every-step@2,server", "sync=every-step@2,server, at last with a server,"),
    ],
)
def test_what_a_switch_keeps_without_a_form_is_refused_and_not_guessed(words: str, said: str) -> None:
    with pytest.raises(StrategyError, match=f"what {said} keeps in memory has no closed form yet"):
        plan_memory(recipe(words, steps=4), gpt(), 2)


@pytest.mark.capability("L3")
def test_every_rule_says_what_it_keeps() -> None:
    built = [spec for spec in SYNC_SPECS if spec.is_built and not spec.chooses]
    assert len(built) > 8 and all(callable(import_object(spec.memory)) for spec in built)
