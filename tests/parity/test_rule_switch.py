"""A run that switches its rule is the run that starts under the second rule from that checkpoint."""

from typing import Any
from unittest.mock import patch

import pytest

from paceline.errors import RecipeError
from paceline.job.cluster import Cluster
from paceline.parallel import state_transfer
from paceline.recipe import Recipe, Strategy, support
from paceline.session import Session
from paceline.testing import run_ranks
from paceline.testing.parity import Trajectory, build_test_session, whole_trajectory

STEPS, SWITCH = 14, 6
PAIRS = [
    ("every-step", "diloco:3"),
    ("diloco:3", "every-step"),
    ("diloco:3", "diloco:2"),
]


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
        "replicas=2 sync=every-step@6,federated:10": "not built",
    }.items():
        answer = support(Strategy.parse(text), processes=2, shards=4)
        assert not answer.ok and reason in answer.reason, (text, answer.reason)
