"""Rates that are lowered when the loss diverges: the run converges, alike on any number of ranks."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import Loss, Task
from paceline.errors import RecipeError, StrategyError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.session.fit_loop import fitting
from paceline.session.own_loop_steps import OwnLoop
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from tests.parity.bad_value_job import BAD_STEP, build, recipe, train

pytestmark = pytest.mark.capability("K8")
STEPS = 60
STRATEGIES = [(2, "replicas=1 shard=2 zero=1"), (2, "replicas=1 pipeline=2")]


def steep() -> Task:
    """Quadratic in what is trained; with the rate of the recipe every step goes further past the minimum."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1), nn.Flatten(0))
    model[1].weight.requires_grad_(False)
    x = torch.rand(8, 6).repeat(STEPS, 1)

    def loss(model: nn.Module, batch: Tensor) -> Loss:
        return Loss((model(batch) - batch.sum(1)).square().sum(), len(batch))

    return Task(model, list(x), loss)


def diverging(strategy: str = "replicas=all", lr: float = 1.0, **health: Any) -> Recipe:
    settings = {"spike_factor": 3.0, "spike_window": 4, "spike": "lower-rate", **health}
    return recipe(strategy, more={"steps": STEPS, "optimizer": {"name": "sgd", "lr": lr}}, **settings)


def rates(cluster: Cluster, chosen: Recipe, halfway: int = STEPS) -> tuple[list[float], list[float], Any]:
    """Losses and rates of every step, and where it ends; at one step another session goes on."""
    losses, lrs = [], []
    session = build_test_session(cluster, chosen, steep)
    for stats in session.rounds():
        losses.append(stats.loss)
        lrs.append(stats.lr)
        if session.state.step == halfway:
            break
    if halfway < STEPS:
        again = build_test_session(cluster, chosen, steep)
        again.state.load(session.state.tensors(), session.state.scalars())
        for stats in again.rounds():
            losses.append(stats.loss)
            lrs.append(stats.lr)
        session = again
    return losses, lrs, {name: t.clone() for name, t in session.snapshot().tensors().items()}


def test_a_run_that_diverges_converges_with_lower_rates() -> None:
    losses, lrs, end = rates(Cluster.single(), diverging())
    assert max(losses) > 1e5 and losses[-1] < 0.05
    assert lrs == [1.0] * 4 + [0.5] * 4 + [0.25] * (STEPS - 8), "the step of a spike has the lower rate"
    assert end["rates/lowered"].tolist() == [2, 12]


@pytest.mark.parametrize(("num_ranks", "strategy"), STRATEGIES)
def test_ranks_lower_their_rates_together(num_ranks: int, strategy: str) -> None:
    """From step 8 on nothing grows any more what rounding did before."""
    right, lrs, end = rates(Cluster.single(), diverging())
    for found in run_ranks(rates, num_ranks, diverging(strategy)):
        assert found[1] == lrs and found[0][-1] == pytest.approx(right[-1], rel=1e-2)
        assert all(torch.allclose(found[2][name], t, atol=1e-2) for name, t in end.items())


def test_a_run_that_is_resumed_goes_on_with_the_lowered_rates() -> None:
    whole, parted = rates(Cluster.single(), diverging()), rates(Cluster.single(), diverging(), 6)
    assert whole[:2] == parted[:2]
    assert all(torch.equal(whole[2][name], t) for name, t in parted[2].items())


@pytest.mark.parametrize(("answer", "said"), [("stop", "is 401745"), ("skip", "were skipped already")])
def test_other_answers_do_not_cure_it(answer: str, said: str) -> None:
    """The twin: leaving steps out changes nothing about a rate."""
    assert said in train(Cluster.single(), diverging(spike=answer), steep).said


def test_the_event_says_why_and_a_run_is_not_lowered_for_ever() -> None:
    found = train(Cluster.single(), diverging(max_lowerings=1, rate_factor=0.9), steep)
    assert "the rates were lowered 1 times already" in found.said and "health.max_lowerings" in found.said
    (event,) = [record for name, record in found.events if name == "lower-rate"]
    assert (event["step"], event["multiplier"]) == (4, 0.9) and "the loss of step 4 is" in event["reason"]


def test_a_step_that_is_not_finite_is_left_out_and_lowers_the_rates() -> None:
    chosen = recipe(non_finite="lower-rate", rate_factor=0.25)
    found = train(Cluster.single(), chosen, partial(build, math.nan))
    assert [step for step, applied in found.seen if not applied] == [BAD_STEP]
    assert [name for name, _ in found.events if name in ("skip", "lower-rate")] == ["lower-rate", "skip"]
    assert int(found.end["rates/lowered"][0]) == 1 and all(
        bool(t.isfinite().all()) for t in found.end.values()
    )


def test_where_it_could_not_act_it_is_refused() -> None:
    with pytest.raises(StrategyError, match='"lower-rate" needs sync=every-step'):
        build_test_session(Cluster.single(), diverging("replicas=1 sync=local:2"), steep)
    session = build_test_session(Cluster.single(), diverging(), steep)
    with fitting(session, None, []) as found, pytest.raises(RecipeError, match="has its own scheduler"):
        OwnLoop(session, found).schedule(torch.optim.lr_scheduler.ConstantLR)
