"""PipeDream against a plain loop in one process, where each stage has weights of the right age.

In PipeDream-2BW every gradient is one update old.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from paceline.data import MicroBatch, collate_samples
from paceline.errors import RecipeError, StrategyError
from paceline.job.cluster import Cluster
from paceline.parallel.pipeline import partition_model
from paceline.recipe import Recipe, Strategy
from paceline.session import Components, Session
from paceline.sync import PendingUpdate, UpdatePart
from paceline.sync.weight_stashing import DoubleBufferedWeights
from paceline.testing import run_ranks
from paceline.testing.contracts import RuleContract
from paceline.testing.parity import (
    CPU,
    StepInterrupt,
    Trajectory,
    build_test_session,
    make_task,
    whole_trajectory,
)
from tests.marks import soak_param
from tests.parity.training_runs import each_case, held_out_losses
from tests.recipes import recipe_of

ADAMW = {"name": "adamw", "lr": 2e-3}
ROUND = 20  # steps until the pipeline is empty, of 400
Weights = dict[str, Tensor]


digits = partial(
    recipe_of,
    task="digits",
    options={"model": "mlp", "hidden": [48, 32]},
    steps=20 * ROUND,
    batch={"size": 46, "shards": 4},
    optimizer={"name": "sgd", "lr": 0.05, "momentum": 0.9},
)


def two_rounds(cluster: Cluster, recipe: Recipe) -> Trajectory:
    session = build_test_session(cluster, recipe)
    losses = [stats.loss for _, stats in zip(range(2), session.rounds(), strict=False)]
    assert session.state.step == 2 * ROUND
    return whole_trajectory(losses, session)


def stages_of(session: Session, num_stages: int) -> dict[str, int]:
    """The stage of every parameter, by name."""
    cut = partition_model(session.task, session.state.model, num_stages, 0)
    return {name: stages[0] for name, stages in cut.holders.items()}


def delayed(num_stages: int, age: Callable[[int], int], clip_value: float = float("inf")) -> Weights:
    """Two rounds of steps whose gradients are taken at weights that are `age(stage)` updates old."""
    session = build_test_session(Cluster.single(), digits("replicas=1"))
    stage, parameters = stages_of(session, num_stages), dict(session.state.model.named_parameters())
    history: list[Weights] = []
    for step in range(2 * ROUND):
        history.append({n: p.detach().clone() for n, p in parameters.items()})
        start = step - step % ROUND
        used = {n: history[max(start, step - age(stage[n]))][n].requires_grad_() for n in parameters}
        total, count = Tensor([0.0]), 0.0
        for micro_batch in session.work.micro_batches(step):
            loss, items = loss_of(session, micro_batch, used)
            total, count = total + loss, count + items
        grads = torch.autograd.grad(total, list(used.values()))
        for p, grad in zip(parameters.values(), grads, strict=True):
            p.grad = (grad / count).clamp(-clip_value, clip_value)
        session.state.optimizer.step()
    return {n: p.detach() for n, p in parameters.items()}


def loss_of(session: Session, micro_batch: MicroBatch, weights: Weights) -> tuple[Tensor, float]:
    batch = collate_samples(session.task, [session.task.data[int(i)] for i in micro_batch.indices], CPU)
    found = session.task.loss(lambda x: functional_call(session.state.model, weights, (x,)), batch)
    return found.total, float(found.count)


def distance(a: Weights, b: Weights) -> float:
    return max(float((a[n] - b[n]).abs().max()) for n in b)


@pytest.mark.capability("D6")
@pytest.mark.parametrize("num_stages", [soak_param(2), 3])
def test_each_stage_is_as_old_as_the_paper_says_and_forward_and_backward_agree(num_stages: int) -> None:
    """With a fill and a drain in each of two rounds; without the age it is another trajectory (the twin)."""
    ends = run_ranks(two_rounds, num_stages, digits(f"replicas=1 pipeline={num_stages} sync=pipedream"))
    right = delayed(num_stages, lambda stage: num_stages - 1 - stage)
    assert all(distance(end.parameters, right) <= 1e-5 for end in ends)
    for wrong in (lambda stage: 0, lambda stage: num_stages - stage, lambda stage: stage):
        assert distance(delayed(num_stages, wrong), right) > 1e-3


def test_a_stage_clips_the_values_of_its_own_gradient() -> None:
    sgd = {"name": "sgd", "lr": 0.05, "momentum": 0.9, "clip_value": 1e-3}
    ends = run_ranks(two_rounds, 2, digits("replicas=1 pipeline=2 sync=pipedream", optimizer=sgd))
    right = delayed(2, lambda stage: 1 - stage, 1e-3)
    assert all(distance(end.parameters, right) <= 1e-5 for end in ends)
    assert distance(delayed(2, lambda stage: 1 - stage), right) > 1e-3


@pytest.mark.capability("D6")
def test_batch_statistics_move_once_a_step_and_every_stage_ends_with_all() -> None:
    recipe = digits("replicas=1 pipeline=2 sync=pipedream", options={"model": "convnet", "channels": 4})

    def counters(cluster: Cluster) -> dict[str, Tensor]:
        session = build_test_session(cluster, recipe)
        next(session.rounds())
        found = session.snapshot().tensors()
        return {n: t.clone() for n, t in found.items() if "running" in n or "num_batches" in n}

    first, last = run_ranks(counters, 2)
    assert first and all(torch.equal(first[n], last[n]) for n in first)
    counts = [int(t) for n, t in first.items() if n.endswith("num_batches_tracked")]
    assert counts == [ROUND] * 3
    assert all(float(t.abs().sum()) > 0 for n, t in first.items() if n.endswith("running_mean"))


@pytest.mark.capability("D6")
@pytest.mark.parametrize(
    "changes, words",
    [
        ({"optimizer": {"name": "sgd", "lr": 0.1, "clip_norm": 1.0}}, "optimizer.clip_norm"),
        ({"precision": {"compute": "fp16"}}, "precision.compute"),
        ({"memory": {"recompute": "blocks"}}, "newer weights than"),
    ],
)
def test_what_one_stage_cannot_decide_alone_is_refused(changes: dict[str, object], words: str) -> None:
    recipe = digits("replicas=1 pipeline=2 sync=pipedream", **changes)

    def build(cluster: Cluster) -> str:
        with pytest.raises(StrategyError) as caught:
            build_test_session(
                cluster, recipe, lambda: replace(make_task(recipe), blocks=lambda m: list(m.layers))
            )
        return str(caught.value)

    assert all(words in text for text in run_ranks(build, 2))


@pytest.mark.capability("D6")
@pytest.mark.parametrize("num_stages", [2, 3])
def test_each_backward_uses_the_weights_of_its_forward_and_is_as_stale_as_its_stage(num_stages: int) -> None:
    def run(cluster: Cluster) -> tuple[list[Any], dict[str, float]]:
        session = build_test_session(
            cluster, digits(f"replicas=1 pipeline={num_stages} sync=pipedream", steps=400)
        )
        stats = next(session.rounds())
        return session.rule.versions, dict(stats.metrics)

    ranks = run_ranks(run, num_stages)
    for stage, (versions, metrics) in enumerate(ranks):
        assert [v.step for v in versions] == list(range(20))
        assert all(v.forward == v.backward for v in versions)
        steady = versions[num_stages:]
        assert {v.applied - v.forward for v in steady} == {num_stages - stage - 1}
        assert all(v.applied - v.forward <= num_stages - stage - 1 for v in versions)
        assert metrics == ranks[0][1]
        stale = sum(v.applied - v.forward for v in versions) / len(versions)
        assert metrics[f"staleness of stage {stage}"] == pytest.approx(stale)


@pytest.mark.soak
@pytest.mark.capability("D6")
def test_pipedream_learns_about_as_well_as_every_step() -> None:
    """Held-out loss after 150 steps: the mean over three seeds is within 10 % of the synchronous one's."""

    def losses(cluster: Cluster, sync: str) -> list[float]:
        strategy = f"replicas=1 pipeline=2 sync={sync}"
        seeds = (digits(strategy, steps=150, seed=seed, optimizer=ADAMW) for seed in (1, 2, 3))
        return held_out_losses(cluster, seeds)

    stale, sync = run_ranks(each_case, 2, losses, [("pipedream",), ("every-step",)])[0]
    assert mean(stale) <= 1.1 * mean(sync) + 2 * stdev(sync), (stale, sync)
    assert stale != sync


