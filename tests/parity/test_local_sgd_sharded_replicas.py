"""Replicas that train alone and are spread over several ranks: they go where whole ones go, coded or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from paceline.checkpoint.storage import StorageFolder
from paceline.comm.collectives import coded_collective
from paceline.comm.collectives.error_feedback import ErrorFeedbackBuffers
from paceline.comm.reduction import PendingResidual, sum_residuals
from paceline.job.cluster import Cluster
from paceline.parallel.session_context import SessionContext
from paceline.parallel.state_hash import find_divergence
from paceline.recipe import Recipe, Strategy
from paceline.session import checkpointing, evaluate, fit
from paceline.state.slot import ExtraState
from paceline.sync import DiLoCo, ReplicaOptimizerState, diloco
from paceline.sync.residuals import DeltaResidualFlush
from paceline.testing import run_ranks
from paceline.testing.contracts import RuleContract
from paceline.testing.parity import Trajectory, build_test_session, whole_trajectory
from tests.parity.test_rule_switch import handed, until
from tests.texts import SMALL_TEXT

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


@pytest.mark.capability("I6", "Z1")
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


@pytest.mark.capability("I6", "Z1")
@pytest.mark.soak
@pytest.mark.parametrize(
    "spread", ["shard=2 zero=2 pipeline=2", "tensor=2 shard=2 zero=3", "context=2 tensor=2"]
)
def test_products_of_cuts_go_there_too(spread: str) -> None:
    case = CASES["tied"]
    right, score = run_ranks(run, 2, [case.recipe()])[0][0]
    for [(end, own_score)] in run_ranks(run, 8, [case.recipe(spread)], deadline=500):
        assert end.distance(right) <= NEAR and abs(own_score - score) <= NEAR


@pytest.mark.capability("I6", "Z1")
def test_three_replicas_of_stages_that_share_a_weight_keep_it_equal() -> None:
    """With three the order of a sum shows: copies of the embedding lie in buckets that are alike."""
    three = gpt("replicas=3 sync=diloco:3"), gpt("replicas=3 pipeline=2 sync=diloco:3 route=native")
    right, _ = run_ranks(run, 3, [three[0]])[0][0]
    for [(end, _)] in run_ranks(run, 6, [three[1]], deadline=400):
        assert end.distance(right) <= NEAR


@pytest.mark.capability("I6", "Z1")
class TestDiLoCoOfZero3(RuleContract):
    strategy, num_ranks = "replicas=2 shard=2 zero=3 sync=diloco:4", 4


@pytest.mark.capability("I6", "Z1")
class TestLocalSGDOfStages(RuleContract):
    strategy, num_ranks = "replicas=2 pipeline=2 sync=local:3", 4


@pytest.mark.capability("I6", "Z1")
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


@pytest.mark.capability("I6", "Z1")
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


@pytest.mark.capability("N3", "I6", "Z1")
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


@pytest.mark.capability("I6", "Z1")
@pytest.mark.parametrize("fault", [outer_momentum_lost, inner_moments_lost])
def test_what_a_checkpoint_forgets_shows(fault: Any, tmp_path: Path) -> None:
    """The twins of the test above."""
    spread = "replicas=2 shard=2 zero=1 sync=diloco:4"
    run_ranks(save, 4, spread, tmp_path)
    right, broken = (run_ranks(go_on, 4, spread, tmp_path, wrong)[0] for wrong in (None, fault))
    assert broken.distance(right) > APART


SPREADS = ("shard=2 zero=1", "shard=2 zero=2 route=native", "tensor=2", "pipeline=2", "shard=2 zero=3")
SWITCH = 8


@pytest.mark.capability("I6", "H4", "Z1")
class TestCodedDiLoCoOfZero2(RuleContract):
    strategy, num_ranks = "replicas=2 shard=2 zero=2 sync=diloco:4 codec=int8", 4


@pytest.mark.capability("I6", "H4", "Z1")
@pytest.mark.soak
class TestCodedDiLoCoOfStages(RuleContract):
    strategy, num_ranks = "replicas=2 pipeline=2 sync=diloco:4 codec=topk:0.3", 4


def pairs(cluster: Cluster) -> list[tuple[str, float, float]]:
    """How far a codec that loses nothing leads from values as they are; and one that does, how far it is."""
    found = []
    for spread in SPREADS:
        ends = []
        for codec in ("fp32", "lossless", "int8"):
            session = build_test_session(cluster, digits(f"replicas=2 {spread} sync=diloco:4 codec={codec}"))
            ends.append(whole_trajectory([stats.loss for stats in session.rounds()], session))
            assert find_divergence(session.state, session.mesh, session.net) is None
            session.close()
        found.append((spread, ends[0].distance(ends[1]), ends[0].distance(ends[2])))
    return found


@pytest.mark.capability("I6", "H4", "Z1")
def test_only_movements_are_coded() -> None:
    """What travels inside a replica is not: a codec that loses nothing has the bits of none."""
    for spread, exact, coarse in run_ranks(pairs, 4, deadline=400)[0]:
        assert exact == 0.0 < coarse < 5e-3, (spread, exact, coarse)


def copies(cluster: Cluster, by_rank: bool) -> list[Any]:
    """Tensors that several ranks hold, where coding draws."""
    if by_rank:
        keys = coded_collective.CodedCollective._keys
        coded_collective.CodedCollective._keys = lambda self, key: keys(self, key)._replace(
            own=coded_collective.hashed(keys(self, key).shared, self.group.ranks[self.group.rank])
        )
    found = []
    for spread in ("tensor=2", "pipeline=2", "context=2"):
        session = build_test_session(cluster, gpt(f"replicas=2 {spread} sync=diloco:3 codec=int4:stochastic"))
        list(session.rounds())
        found.append(find_divergence(session.state, session.mesh, session.net))
        session.close()
    return found


@pytest.mark.capability("I6", "H4", "Z1")
def test_copies_stay_equal_where_coding_draws() -> None:
    """The twin: each rank draws for itself."""
    assert run_ranks(copies, 4, False, deadline=400)[0] == [None] * 3
    assert all(run_ranks(copies, 4, True, deadline=400)[0])


def moved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What movements have lost: the sum over replicas and sides."""
    rows = {name.removeprefix("moved/"): rows for name, rows in tensors.items() if name.startswith("moved/")}
    places = {
        (side, name): rows[f"{side}/{name}"].sum(0) for side, _, name in map(_split, rows) if _is(side, name)
    }
    return sum_residuals(places)


