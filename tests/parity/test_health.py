"""Bad numbers and losses that jump: seen before the update, named by tensor, rank and step, and answered."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from paceline import Loss, Task
from paceline.comm.collectives.error_feedback import ErrorFeedbackBuffers
from paceline.errors import RecipeError, StrategyError
from paceline.job.cluster import Cluster
from paceline.observe import JsonLinesSink
from paceline.recipe import Recipe
from paceline.session import fit
from paceline.session.fit_loop import fitting
from paceline.session.own_loop_steps import OwnLoop
from paceline.sync.health import LossSpikeDetector
from paceline.sync.update import lower_scale_or, raise_error
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from tests.parity.bad_value_job import (
    BAD_STEP,
    STEPS,
    bad_slope,
    build,
    distance,
    recipe,
    run_without,
    train,
    train_with_each,
)

pytestmark = pytest.mark.capability("K8")
bad = partial(build, math.nan)


def test_stop_names_the_tensor_the_rank_and_the_step() -> None:
    for num_ranks, strategy, found in train_with_each(recipe, bad):
        assert f"the loss is nan in step {BAD_STEP}: on rank {num_ranks - 1} the loss is nan" in found.said
        assert f"where: rank {num_ranks - 1}, step {BAD_STEP}" in found.said
        how_many = "some" if "zero" in strategy else "1"  # of what was let go of only the norm is known
        assert f"gradient of 'last.bias' is not finite ({how_many} of 1 value" in found.said
        assert "next:  lower optimizer.lr" in found.said
        assert [step for step, _ in found.seen] == list(range(BAD_STEP))
        reached = "it has reached rank 0" in found.said
        assert reached == ("pipeline" in strategy)  # replicas have gradients of their own


def slopes(cluster: Cluster) -> list[str]:
    """A gradient that is not finite where every loss is: plainly, let go of, and with sums in one order."""
    plain = [recipe()] if cluster.world_size == 1 else [recipe(), *map(recipe, LET_GO)]
    found = [train(cluster, one, bad_slope).said for one in plain]
    ordered = recipe(more={"reproducible": True})
    return [*found, train(cluster, ordered, bad_slope).said, train(cluster, ordered, bad).said]


LET_GO = [f"replicas=1 shard=2 zero={zero}" for zero in (1, 2, 3)]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_gradient_is_named_where_every_loss_is_finite(num_ranks: int) -> None:
    """With sums in one order nobody keeps the gradient of a rank; a loss still names its rank."""
    for plain, *let_go, ordered, of_loss in run_ranks(slopes, num_ranks):
        assert f"the gradient is not finite in step {BAD_STEP}: " in plain
        assert "gradient of 'norm.weight' is not finite (4 of 4 values)" in plain
        for said in let_go:
            assert "the gradient of 'norm.weight' is not finite (some of 4 values)" in said
        for said in (plain, *let_go):
            assert f"on rank {num_ranks - 1} the loss is " in said and "the loss is nan" not in said
        if num_ranks == 2:
            assert "the sum over ranks of the gradient of 'norm.weight' is not finite (4 of 4" in ordered
            assert f"where: step {BAD_STEP}" in ordered
            assert "on rank 1 the loss is nan" in of_loss and f"where: rank 1, step {BAD_STEP}" in of_loss


def test_skip_leaves_the_step_out_as_if_it_had_not_been() -> None:
    """Neither parameters nor moments nor the statistics of BatchNorm hold anything of it."""
    right = run_without([BAD_STEP])
    for num_ranks, strategy, found in train_with_each(partial(recipe, non_finite="skip"), bad):
        assert found.said == ""
        assert [step for step, applied in found.seen if not applied] == [BAD_STEP]
        (note,) = [record for name, record in found.events if name == "skip"]
        assert note["step"] == BAD_STEP and f"on rank {num_ranks - 1} the loss is nan" in note["reason"]
        assert all(bool(t.isfinite().all()) for t in found.end.values())
        assert int(found.end["model/norm.num_batches_tracked"]) == STEPS - 1
        assert distance(found.end, right) <= (1e-2 if "int8" in strategy else 1e-5)


def coded(cluster: Cluster) -> list[dict[str, torch.Tensor]]:
    """Where runs end: with the step, without it, and with it where its residuals are kept (the twin)."""

    def end(make: Any, steps: int) -> dict[str, torch.Tensor]:
        chosen = recipe("replicas=all codec=int8", non_finite="skip", more={"steps": steps})
        return train(cluster, chosen, make).end

    found = [end(bad, STEPS), end(partial(build, math.nan, without=[BAD_STEP]), STEPS - 1)]
    with patch.object(ErrorFeedbackBuffers, "abort", ErrorFeedbackBuffers.commit):
        return [*found, end(bad, STEPS)]


def test_what_coding_owes_is_not_lost_with_a_step() -> None:
    """The run that never had the step ends with the same bits, residuals and all."""
    for with_it, without, broken in run_ranks(coded, 2):
        assert any(name.startswith("residual/") for name in with_it)
        assert all(torch.equal(with_it[name], t) for name, t in without.items())
        assert not all(torch.equal(broken[name], t) for name, t in without.items())


def test_skipping_has_an_end() -> None:
    found = train(Cluster.single(), recipe(non_finite="skip", max_skips=3), lambda: bad(range(4, STEPS)))
    assert "step 7" in found.said and "; 3 steps before it had been skipped already" in found.said
    assert "health.max_skips" in found.said


def test_while_all_is_well_nothing_is_sent_for_it() -> None:
    """The ledger of a guarded run is that of a run that nobody guards."""

    def sent(cluster: Cluster, guarded: bool) -> dict[Any, int]:
        session = build_test_session(cluster, recipe(non_finite="skip", spike_factor=9.0), lambda: build(0.5))
        step = session.update_step
        assert "watch" in step.parts and step.observers
        if not guarded:
            step.parts = {k: part for k, part in step.parts.items() if k != "watch"}
            step.parts["finite"] = lower_scale_or(raise_error)
            step.observers.clear()
        list(session.rounds())
        return {key: entry.calls for key, entry in session.net.ledger.rows.items()}

    assert run_ranks(sent, 2, True) == run_ranks(sent, 2, False)


# fp16


def half(cluster: Cluster, scale: float, make: Any, **health: Any) -> Any:
    precision = {"compute": "fp16", "init_scale": scale, "growth_steps": 4}
    return train(cluster, recipe(more={"precision": precision}, **health), make)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_overflow_of_fp16_is_no_error(num_ranks: int) -> None:
    for found in run_ranks(half, num_ranks, 2.0**20, partial(build, 0.5)):
        overflows = [step for step, applied in found.seen if not applied]
        assert found.said == "" and overflows and len(overflows) < STEPS
        assert not [name for name, _ in found.events if name == "skip"]


def test_a_bad_sample_under_fp16_is_one() -> None:
    assert f"the loss is nan in step {BAD_STEP}" in half(Cluster.single(), 1.0, bad).said


def test_a_scale_that_can_fall_no_further_cures_nothing() -> None:
    """Each step before left the run where it was, and the next would have done so for ever."""
    found = half(Cluster.single(), 2.0**-21, lambda: bad_slope_from(2))
    assert [applied for _, applied in found.seen] == [True, True, False, False, False]
    assert "the gradient is not finite in step 5" in found.said


def bad_slope_from(step: int) -> Any:
    task = bad_slope()
    for i in range(8 * step, 8 * STEPS):
        task.data[i].fill_(-1.0)
    return task


# Where not all ranks take the same steps


def alone(cluster: Cluster) -> tuple[bool, int, list[float]]:
    """Replicas that train alone: the one with the bad sample leaves out its step, the other does not."""
    session = build_test_session(cluster, recipe("replicas=2 sync=local:2", non_finite="skip"), bad)
    stats = list(session.rounds())
    finite = all(bool(t.isfinite().all()) for t in session.state.tensors().values())
    assert all(math.isfinite(one.loss) for one in stats)
    return finite, session.state.num_updates, [one.metrics["skipped"] for one in stats]


def test_under_local_sgd_a_replica_answers_for_itself() -> None:
    (finite, updates, skipped), (other_finite, other_updates, told) = run_ranks(alone, 2)
    assert finite and other_finite
    assert (updates, other_updates) == (STEPS, STEPS - 1)
    assert skipped == told == [0, 0, 0, 1, 0, 0]  # rank 0, who reports, knows of it


def test_replicas_that_train_alone_do_not_go_back() -> None:
    with pytest.raises(StrategyError, match='health: "roll-back" needs sync=every-step'):
        build_test_session(Cluster.single(), recipe("replicas=1 sync=local:2", non_finite="roll-back"), bad)


@pytest.mark.parametrize(
    ("strategy", "health"),
    [
        ("replicas=1 pipeline=2 sync=pipedream", {"non_finite": "skip"}),
        ("replicas=1 servers=1 sync=server-async", {"spike_factor": 3.0}),
    ],
)
def test_what_a_strategy_cannot_do_is_refused(strategy: str, health: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=f"health.{next(iter(health))}: expected only with sync=every-step"):
        recipe(strategy, **health)


def test_options_that_would_do_nothing_are_refused() -> None:
    for health in ({"spike": "skip"}, {"spike_window": 8}, {"max_skips": 2}, {"max_roll_backs": 2}):
        with pytest.raises(RecipeError, match=f"health.{next(iter(health))}: expected only with"):
            recipe(**health)


def test_what_happened_is_in_the_metrics(tmp_path: Path) -> None:
    session = build_test_session(Cluster.single(), recipe(non_finite="skip"), partial(build, math.inf))
    fit(session, None, [JsonLinesSink(tmp_path / "metrics.jsonl")])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (event,) = [line for line in lines if line["event"] == "skip"]
    assert event["step"] == BAD_STEP and "on rank 0 the loss is nan" in event["reason"]
    (step,) = [line for line in lines if line["event"] == "step" and not line["applied"]]
    assert (step["step"], step["loss"], step["grad_norm"]) == (BAD_STEP, "nan", "nan")


def spiking(answer: str, strategy: str = "replicas=all") -> Any:
    return recipe(strategy, spike_factor=50.0, spike_window=4, spike=answer)


def test_a_spike_is_named_by_tensor_rank_and_step() -> None:
    for num_ranks, _, found in train_with_each(partial(spiking, "stop"), partial(build, 3000.0)):
        assert f"the loss of step {BAD_STEP} is" in found.said
        assert "the median of the last 4 is" in found.said
        assert f"on rank {num_ranks - 1} the loss is" in found.said
        assert "the largest gradient is that of '" in found.said
        assert len(found.seen) == BAD_STEP


def test_a_spike_is_left_out_and_nothing_else_is() -> None:
    found = train(Cluster.single(), spiking("skip"), partial(build, 3000.0))
    assert [step for step, applied in found.seen if not applied] == [BAD_STEP]
    assert distance(found.end, run_without([BAD_STEP])) <= 1e-6


def test_what_a_spike_is() -> None:
    watch = LossSpikeDetector(factor=3.0, window=4)
    assert not watch.is_spike(1e9)  # too little is known
    for loss in (1.0, 2.0, 1.0, 1.0):
        watch.accept(loss)
    assert watch.is_spike(3.1) and not watch.is_spike(2.9)
    assert not LossSpikeDetector(factor=None, window=4, losses=[1.0] * 4).is_spike(1e9)
    below = LossSpikeDetector(factor=3.0, window=2, losses=[-1.0, -1.0])
    assert below.is_spike(1.1) and not below.is_spike(-0.5)


STEPS_OF_RATES = 60
STRATEGIES_OF_RATES = [(2, "replicas=1 shard=2 zero=1"), (2, "replicas=1 pipeline=2")]


def steep() -> Task:
    """Quadratic in what is trained; with the rate of the recipe every step goes further past the minimum."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1), nn.Flatten(0))
    model[1].weight.requires_grad_(False)
    x = torch.rand(8, 6).repeat(STEPS_OF_RATES, 1)

    def loss(model: nn.Module, batch: Tensor) -> Loss:
        return Loss((model(batch) - batch.sum(1)).square().sum(), len(batch))

    return Task(model, list(x), loss)