def raises_once(parts: dict[str, UpdatePart]) -> dict[str, UpdatePart]:
    """Raise instead of the fifth update of a stage."""
    calls = count(1)

    def interrupt(record: PendingUpdate) -> None:
        if next(calls) == 5:
            raise StepInterrupt

    return {"interrupt": interrupt, **parts}


@pytest.mark.capability("D6", "Z1")
def test_pipedream_goes_back_to_where_it_was_empty() -> None:
    recipe = digits("replicas=1 pipeline=2 sync=pipedream", steps=40, optimizer=ADAMW)

    def run(cluster: Cluster, components: Components | None) -> Trajectory:
        session = build_test_session(cluster, recipe, components=components)
        losses: list[float] = []
        while session.state.step < session.num_steps:
            try:
                for stats in session.rounds():
                    losses.append(stats.loss)
            except StepInterrupt:
                session.abort()
        return whole_trajectory(losses, session)

    plain = run_ranks(run, 2, None)
    disturbed = run_ranks(run, 2, Components(update=raises_once))
    assert plain[0].losses == disturbed[0].losses
    assert plain[0].distance(disturbed[0]) == 0.0


@pytest.mark.capability("D6")
@pytest.mark.parametrize("flow", ["pipedream", "pipedream:2bw"])
def test_stages_agree_once_in_a_round_and_wait_for_nobody_in_an_update(flow: str) -> None:
    """The norm of a gradient is that of the own part, until the round is told.

    What a backend was given to send is let go of meanwhile: a round sends 80 messages each way.
    """

    def run(cluster: Cluster) -> tuple[int, list[float], float, int]:
        session = build_test_session(cluster, digits(f"replicas=1 pipeline=2 sync={flow} route=native"))
        norms, kept = list[float](), list[int]()
        session.update_step.observers.append(lambda record: norms.append(record.norm))
        under_way = session.runner._transport._in_flight
        session.update_step.observers.append(lambda record: kept.append(len(under_way)))
        before = sums_of(session)
        stats = next(session.rounds())
        return sums_of(session) - before, norms, stats.grad_norm, max(kept)

    def sums_of(session: Session) -> int:
        return sum(row.calls for (op, _), row in session.net.ledger.rows.items() if op == "all_reduce")

    ranks = run_ranks(run, 2)
    for calls, norms, norm, kept in ranks:
        assert (calls, len(norms)) == (1, ROUND)
        assert norm == pytest.approx(sum(own[-1] ** 2 for _, own, *_ in ranks) ** 0.5)
        assert 0 < kept <= 40  # of four steps, in two parts where sizes change


