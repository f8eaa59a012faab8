"""Another rule takes over where a rank is named as slow, at a step that all ranks know; nothing is lost."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from torch import nn

from paceline.errors import RecipeError
from paceline.job.cluster import Cluster
from paceline.parallel.state_transfer import StateSnapshot
from paceline.recipe import Recipe, Strategy, support
from paceline.session import Session
from paceline.session.rule_switch import RoundTotals, measure_gain_of_switch, sum_rounds
from paceline.sync.straggler_recovery import RecoveryJudge
from paceline.testing import run_ranks
from paceline.testing.parity import Trajectory, build_test_session, whole_trajectory
from tests.parity.virtual_clock import own_clock

STEPS, SAMPLES, SLOW_FROM, SLOW_UNTIL = 28, 24, 3, 20
USUAL = 1.0  # seconds of a micro-batch, however busy the machine is; ten more where a rank is slow
HEALTH = {"straggler_factor": 4.0}


def digits(strategy: str, **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "task": "digits",
        "options": {"model": "mlp", "hidden": [16], "dropout": 0.1},
        "steps": STEPS,
        "batch": {"size": SAMPLES, "shards": 6},
        "optimizer": {"name": "adamw", "lr": 2e-3},
        "schedule": {"decay": "cosine", "warmup_steps": 3},
        "strategy": Strategy.parse(strategy),
    }
    return Recipe(**(settings | changes))


def waiting(rule: str) -> Recipe:
    return digits(f"servers=1 sync=every-step@straggler,{rule}", health=HEALTH)


class Taken(NamedTuple):
    """A run whose last rank became slow."""

    session: Session
    losses: list[float]
    num_samples: int
    notes: list[tuple[str, Mapping[str, Any]]]
    late: StateSnapshot | None


def take(cluster: Cluster, rule: str) -> Taken:
    clock, slow = own_clock(real=1.0), [0.0]
    session = build_test_session(cluster, waiting(rule))

    def compute(module: nn.Module, inputs: Any) -> None:
        time.sleep(slow[0])  # who is late, where nobody waits for the last one
        clock.spend(USUAL + 10 * (slow[0] > 0))

    session.runner.sharded_model.model.register_forward_pre_hook(compute)
    losses, num_samples, late = [], 0, None
    for stats in session.rounds():
        slow[0] = 0.03 * (cluster.global_rank == 2 and SLOW_FROM <= stats.step < SLOW_UNTIL)
        losses.append(stats.loss)
        num_samples += stats.num_samples
        if late is None and session.strategy.sync == rule:
            late = copy.deepcopy(session.snapshot())
    return Taken(session, losses, num_samples, session.events.take(), late)


def goes_on(session: Session, snapshot: StateSnapshot) -> Trajectory:
    session.restore_shared(snapshot)
    assert session.state.step == snapshot.step
    return whole_trajectory([stats.loss for stats in session.rounds()], session)


def server_takes_over(cluster: Cluster) -> dict[str, Any]:
    """The run; every-step to where it turned and the server from there; and the former, resumed late."""
    RecoveryJudge.observe_seconds = lambda self, worker, seconds: None  # nobody recovers
    taken = take(cluster, "server")
    notes = dict(taken.notes)
    ended = whole_trajectory(taken.losses, taken.session)
    step = notes["switch"]["step"]
    kept = build_test_session(cluster, digits("replicas=3"))
    for _ in kept.rounds():
        if kept.state.step == step:
            break
    apart = goes_on(build_test_session(cluster, digits("servers=1 sync=server")), kept.snapshot())
    assert taken.late is not None
    forgotten = StateSnapshot(taken.late.step, taken.late.whole, {**taken.late.numbers, "others": {}})
    again = build_test_session(cluster, waiting("server"))
    again.restore_shared(forgotten)
    rules = [again.strategy.sync]
    resumed = goes_on(again, taken.late)
    rules.append(again.strategy.sync)
    return {
        "step": step,
        "names": [name for name, _ in taken.notes if name in ("straggler", "switch")],
        "distances": [ended.distance(apart), ended.distance(resumed)],
        "num_samples": taken.num_samples,
        "rules": rules,
        "whole": str(taken.session.full_strategy),
    }


@pytest.mark.capability("I9", "Z1", clause="a server takes over from every-step")
def test_a_server_takes_over_where_a_rank_is_slow_and_goes_on_from_that_state() -> None:
    """Moments, rate, dropout and data go on: to the bit, also where the run is resumed after the turn."""
    found = run_ranks(server_takes_over, 3)
    for rank in found:
        assert rank["step"] == found[0]["step"] >= SLOW_FROM
        assert rank["names"] == ["straggler", "switch"]
        assert rank["distances"] == [0.0, 0.0]
        assert rank["num_samples"] == STEPS * SAMPLES
        assert rank["rules"] == ["every-step", "server"]  # the first has forgotten where it turned
        assert rank["whole"] == "replicas=2 servers=1 sync=every-step@straggler,server"


def the_others_go_on(cluster: Cluster) -> list[dict[str, Any]]:
    found = []
    for rule in ("backup:1", "bounded:1"):
        taken = take(cluster, rule)
        state = taken.session.state
        found.append({**dict(taken.notes), "rate": state.updates / state.updates_per_step})
        taken.session.close()
    return found


@pytest.mark.capability("I9", clause="backup and bounded take over, and the gain is told")
def test_backup_or_bounded_takes_over_and_says_what_it_gained() -> None:
    server, *others = run_ranks(the_others_go_on, 3)
    for at, rule in enumerate(("backup:1", "bounded:1")):
        assert all(rank[at]["switch"] == server[at]["switch"] for rank in others)
        assert server[at]["switch"]["sync"] == rule
        told = server[at]["gain"]
        assert told["before"] - 2 * USUAL > 0.03 and told["after"] > 0 and told["times"] > 0
        work = server[at]["work"]
        assert work["taken"] == work["applied"] + work["dropped"] > 0
        assert server[at]["rate"] == STEPS  # the schedule has ended with the run
    assert server[0]["work"]["dropped"] > 0 == server[1]["work"]["dropped"]


@pytest.mark.parametrize(
    "sync",
    ["every-step@straggler", "local:4@straggler,local:8", "every-step@straggler,local:2@9,every-step"],
)
def test_only_every_step_can_end_so_and_only_before_the_last_rule(sync: str) -> None:
    with pytest.raises(RecipeError, match="expected"):
        digits(f"replicas=2 sync={sync}", health=HEALTH)


def test_what_would_stop_a_run_where_it_switches_is_refused_before_the_start() -> None:
    with pytest.raises(RecipeError, match="straggler_factor"):
        digits("servers=1 sync=every-step@straggler,backup:1")
    with pytest.raises(RecipeError, match=r"loader\.workers"):
        digits("servers=1 sync=every-step@9,server", loader={"workers": 1})
    for text, reason in {
        "replicas=1 servers=2 sync=every-step@9,server": "servers=1",
        "replicas=3 sync=every-step@9,server": "needs a server",
        "replicas=2 servers=1 sync=server@9,every-step": "at last to one with a server",
        "replicas=2 servers=1 sync=every-step@9,backup:2": "one must be left",
    }.items():
        answer = support(Strategy.parse(text), processes=3, shards=6)
        assert not answer.ok and reason in answer.reason, (text, answer.reason)
    three = Strategy.parse("servers=1 sync=every-step@9,local:2@12,backup:1")
    assert support(three, processes=3, shards=6).ok


def test_who_serves_later_trains_before() -> None:
    strategy = Strategy.parse("replicas=2 servers=1 sync=every-step@straggler,backup:1")
    assert [str(strategy.with_sync(strategy.phase(0).rule)), str(strategy.with_sync("backup:1"))] == [
        "replicas=3 sync=every-step",
        "replicas=2 servers=1 sync=backup:1",
    ]


def test_the_gain_is_that_of_what_was_applied() -> None:
    before = sum_rounds([RoundTotals(1, 60.0, 0.3), RoundTotals(1, 60.0, 0.3)])
    assert measure_gain_of_switch(before, RoundTotals(10, 400.0, 1.0)) == {
        "before": 0.3,
        "after": 0.1,
        "times": 2.0,
    }
