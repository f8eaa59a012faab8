"""Replicas that train alone and are spread over several ranks: they go where whole ones go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from paceline.checkpoint.storage import StorageFolder
from paceline.job.cluster import Cluster
from paceline.parallel.session_context import SessionContext
from paceline.parallel.state_hash import find_divergence
from paceline.recipe import Recipe, Strategy
from paceline.session import checkpointing, evaluate, fit
from paceline.state.slot import ExtraState
from paceline.sync import DiLoCo, ReplicaOptimizerState, diloco
from paceline.testing import run_ranks
from paceline.testing.contracts import RuleContract
from paceline.testing.parity import Trajectory, build_test_session, whole_trajectory
from tests.texts import SMALL_TEXT

pytestmark = [pytest.mark.timeout(600), pytest.mark.capability("I6", "Z1")]
NEAR, APART = 5e-6, 1e-4  # sums in another order; a step that is another one
STREAMED = {"fragments": 3, "delay_steps": 1, "mixing": 0.25}


class Case(NamedTuple):
    """A rule on a model, with whole replicas and with what their ranks are spread by."""

    make: Any
    sync: str
    spreads: tuple[str, ...]
    changes: dict[str, Any] = {}  # noqa: RUF012

    def recipe(self, spread: str = "") -> Recipe:
        return self.make(f"replicas=2 {spread} sync={self.sync}", **self.changes)


def digits(strategy: str, **changes: Any) -> Recipe:
    """Replicas have unequal shares, so that a mean without weights shows, and a clip needs whole norms."""
    settings: dict[str, Any] = {
        "task": "digits",
        "options": {"model": "mlp", "hidden": [24, 16], "dropout": 0.1},
        "steps": 14,
        "batch": {"size": 45, "shards": 5},
        "optimizer": {"name": "adamw", "lr": 2e-3, "clip_norm": 0.5},
        "strategy": Strategy.parse(strategy),
    }
    return Recipe(**(settings | changes))


def convnet(strategy: str, **changes: Any) -> Recipe:
    """Statistics of BatchNorm."""
    return digits(strategy, options={"model": "convnet", "channels": 4}, steps=6, **changes)


def gpt(strategy: str, **changes: Any) -> Recipe:
    """The embedding is the output layer too; 15 positions, which two ranks cannot halve."""
    options = {"layers": 2, "width": 24, "heads": 2, "context": 15, "sample_tokens": 0, "text": SMALL_TEXT}
    sizes = {"train_tokens": 8_000, "held_out_tokens": 200}
    return digits(strategy, task="byte-gpt", options={**options, **sizes}, steps=8, **changes)


ALL = ("shard=2 zero=1", "shard=2 zero=2", "shard=2 zero=3", "pipeline=2", "tensor=2")
CASES = {
    "local": Case(digits, "local:4", ALL),
    "diloco": Case(digits, "diloco:4", (*ALL, "shard=2 zero=3 route=native")),
    "streamed": Case(digits, "diloco:6", ALL, {"outer": STREAMED}),
    "late": Case(digits, "every-step@4,local:2@8,diloco:3", ALL),
    "buffers": Case(convnet, "local:3", ("shard=2 zero=1", "pipeline=2")),
    "tied": Case(gpt, "diloco:3", ("pipeline=2 schedule=1f1b", "tensor=2", "context=2", "shard=2 zero=2")),
}


def run(cluster: Cluster, recipes: list[Recipe], *, compares: bool = True) -> list[tuple[Trajectory, float]]:
    """Where each ends, and its held-out loss; what several ranks hold is compared."""
    found = []
    for recipe in recipes:
        session = build_test_session(cluster, recipe)
        losses = [stats.loss for stats in session.rounds()]
        score = evaluate(session)
        assert score is not None
        if compares:
            assert find_divergence(session.state, session.mesh, session.net) is None
        found.append((whole_trajectory(losses, session), score.loss))
        session.close()
    return found


@pytest.mark.parametrize("name", CASES)
def test_replicas_spread_over_ranks_go_where_whole_ones_go(name: str) -> None:
    """Parameters, losses of all rounds, and held-out loss; all ranks alike."""
    case = CASES[name]
    right, score = run_ranks(run, 2, [case.recipe()])[0][0]
    ends = run_ranks(run, 4, [case.recipe(spread) for spread in case.spreads], deadline=400)
    for rank in ends:
        for spread, (end, own_score), (first, _) in zip(case.spreads, rank, ends[0], strict=True):
            off = max(abs(a - b) for a, b in zip(end.losses, right.losses, strict=True))
            assert end.distance(right) <= NEAR and off <= NEAR, (spread, end.distance(right), off)
            assert abs(own_score - score) <= NEAR and end.distance(first) == 0.0, spread


@pytest.mark.soak
@pytest.mark.parametrize(
    "spread", ["shard=2 zero=2 pipeline=2", "tensor=2 shard=2 zero=3", "context=2 tensor=2"]
)
def test_products_of_cuts_go_there_too(spread: str) -> None:
    case = CASES["tied"]
    right, score = run_ranks(run, 2, [case.recipe()])[0][0]
    for [(end, own_score)] in run_ranks(run, 8, [case.recipe(spread)], deadline=500):
        assert end.distance(right) <= NEAR and abs(own_score - score) <= NEAR


def test_three_replicas_of_stages_that_share_a_weight_keep_it_equal() -> None:
    """With three the order of a sum shows: copies of the embedding lie in buckets that are alike."""
    three = gpt("replicas=3 sync=diloco:3"), gpt("replicas=3 pipeline=2 sync=diloco:3 route=native")
    right, _ = run_ranks(run, 3, [three[0]])[0][0]
    for [(end, _)] in run_ranks(run, 6, [three[1]], deadline=400):
        assert end.distance(right) <= NEAR


class TestDiLoCoOfZero3(RuleContract):
    strategy, num_ranks = "replicas=2 shard=2 zero=3 sync=diloco:4", 4


class TestLocalSGDOfStages(RuleContract):
    strategy, num_ranks = "replicas=2 pipeline=2 sync=local:3", 4


@pytest.mark.soak
class TestLocalSGDOfZero2(RuleContract):
    strategy, num_ranks = "replicas=2 shard=2 zero=2 route=native sync=local:3", 4


# -- the twins ---------------------------------------------------------------------------------------------


def summed_over_replicas() -> None:
    """Every step sums over all ranks, as every-step does."""
    SessionContext.single_replica_mesh = lambda self: self


def counted_by_rank() -> None:
    """The items of a replica count once for each of its ranks."""
    diloco.meeting_ranks = lambda context: context.mesh.world


def met_with_others() -> None:
    """Ranks that hold other parts are summed, too."""
    sums = diloco.build_delta_reduction

    def wrong(context: SessionContext, *given: Any) -> Any:
        axes = {**context.mesh.axes, "replica": context.mesh.data}
        return sums(replace(context, mesh=replace(context.mesh, axes=axes)), *given)

    diloco.build_delta_reduction = wrong


def not_brought() -> None:
    """Nobody gets what the others of its replica hold once all have met."""
    step = diloco.OuterStep
    diloco.OuterStep = lambda outer, norm, bring: step(outer, norm, lambda: None)


@pytest.mark.parametrize("fault", [summed_over_replicas, counted_by_rank, met_with_others, not_brought])
def test_what_sums_over_the_wrong_ranks_ends_elsewhere(fault: Any) -> None:
    case = CASES["local"]

    def broken(cluster: Cluster, recipes: list[Recipe]) -> Any:
        fault()
        return run(cluster, recipes, compares=False)

    right, _ = run_ranks(run, 2, [case.recipe()])[0][0]
    ends = run_ranks(broken, 4, [case.recipe("shard=2 zero=1")])
    assert max(end.distance(right) for [(end, _)] in ends) > APART


# -- checkpoints -------------------------------------------------------------------------------------------


def save(cluster: Cluster, strategy: str, run_dir: Path) -> None:
    fit(build_test_session(cluster, digits(strategy, steps=8)), run_dir)


def go_on(cluster: Cluster, strategy: str, run_dir: Path, fault: Any = None) -> Trajectory:
    """From that checkpoint to the end of a longer run."""
    if fault is not None:
        fault()
    session = build_test_session(cluster, digits(strategy))
    checkpointing.restore_checkpoint(session, StorageFolder(str(run_dir / "checkpoints")))
    assert session.state.step == 8
    return whole_trajectory([stats.loss for stats in session.rounds()], session)


def outer_momentum_lost() -> None:
    DiLoCo.wanted = lambda self, shapes: {}


def inner_moments_lost() -> None:
    ReplicaOptimizerState.wanted = ExtraState.wanted
    ReplicaOptimizerState.load = lambda self, tensors: self._state.optimizer.state.clear()


@pytest.mark.capability("N3")
@pytest.mark.parametrize("then", ["shard=2 zero=3", "pipeline=2", "tensor=2"])
def test_a_checkpoint_goes_on_under_another_layout(then: str, tmp_path: Path) -> None:
    """Of whole replicas and of spread ones: moments of each replica, and the outer momentum, by part."""
    plain = "replicas=2 sync=diloco:4"
    right, _ = run_ranks(run, 2, [digits(plain)])[0][0]
    spread = f"replicas=2 {then} sync=diloco:4"
    run_ranks(save, 2, plain, tmp_path / "whole")
    run_ranks(save, 4, spread, tmp_path / "spread")
    ends = run_ranks(go_on, 4, spread, tmp_path / "whole") + run_ranks(go_on, 2, plain, tmp_path / "spread")
    ends += run_ranks(go_on, 4, "replicas=2 shard=2 zero=1 sync=diloco:4", tmp_path / "spread")
    for end in ends:
        assert end.distance(right) <= NEAR, end.distance(right)


@pytest.mark.parametrize("fault", [outer_momentum_lost, inner_moments_lost])
def test_what_a_checkpoint_forgets_shows(fault: Any, tmp_path: Path) -> None:
    """The twins of the test above."""
    spread = "replicas=2 shard=2 zero=1 sync=diloco:4"
    run_ranks(save, 4, spread, tmp_path)
    right, broken = (run_ranks(go_on, 4, spread, tmp_path, wrong)[0] for wrong in (None, fault))
    assert broken.distance(right) > APART
