"""Replicas that train alone and are spread over several ranks: they go where whole ones go, coded or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
from torch import Tensor

from paceline.checkpoint.storage import StorageFolder
from paceline.comm.collectives import coded_collective
from paceline.comm.collectives.error_feedback import ErrorFeedbackBuffers
from paceline.comm.reduction import PendingResidual, sum_residuals
from paceline.job.cluster import Cluster
from paceline.parallel.session_context import SessionContext
from paceline.parallel.state_hash import find_divergence
from paceline.recipe import Recipe
from paceline.session import checkpointing, evaluate, fit
from paceline.state.slot import ExtraState
from paceline.sync import DiLoCo, ReplicaOptimizerState, diloco
from paceline.sync.residuals import DeltaResidualFlush
from paceline.testing import run_ranks
from paceline.testing.contracts import RuleContract
from paceline.testing.parity import Trajectory, build_test_session, whole_trajectory
from tests.marks import soak_param
from tests.parity.test_rule_switch import handed, until
from tests.parity.training_runs import each_case, train_whole
from tests.recipes import recipe_of
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


# Replicas have unequal shares, so that a mean without weights shows, and a clip needs whole norms.
digits = partial(
    recipe_of,
    task="digits",
    options={"model": "mlp", "hidden": [24, 16], "dropout": 0.1},
    steps=14,
    batch={"size": 45, "shards": 5},
    optimizer={"name": "adamw", "lr": 2e-3, "clip_norm": 0.5},
)


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
@pytest.mark.parametrize(
    "name", [soak_param(n) if n in ("local", "diloco", "streamed") else n for n in CASES]
)
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


@pytest.mark.soak
@pytest.mark.capability("I6", "Z1")
class TestLocalSGDOfStages(RuleContract):
    strategy, num_ranks = "replicas=2 pipeline=2 sync=local:3", 4


@pytest.mark.capability("I6", "Z1")
@pytest.mark.soak
class TestLocalSGDOfZero2(RuleContract):
    strategy, num_ranks = "replicas=2 shard=2 zero=2 route=native sync=local:3", 4


# -- the twins ---------------------------------------------------------------------------------------------


def deltas_of_all_ranks(context: SessionContext, *given: Any) -> Any:
    axes = {**context.mesh.axes, "replica": context.mesh.data}
    return BUILD_DELTA_REDUCTION(replace(context, mesh=replace(context.mesh, axes=axes)), *given)


BUILD_DELTA_REDUCTION, OUTER_STEP = diloco.build_delta_reduction, diloco.OuterStep
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "every step sums over all ranks": (SessionContext, "single_replica_mesh", lambda self: self),
    "items count once a rank": (diloco, "meeting_ranks", lambda context: context.mesh.world),
    "ranks with other parts are summed": (diloco, "build_delta_reduction", deltas_of_all_ranks),
    "nobody gets what its replica holds": (
        *(diloco, "OuterStep"),
        lambda outer, norm, bring: OUTER_STEP(outer, norm, lambda: None),
    ),
}


@pytest.mark.capability("I6", "Z1")
def test_what_sums_over_the_wrong_ranks_ends_elsewhere() -> None:
    case = CASES["local"]

    def broken(cluster: Cluster, recipe: Recipe) -> dict[str, Trajectory]:
        ends = {}
        for name, fault in FAULTS.items():
            with patch.object(*fault):
                ends[name] = train_whole(cluster, recipe)
        return ends

    right, _ = run_ranks(run, 2, [case.recipe()])[0][0]
    ends = run_ranks(broken, 4, case.recipe("shard=2 zero=1"))
    for name in FAULTS:
        assert max(rank[name].distance(right) for rank in ends) > APART, name


# -- checkpoints -------------------------------------------------------------------------------------------


def save(cluster: Cluster, strategy: str, run_dir: Path) -> None:
    fit(build_test_session(cluster, digits(strategy, steps=8)), run_dir)


def go_on(cluster: Cluster, strategy: str, run_dir: Path) -> Trajectory:
    """From that checkpoint to the end of a longer run."""
    session = build_test_session(cluster, digits(strategy))
    checkpointing.restore_checkpoint(session, StorageFolder(str(run_dir / "checkpoints")))
    assert session.state.step == 8
    return whole_trajectory([stats.loss for stats in session.rounds()], session)


@pytest.mark.capability("N3", "I6", "Z1")
@pytest.mark.parametrize("then", [soak_param("shard=2 zero=3"), soak_param("pipeline=2"), "tensor=2"])
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


def forget_moments(self: ReplicaOptimizerState, tensors: Any) -> None:
    self._state.optimizer.state.clear()


@pytest.mark.capability("I6", "Z1")
def test_what_a_checkpoint_forgets_shows(tmp_path: Path) -> None:
    """The twins of the test above: without the outer momentum, and without moments of the inner optimizer."""

    def ends(cluster: Cluster) -> list[Trajectory]:
        spread = "replicas=2 shard=2 zero=1 sync=diloco:4"
        save(cluster, spread, tmp_path)
        found = [go_on(cluster, spread, tmp_path)]
        with patch.object(DiLoCo, "wanted", lambda self, shapes: {}):
            found.append(go_on(cluster, spread, tmp_path))
        with patch.multiple(ReplicaOptimizerState, wanted=ExtraState.wanted, load=forget_moments):
            return [*found, go_on(cluster, spread, tmp_path)]

    right, *broken = run_ranks(ends, 4)[0]
    assert all(end.distance(right) > APART for end in broken)


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


@pytest.mark.soak
@pytest.mark.capability("I6", "H4", "Z1")
def test_only_movements_are_coded() -> None:
    """What travels inside a replica is not: a codec that loses nothing has the bits of none."""
    for spread, exact, coarse in run_ranks(pairs, 4, deadline=400)[0]:
        assert exact == 0.0 < coarse < 5e-3, (spread, exact, coarse)


def copies(cluster: Cluster, by_rank: bool) -> list[Any]:
    """Tensors that several ranks hold, where coding draws."""
    keys, found = coded_collective.CodedCollective._keys, []

    def drawn_by_rank(self: Any, key: str) -> Any:
        shared = keys(self, key)
        return shared._replace(own=coded_collective.hashed(shared.shared, self.group.ranks[self.group.rank]))

    with patch.object(coded_collective.CodedCollective, "_keys", drawn_by_rank if by_rank else keys):
        for spread in ("tensor=2", "pipeline=2", "context=2"):
            strategy = f"replicas=2 {spread} sync=diloco:3 codec=int4:stochastic"
            session = build_test_session(cluster, gpt(strategy))
            list(session.rounds())
            found.append(find_divergence(session.state, session.mesh, session.net))
            session.close()
    return found


@pytest.mark.capability("I6", "H4", "Z1")
def test_copies_stay_equal_where_coding_draws() -> None:
    """The twin: each rank draws for itself."""
    equal, twin = run_ranks(each_case, 4, copies, [(False,), (True,)], deadline=400)[0]
    assert equal == [None] * 3 and all(twin)


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
    plain = ErrorFeedbackBuffers.set_residuals

    def without_sums(self: ErrorFeedbackBuffers, key: str, flats: Any) -> None:
        plain(self, key, {"sent": flats["sent"]})

    with patch.object(ErrorFeedbackBuffers, "set_residuals", without_sums if forgets else plain):
        session = build_test_session(cluster, digits(strategy))
        session.restore(tensors, scalars)
        return dict(session.snapshot().copied().tensors())


def missing(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    """Of what movements have lost, the largest share that is gone."""
    there, now = moved(before), moved(after)
    most = max(float(value.abs().max()) for value in there.values())
    return max(float((value - now[name]).abs().max()) for name, value in there.items()) / most


@pytest.mark.capability("I6", "H4", "Z1")
@pytest.mark.parametrize("spread", [soak_param("shard=2 zero=1"), "pipeline=2"])
def test_what_was_lost_goes_on_under_another_layout(spread: str) -> None:
    """Of whole replicas by spread ones, and back; the twin forgets what was lost of sums."""
    plain, cut = "replicas=2 sync=diloco:4 codec=int4", f"replicas=2 {spread} sync=diloco:4 codec=int4"
    for first, second, num_first, num_second in ((plain, cut, 2, 4), (cut, plain, 4, 2)):
        tensors, scalars = run_ranks(snapshot, num_first, first)[0]
        cases = [(second, tensors, scalars, forgets) for forgets in (False, True)]
        for after, twin in run_ranks(each_case, num_second, taken, cases):
            assert missing(tensors, after) < 1e-5 < 1e-2 < missing(tensors, twin), (first, second)


def movements(cluster: Cluster, spread: str) -> list[float]:
    """How far every-step begins from where uncoded movements led: with what was lost, and without."""
    first = build_test_session(cluster, digits(f"replicas=2 {spread} sync=local:{SWITCH}"))
    until(first, SWITCH)
    found, rule = [], f"sync=local:{SWITCH}@{SWITCH},every-step"
    for load in (DeltaResidualFlush.load, lambda self, tensors: None):
        with patch.object(DeltaResidualFlush, "load", load):
            session = build_test_session(cluster, digits(f"replicas=2 {spread} codec=topk:0.1 {rule}"))
            until(session, SWITCH)
            session.enter_rule(SWITCH)
        ends = zip(updated(session), updated(first), strict=True)
        found.append(max(float((a - b).abs().max()) for a, b in ends))
    return found


def updated(session: Any) -> list[Tensor]:
    return [p.detach() for p in session.runner.sharded_model.updates.values()]


def gradients(cluster: Cluster, spread: str) -> list[tuple[float, float]]:
    """What every-step has lost, and how much of it replicas alone miss; then with a fault."""
    found, strategy = [], f"replicas=2 {spread} codec=topk:0.1"
    for set_residuals in (PendingResidual.set_residuals, lambda self, lost: None):
        with patch.object(PendingResidual, "set_residuals", set_residuals):
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
    return found


def handed_over(cluster: Cluster) -> list[Any]:
    return [(spread, movements(cluster, spread), gradients(cluster, spread)) for spread in SPREADS[1::2]]


@pytest.mark.soak  # test_rule_switch.py has whole replicas
@pytest.mark.capability("I6", "H4", "Z1")
def test_what_one_rule_has_lost_the_next_applies() -> None:
    """Movements where a rule takes over that sums gradients, and the other way round."""
    for rank in run_ranks(handed_over, 4, deadline=500):
        for spread, (whole_of_it, forgotten), (kept, lost) in rank:
            assert whole_of_it < 2e-6 < 1e-3 < forgotten, spread
            assert kept[0] > 1e-2 and kept[1] < 1e-5 and lost[1] > 0.5, (spread, kept, lost)
