"""A run that switches its rule is the run that starts under the second rule from that checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from paceline.comm.reduction import PendingResidual, sum_residuals
from paceline.errors import RecipeError
from paceline.job.cluster import Cluster
from paceline.parallel import state_transfer
from paceline.recipe import Recipe, Strategy, support
from paceline.session import Session
from paceline.sync.residuals import DeltaResidualFlush
from paceline.sync.server.parameter_transfer import CodedTransfer
from paceline.testing import run_ranks
from paceline.testing.parity import Trajectory, build_test_session, whole_trajectory

STEPS, SWITCH = 14, 6
PAIRS = [("every-step", "diloco:3"), ("diloco:3", "every-step"), ("diloco:3", "diloco:2")]


def digits(sync: Any, **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "task": "digits",
        "options": {"model": "mlp", "hidden": [16], "dropout": 0.1},
        "steps": STEPS,
        "batch": {"size": 22, "shards": 4},
        "optimizer": {"name": "adamw", "lr": 2e-3},
        "schedule": {"decay": "cosine", "warmup_steps": 3},
        "strategy": {"replicas": 2, "sync": sync},
    }
    return Recipe(**(settings | changes))


def until(session: Session, step: int) -> list[Any]:
    """Rounds to a step."""
    found = []
    for stats in session.rounds():
        found.append(stats)
        if session.state.step >= step:
            break
    return found


def both(cluster: Cluster, first: str, second: str) -> tuple[Trajectory, Trajectory, Trajectory, int]:
    """The run that switches; the second rule from the state of the first; and the former, resumed late."""
    session = build_test_session(cluster, digits(f"{first}@{SWITCH},{second}"))
    rounds = list(session.rounds())
    switched = whole_trajectory([stats.loss for stats in rounds], session)
    assert [name for name, _ in session.events.take() if name == "switch"] == ["switch"]
    kept = build_test_session(cluster, digits(first))
    early = until(kept, SWITCH)
    apart = goes_on(build_test_session(cluster, digits(second)), kept, [stats.loss for stats in early])
    again = build_test_session(cluster, digits(f"{first}@{SWITCH},{second}"))
    late = until(again, SWITCH + 4)
    assert again.state.step < STEPS
    resumed = build_test_session(cluster, digits(f"{first}@{SWITCH},{second}"))
    resumed = goes_on(resumed, again, [stats.loss for stats in late])
    return switched, apart, resumed, sum(stats.num_samples for stats in rounds)


def goes_on(session: Session, before: Session, losses: list[float]) -> Trajectory:
    session.restore_shared(before.snapshot())
    return whole_trajectory(losses + [stats.loss for stats in session.rounds()], session)


def all_pairs(cluster: Cluster) -> list[Any]:
    """The state travels tensor by tensor."""
    with patch.object(state_transfer, "bytes_per_transfer", lambda num_bytes: 1):
        return [both(cluster, first, second) for first, second in PAIRS]


@pytest.mark.capability("Z1")
def test_a_run_that_switches_is_the_second_rule_from_that_state() -> None:
    """Inner moments of each replica, outer momentum, rate, dropout and data go on: to the bit."""
    for rank in run_ranks(all_pairs, 2):
        for switched, apart, resumed, num_samples in rank:
            assert switched.losses == apart.losses == resumed.losses
            assert switched.distance(apart) == switched.distance(resumed) == 0.0
            assert num_samples == STEPS * 22


def forgetful(cluster: Cluster) -> float:
    """The fault: what both rules keep is not carried over."""
    ends = []
    for forgets in (False, True):
        session = build_test_session(cluster, digits("diloco:3@6,diloco:2"))
        if forgets:
            session.state.read_from = lambda source, scalars: lambda: None
        ends.append(whole_trajectory([stats.loss for stats in session.rounds()], session))
    return ends[0].distance(ends[1])


def test_outer_momentum_that_is_lost_would_be_noticed() -> None:
    assert run_ranks(forgetful, 2)[0] > 1e-4


@pytest.mark.capability("Z1")
def test_a_list_of_tables_and_a_text_say_the_same() -> None:
    listed = digits([{"until": 6, "rule": "every-step"}, {"rule": "diloco:3"}]).strategy
    assert listed == Strategy.parse("replicas=2 sync=every-step@6,diloco:3")
    assert Strategy.parse(str(listed)) == listed
    assert [listed.phase(step).rule for step in (0, 5, 6, 99)] == ["every-step"] * 2 + ["diloco:3"] * 2
    assert [listed.phase(step).until for step in (5, 6)] == [6, None]


@pytest.mark.parametrize(
    "sync",
    [
        "every-step,diloco:3",
        "every-step@6",
        "every-step@x,local:2",
        "local:2@6,local:3@6,local:4",
        "local:2@0,local:3",
    ],
)
def test_what_is_no_sequence_of_rules_is_an_error(sync: str) -> None:
    with pytest.raises(RecipeError, match="expected"):
        digits(sync)


def test_rules_that_cannot_follow_each_other_are_refused_before_the_start() -> None:
    for text, reason in {
        "replicas=2 sync=every-step@6,hogwild": "every-step, local and diloco",
        "replicas=2 shard=2 zero=1 sync=every-step@6,gossip:2": "must be whole",
        "replicas=2 tensor=2 sync=every-step@straggler,local:2": "in place of @straggler",
        "replicas=2 sync=every-step@6,federated:10": "name federated alone",
    }.items():
        answer = support(Strategy.parse(text), processes=2, shards=4)
        assert not answer.ok and reason in answer.reason, (text, answer.reason)


TOPK = "codec=topk:0.1"
STREAMED = {"fragments": 2, "delay_steps": 1, "mixing": 0.5}


def digits_coded(strategy: str, **changes: Any) -> Recipe:
    """DiLoCo of six steps is streamed, in two fragments."""
    streamed = {"outer": STREAMED} if "diloco:6" in strategy else {}
    return digits("every-step", **({"strategy": Strategy.parse(strategy)} | streamed | changes))


def ends(cluster: Cluster, first: str, second: str, switching: str) -> list[float]:
    """How far the run that switches ends from the second rule alone, and from itself, resumed late."""
    session = build_test_session(cluster, digits_coded(switching))
    switched = whole_trajectory([stats.loss for stats in session.rounds()], session)
    kept = build_test_session(cluster, digits_coded(first))
    early = [stats.loss for stats in until(kept, SWITCH)]
    apart = goes_on(build_test_session(cluster, digits_coded(second)), kept, early)
    again = build_test_session(cluster, digits_coded(switching))
    late = [stats.loss for stats in until(again, SWITCH + 3)]
    resumed = goes_on(build_test_session(cluster, digits_coded(switching)), again, late)
    assert switched.losses == apart.losses == resumed.losses
    return [switched.distance(apart), switched.distance(resumed)]


def owed(cluster: Cluster) -> list[tuple[bool, ...]]:
    """Once it is taken over, and after a round: whether losses of gradients, and of movements, are kept."""
    first, second = (digits_coded(f"replicas=2 {TOPK} sync={rule}") for rule in ("every-step", "local:3"))
    before, session = build_test_session(cluster, first), build_test_session(cluster, second)
    until(before, SWITCH)
    session.restore_shared(before.snapshot())
    found = []
    for step in (SWITCH, SWITCH + 3):
        if step > SWITCH:
            until(session, step)
        names = session.snapshot().tensors()
        found.append(tuple(any(name.startswith(word) for name in names) for word in ("residual/", "moved/")))
    return found


def by_one(cluster: Cluster) -> tuple[float, bool]:
    """How much of what two ranks have lost one that goes on alone misses, and whether it is kept for good."""
    before = build_test_session(cluster, digits_coded(f"replicas=2 {TOPK}"))
    until(before, SWITCH)
    snapshot = before.snapshot()
    one = build_test_session(Cluster.single(), digits_coded(f"replicas=1 {TOPK}"))
    one.restore(snapshot.tensors(), snapshot.scalars())
    _, missing = handed(snapshot.tensors(), one.snapshot().tensors())
    until(one, SWITCH + 1)
    return missing, any(name.startswith("residual/") for name in one.snapshot().tensors())


def all_pairs_coded(cluster: Cluster) -> tuple[list[float], list[tuple[bool, ...]], tuple[float, bool]]:
    """A server has one worker: of two, who asks first gets the part, and each has a loss of its own."""
    switching = f"servers=1 {TOPK} sync=every-step@{SWITCH},server"
    found = ends(cluster, f"replicas=2 {TOPK}", f"servers=1 {TOPK} sync=server", switching)
    for first, second, codec in [
        ("every-step", "diloco:3", "topk:0.1"),
        ("diloco:3", "every-step", "int4"),
        ("local:3", "local:2", "topk:0.1"),
        ("diloco:6", "every-step", "topk:0.1"),
        ("every-step", "diloco:6", "topk:0.1"),
    ]:
        one, other = (f"replicas=2 codec={codec} sync={rule}" for rule in (first, second))
        found += ends(cluster, one, other, f"replicas=2 codec={codec} sync={first}@{SWITCH},{second}")
    return found, owed(cluster), by_one(cluster)


@pytest.mark.capability("Z1", "H4")
def test_a_coded_run_that_switches_is_the_second_rule_from_that_state() -> None:
    """And what has been applied is state no more, also by one rank that goes on alone."""
    for distances, kept, (missing, is_kept) in run_ranks(all_pairs_coded, 2):
        assert distances == [0.0] * 12
        assert kept == [(True, False), (False, True)]
        assert missing < 1e-5 and not is_kept


def lost(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of mean gradients, unscaled, the sum over ranks and sides."""
    found = {
        (side, parameter): rows.sum(0) / tensors["residual/scale"].item() / tensors["residual/items"].item()
        for name, rows in tensors.items()
        for side, _, parameter in [name.removeprefix("residual/").partition("/")]
        if name.startswith("residual/") and parameter
    }
    return sum_residuals(found)