def recipe(num_stages: int, **changes: object) -> Recipe:
    return digits(f"replicas=1 pipeline={num_stages} sync=pipedream:2bw", **changes)


def one_old(stage: int) -> int:
    return 1


@pytest.mark.capability("D6")
@pytest.mark.parametrize("num_stages", [soak_param(2), 3])
def test_every_stage_is_one_update_old(num_stages: int) -> None:
    """With a fill and a drain in each of two rounds; another age gives another trajectory (the twins)."""
    ends = run_ranks(two_rounds, num_stages, recipe(num_stages))
    right = delayed(num_stages, one_old)
    assert all(distance(end.parameters, right) <= 1e-5 for end in ends)
    wrong: tuple[Callable[[int], int], ...] = (lambda s: 0, lambda s: 2, lambda s: num_stages - 1 - s)
    for age in wrong:
        assert distance(delayed(num_stages, age), right) > 1e-3


@pytest.mark.capability("D6", "Z2")
def test_an_update_in_memory_that_is_in_use_is_another_trajectory() -> None:
    """The mutation twin: parameters stay where micro-batches in flight read them."""

    def broken(cluster: Cluster) -> Trajectory:
        DoubleBufferedWeights.make_room = lambda self: None
        return two_rounds(cluster, recipe(2))

    right = delayed(2, one_old)
    assert any(distance(end.parameters, right) > 1e-3 for end in run_ranks(broken, 2))


@pytest.mark.capability("D6")
def test_a_stage_of_four_keeps_two_versions_and_backward_uses_that_of_its_forward() -> None:
    """Also where there are fewer micro-batches than stages: forwards wait for the update that they need."""

    def run(cluster: Cluster, shards: int) -> tuple[list[Any], int, dict[str, float]]:
        of = recipe(4, options={"model": "mlp", "hidden": [24, 24, 24]}, batch={"size": 46, "shards": shards})
        session = build_test_session(cluster, of)
        weights, places = session.rule.flow.weights, set[int]()
        take = weights.add_version

        def look(step: int, updates: int) -> None:
            take(step, updates)
            places.update(
                next(iter(version.weights.values())).data_ptr()
                for version in weights.versions_by_step.values()
            )

        weights.add_version = look
        stats = next(session.rounds())
        return list(session.rule.versions), len(places), dict(stats.metrics)

    for shards in (4, 2):
        for stage, (versions, num_places, metrics) in enumerate(run_ranks(run, 4, shards)):
            assert [v.step for v in versions] == list(range(ROUND))
            assert all(v.forward == v.backward for v in versions)
            assert [v.applied - v.forward for v in versions] == [0] + [1] * (ROUND - 1)
            assert num_places == 2
            assert metrics[f"staleness of stage {stage}"] == pytest.approx((ROUND - 1) / ROUND)


def test_its_argument_is_checked() -> None:
    text = "replicas=1 pipeline=2 sync=pipedream:2bw"
    assert str(Strategy.parse(text)) == text
    with pytest.raises(RecipeError, match="2bw or nothing"):
        Strategy.parse("replicas=1 pipeline=2 sync=pipedream:3bw")


@pytest.mark.soak
@pytest.mark.capability("D6", "Z1")
class TestTwoBuffers(RuleContract):
    strategy, num_ranks = "replicas=1 pipeline=2 sync=pipedream:2bw", 2
