"""Replicas of several ranks that train alone and code how they have moved: nothing is lost for good."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor

from paceline.comm.collectives import coded_collective
from paceline.comm.collectives.error_feedback import ErrorFeedbackBuffers
from paceline.comm.reduction import PendingResidual, sum_residuals
from paceline.job.cluster import Cluster
from paceline.parallel.state_hash import find_divergence
from paceline.sync.residuals import DeltaResidualFlush
from paceline.testing import run_ranks
from paceline.testing.contracts import RuleContract
from paceline.testing.parity import build_test_session, whole_trajectory
from tests.parity.test_local_sgd_sharded_replicas import digits, gpt
from tests.parity.test_rule_switch import until
from tests.parity.test_rule_switch_residuals import handed

pytestmark = [pytest.mark.timeout(600), pytest.mark.capability("I6", "H4", "Z1")]
SPREADS = ("shard=2 zero=1", "shard=2 zero=2 route=native", "tensor=2", "pipeline=2", "shard=2 zero=3")
SWITCH = 8


class TestCodedDiLoCoOfZero2(RuleContract):
    strategy, num_ranks = "replicas=2 shard=2 zero=2 sync=diloco:4 codec=int8", 4


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


def test_what_one_rule_has_lost_the_next_applies() -> None:
    """Movements where a rule takes over that sums gradients, and the other way round."""
    for rank in run_ranks(handed_over, 4, deadline=500):
        for spread, (whole_of_it, forgotten), (kept, lost) in rank:
            assert whole_of_it < 2e-6 < 1e-3 < forgotten, spread
            assert kept[0] > 1e-2 and kept[1] < 1e-5 and lost[1] > 0.5, (spread, kept, lost)