def _split(full: str) -> tuple[str, str, str]:
    return full.partition("/")


def _is(side: str, name: str) -> bool:
    return bool(name) and side != "share"


def snapshot(cluster: Cluster, strategy: str) -> tuple[dict[str, Tensor], Any]:
    session = build_test_session(cluster, digits(strategy))
    until(session, SWITCH)
    found = session.snapshot().copied()
    return dict(found.tensors()), found.scalars()


def taken(cluster: Cluster, strategy: str, tensors: Any, scalars: Any, forgets: bool) -> dict[str, Tensor]:
    """What is there once a session goes on from a snapshot."""
    if forgets:
        plain = ErrorFeedbackBuffers.set_residuals
        ErrorFeedbackBuffers.set_residuals = lambda self, key, flats: plain(
            self, key, {"sent": flats["sent"]}
        )
    session = build_test_session(cluster, digits(strategy))
    session.restore(tensors, scalars)
    return dict(session.snapshot().copied().tensors())


def missing(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    """Of what movements have lost, the largest share that is gone."""
    there, now = moved(before), moved(after)
    most = max(float(value.abs().max()) for value in there.values())
    return max(float((value - now[name]).abs().max()) for name, value in there.items()) / most


@pytest.mark.capability("I6", "H4", "Z1")
@pytest.mark.parametrize("spread", ["shard=2 zero=1", "pipeline=2"])
def test_what_was_lost_goes_on_under_another_layout(spread: str) -> None:
    """Of whole replicas by spread ones, and back; the twin forgets what was lost of sums."""
    plain, cut = "replicas=2 sync=diloco:4 codec=int4", f"replicas=2 {spread} sync=diloco:4 codec=int4"
    for first, second, num_first, num_second in ((plain, cut, 2, 4), (cut, plain, 4, 2)):
        tensors, scalars = run_ranks(snapshot, num_first, first)[0]
        for forgets, fits in ((False, lambda x: x < 1e-5), (True, lambda x: x > 1e-2)):
            for after in run_ranks(taken, num_second, second, tensors, scalars, forgets):
                assert fits(missing(tensors, after)), (first, second, forgets, missing(tensors, after))


def movements(cluster: Cluster, spread: str) -> list[float]:
    """How far every-step begins from where uncoded movements led: with what was lost, and without."""
    first = build_test_session(cluster, digits(f"replicas=2 {spread} sync=local:{SWITCH}"))
    until(first, SWITCH)
    found, load = [], DeltaResidualFlush.load
    for forgets in (False, True):
        if forgets:
            DeltaResidualFlush.load = lambda self, tensors: None
        rule = f"sync=local:{SWITCH}@{SWITCH},every-step"
        session = build_test_session(cluster, digits(f"replicas=2 {spread} codec=topk:0.1 {rule}"))
        until(session, SWITCH)
        session.enter_rule(SWITCH)
        found.append(
            max(float((a - b).abs().max()) for a, b in zip(updated(session), updated(first), strict=True))
        )
    DeltaResidualFlush.load = load
    return found


def updated(session: Any) -> list[Tensor]:
    return [p.detach() for p in session.runner.sharded_model.updates.values()]


def gradients(cluster: Cluster, spread: str) -> list[tuple[float, float]]:
    """What every-step has lost, and how much of it replicas alone miss; then with a fault."""
    found, kept = [], PendingResidual.set_residuals
    strategy = f"replicas=2 {spread} codec=topk:0.1"
    for forgets in (False, True):
        if forgets:
            PendingResidual.set_residuals = lambda self, lost: None
        session = build_test_session(cluster, digits(strategy))
        until(session, SWITCH)
        before = session.snapshot().copied()
        then = build_test_session(cluster, digits(f"{strategy} sync=local:3"))
        then.restore_shared(before)
        found.append(handed(before.tensors(), then.snapshot().tensors()))
        until(then, SWITCH + 3)
        assert not any(name.startswith("residual/") for name in then.snapshot().tensors())  # it was paid
        session.close()
        then.close()
    PendingResidual.set_residuals = kept
    return found


def handed_over(cluster: Cluster) -> list[Any]:
    return [(spread, movements(cluster, spread), gradients(cluster, spread)) for spread in SPREADS[1::2]]


@pytest.mark.capability("I6", "H4", "Z1")
def test_what_one_rule_has_lost_the_next_applies() -> None:
    """Movements where a rule takes over that sums gradients, and the other way round."""
    for rank in run_ranks(handed_over, 4, deadline=500):
        for spread, (whole_of_it, forgotten), (kept, lost) in rank:
            assert whole_of_it < 2e-6 < 1e-3 < forgotten, spread
            assert kept[0] > 1e-2 and kept[1] < 1e-5 and lost[1] > 0.5, (spread, kept, lost)