def handed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> tuple[float, float]:
    """How much was lost before, and how much of it is missing now; largest values."""
    there, now = lost(before), lost(after)
    most = max(float(value.abs().max()) for value in there.values())
    return most, max(float((value - now.get(name, 0)).abs().max()) for name, value in there.items()) / most


def gradients(cluster: Cluster) -> list[tuple[float, float]]:
    """From every-step to replicas alone and to a server, and from that to every-step; then with faults."""
    found = []
    three, one_server = f"replicas=3 {TOPK}", f"servers=1 {TOPK} sync=server"
    pairs = [(three, f"{three} sync=local:3"), (three, one_server), (one_server, three)]

    def hand_over(first: str, second: str) -> None:
        session = build_test_session(cluster, digits_coded(first))
        until(session, SWITCH)
        before = session.snapshot().copied()
        then = build_test_session(cluster, digits_coded(second))
        then.restore_shared(before)
        found.append(handed(before.tensors(), then.snapshot().tensors()))
        session.close()
        then.close()

    for pair in pairs:
        hand_over(*pair)
    forget = partial(patch.object, attribute="set_residuals", new=lambda self, found: None)
    with forget(PendingResidual), forget(CodedTransfer):
        for pair in pairs[:2]:
            hand_over(*pair)
    return found