def diverging(strategy: str = "replicas=all", lr: float = 1.0, **health: Any) -> Recipe:
    settings = {"spike_factor": 3.0, "spike_window": 4, "spike": "lower-rate", **health}
    return recipe(
        strategy, more={"steps": STEPS_OF_RATES, "optimizer": {"name": "sgd", "lr": lr}}, **settings
    )


def rates(
    cluster: Cluster, chosen: Recipe, halfway: int = STEPS_OF_RATES
) -> tuple[list[float], list[float], Any]:
    """Losses and rates of every step, and where it ends; at one step another session goes on."""
    losses, lrs = [], []
    session = build_test_session(cluster, chosen, steep)
    for stats in session.rounds():
        losses.append(stats.loss)
        lrs.append(stats.lr)
        if session.state.step == halfway:
            break
    if halfway < STEPS_OF_RATES:
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
    assert lrs == [1.0] * 4 + [0.5] * 4 + [0.25] * (STEPS_OF_RATES - 8), (
        "the step of a spike has the lower rate"
    )
    assert end["rates/lowered"].tolist() == [2, 12]


@pytest.mark.parametrize(("num_ranks", "strategy"), STRATEGIES_OF_RATES)
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


@pytest.mark.parametrize(("answer", "said"), [("stop", "is 40174"), ("skip", "had been skipped already")])
def test_other_answers_do_not_cure_it(answer: str, said: str) -> None:
    """The twin: leaving steps out changes nothing about a rate."""
    assert said in train(Cluster.single(), diverging(spike=answer), steep).said


def test_the_event_says_why_and_a_run_is_not_lowered_for_ever() -> None:
    found = train(Cluster.single(), diverging(max_lowerings=1, rate_factor=0.9), steep)
    assert "the rates were lowered 1 time already" in found.said and "health.max_lowerings" in found.said
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
