"""Strategies whose memory is not planned: each is refused by name, and a run with a budget does not start."""

from __future__ import annotations

import re

import pytest

from paceline.errors import StrategyError
from paceline.job.cluster import Cluster
from paceline.plan import check_budget, plan_memory
from paceline.recipe import Recipe, Strategy
from paceline.testing.parity import build_test_session
from tests.unit.plan.gpt_jobs import gpt, recipe


@pytest.mark.capability("L3")
@pytest.mark.parametrize(
    ("strategy", "unplanned"),
    [
        ("replicas=1 servers=1 sync=server", "sync=server"),
        ("replicas=2 sync=gossip:0", "sync=gossip:0"),
        ("replicas=2 sync=hogwild", "sync=hogwild"),
        ("replicas=1 pipeline=2 sync=pipedream", "sync=pipedream"),
        ("replicas=2 sync=every-step@2,local:1", "sync=every-step@2,local:1"),
        ("replicas=2 codec=int8", "codec=int8"),
        ("replicas=2 codec=lossless", "codec=lossless"),
        ("replicas=2 codec=auto", "codec=auto"),
        ("replicas=2 route=ring", "route=ring"),
        ("replicas=2 lanes=2", "lanes=2"),
        ("replicas=2 pipeline=2 lanes=2", "lanes=2"),
        ("replicas=2 codec=sign route=ring sync=local:1", "codec=sign and route=ring"),
    ],
)
def test_what_is_not_planned_is_refused_with_a_reason(strategy: str, unplanned: str) -> None:
    words, message = recipe(strategy, steps=4), f"the memory of {re.escape(unplanned)} is not planned"
    for plan in (plan_memory, check_budget):
        with pytest.raises(StrategyError, match=message) as error:
            plan(words, gpt(), 2)
        assert "leave memory.budget out" in error.value.next_step


@pytest.mark.capability("L3")
@pytest.mark.parametrize("planned", ["route=native", "reproducible", "pipeline"])
def test_automatic_routes_between_hosts_are_not_planned(planned: str) -> None:
    """Their buffers depend on what is measured; other routes, and stages that sum nothing, are planned."""
    with pytest.raises(StrategyError, match="the memory of route=auto between hosts is not planned"):
        plan_memory(recipe("replicas=2"), gpt(), 2, nodes=2)
    strategy = {"route=native": "replicas=2 route=native", "pipeline": "replicas=1 pipeline=2"}
    words = recipe(strategy.get(planned, "replicas=2"), reproducible=planned == "reproducible")
    assert plan_memory(words, gpt(), 2, nodes=2).peak > 0


@pytest.mark.capability("L3")
def test_a_run_with_a_budget_that_is_not_planned_does_not_start() -> None:
    words = {"task": "sum", "steps": 4, "strategy": Strategy.parse("replicas=1 sync=every-step@2,diloco:2")}
    build_test_session(Cluster.single(), Recipe.model_validate(words)).close()
    with pytest.raises(StrategyError, match="sync=every-step@2,diloco:2 is not planned"):
        build_test_session(Cluster.single(), Recipe.model_validate(words | {"memory": {"budget": "64MiB"}}))