@pytest.mark.capability("Z1", "H4")
def test_the_sum_of_what_gradients_have_lost_is_handed_over() -> None:
    """Whatever each rule multiplies gradients with; the rows of a rank that serves from then on as well."""
    for rank in run_ranks(gradients, 3):
        assert all(most > 1e-2 for most, _ in rank)
        assert all(missing < 1e-5 for _, missing in rank[:3]), rank
        assert all(missing > 0.5 for _, missing in rank[3:]), rank


def values(session: Session) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in session.runner.sharded_model.computes.values()])


def movements(cluster: Cluster) -> list[float]:
    """How far every-step begins from where uncoded movements led: with what was lost, and without."""
    first = build_test_session(cluster, digits_coded("replicas=2 sync=local:6"))
    until(first, SWITCH)
    found, recipe = [], digits_coded(f"replicas=2 {TOPK} sync=local:6@{SWITCH},every-step")
    for load in (DeltaResidualFlush.load, lambda self, tensors: None):
        with patch.object(DeltaResidualFlush, "load", load):
            session = build_test_session(cluster, recipe)
            until(session, SWITCH)
            session.enter_rule(SWITCH)
        found.append(float((values(session) - values(first)).abs().max()))
    return found


@pytest.mark.capability("Z1", "H4")
def test_what_movements_have_lost_moves_the_parameters_where_a_rule_sums_gradients() -> None:
    for whole_of_it, forgotten in run_ranks(movements, 2):
        assert whole_of_it < 1e-6 < 1e-3 < forgotten
