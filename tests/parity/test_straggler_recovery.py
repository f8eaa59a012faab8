"""Another rule takes over where a rank is slow, and every-step again once it keeps up; nothing is lost."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import nn

from paceline.errors import RecipeError
from paceline.job.cluster import Cluster
from paceline.job.launcher_reports import TRAINING_FOR_SERVER, read_phase
from paceline.parallel.state_transfer import StateSnapshot
from paceline.recipe import Recipe, Strategy, support
from paceline.recipe.strategy_text import is_resolved_from
from paceline.session import Session
from paceline.session.rule_switch import RoundTotals, measure_gain_of_switch, sum_rounds
from paceline.sync import straggler_detection, straggler_recovery
from paceline.sync import straggler_recovery as tried_out
from paceline.sync.straggler_detection import SlowRank
from paceline.sync.straggler_recovery import RecoveryJudge
from paceline.testing import run_ranks
from paceline.testing.parity import Trajectory, build_test_session, whole_trajectory
from tests.parity.virtual_clock import own_clock
from tests.recipes import recipe_of

STEPS, SAMPLES, SLOW_FROM, SLOW_UNTIL = 28, 24, 3, 20
USUAL = 1.0  # seconds of a micro-batch, however busy the machine is; ten more where a rank is slow
HEALTH = {"straggler_factor": 4.0}


digits = partial(
    recipe_of,
    task="digits",
    options={"model": "mlp", "hidden": [16], "dropout": 0.1},
    steps=STEPS,
    batch={"size": SAMPLES, "shards": 6},
    optimizer={"name": "adamw", "lr": 2e-3},
    schedule={"decay": "cosine", "warmup_steps": 3},
)


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
        found.append({**dict(taken.notes), "rate": state.num_updates / state.updates_per_step})
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
    "sync", ["every-step@straggler", "local:4@straggler,local:8", "every-step@straggler,local:2@9,every-step"]
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


STEPS_BACK, RECOVERS, PUSH = 80, (20, 60), straggler_recovery.StopWhenRecovered.push


def script(named: int, rank: int = 2, cause: str = "compute") -> None:
    """A rank is named so often, after two windows of every-step; and has recovered in certain steps."""
    looks = [0]

    def find(data: Any, compute: Any, factor: float, step_seconds: float) -> SlowRank | None:
        looks[0] += 1
        return SlowRank(rank, cause, 0.9, 0.1) if looks[0] <= 2 * named else None

    straggler_detection.find_slow_rank = find
    straggler_recovery.RecoveryJudge.observe_seconds = lambda self, worker, seconds: None
    straggler_recovery.StopWhenRecovered.push = _push


def _push(self: Any, worker: int, push: Any) -> Any:
    if push.ticket.step in RECOVERS:
        self._observe_seconds = lambda worker, seconds: {"seconds": 0.1, "usual": 0.1}
    return PUSH(self, worker, push)


def there_and_back(cluster: Cluster, folder: Path) -> dict[str, Any]:
    """The run; every-step from where it goes back, by itself; and the run, resumed after it has."""
    script(2)
    cluster = replace(cluster, error_dir=folder)
    session = build_test_session(cluster, waiting("server").replace(steps=STEPS_BACK))
    losses, num_samples, back, kept = dict[int, float](), 0, None, None
    for stats in session.rounds():
        losses[stats.step] = stats.loss
        num_samples += stats.num_samples
        told = read_phase(folder, cluster.global_rank)
        assert told is not None and (told.what == TRAINING_FOR_SERVER) == (session.strategy.sync == "server")
        rules = session.strategy.sync, session.rule_switches.phase(session.state.step).rule
        if back is None and rules == ("server", "every-step"):
            back = copy.deepcopy(session.snapshot())
        elif back is not None and kept is None:
            kept = copy.deepcopy(session.snapshot())
    assert back is not None and kept is not None
    plain = build_test_session(cluster, digits("replicas=3", steps=STEPS_BACK))
    plain.restore_shared(StateSnapshot(back.step, back.whole, {**back.numbers, "others": {}}))
    alone = {stats.step: stats.loss for stats, _ in zip(plain.rounds(), range(4), strict=False)}
    names = [
        name for name, _ in session.events.take() if name in ("straggler", "recovered", "switch", "gain")
    ]
    ended = whole_trajectory([*losses.values()], session)
    script(1)
    again = build_test_session(cluster, waiting("server").replace(steps=STEPS_BACK))
    resumed = goes_on(again, kept)
    return {
        "ended": ended,
        "resumed": ended.distance(resumed),
        "names": names,
        "missing": sum(session.work.num_samples(step) for step in range(STEPS_BACK)) - num_samples,
        "phases": [session.rule_switches.state_dict(), again.rule_switches.state_dict()],
        "alone": alone,
        "same": {step: losses[step] for step in alone},
    }


@pytest.mark.capability("I9", clause="the way back")
def test_a_run_goes_back_once_the_rank_keeps_up_and_waits_for_the_next_time(tmp_path: Path) -> None:
    """Every-step to step 8, the server to 21, every-step to 28, the server to 61, every-step."""
    first, *others = run_ranks(there_and_back, 3, tmp_path)
    once = ["straggler", "switch", "recovered", "switch"]
    assert [name for name in first["names"] if name != "gain"] == 2 * once
    assert first["names"].count("gain") >= 2
    for rank in (first, *others):
        assert rank["resumed"] == 0.0 and rank["alone"] == rank["same"] and len(rank["alone"]) == 4
        assert rank["phases"] == first["phases"]
        assert rank["ended"].distance(first["ended"]) == 0.0 and rank["missing"] == 0
    (found, resumed), asked = first["phases"], "every-step@straggler,server"
    assert found == resumed and found["slow"] is None
    known = "every-step@8,server@21,every-step@28,server@61"
    assert found["sync"] == f"{known},{asked}" and is_resolved_from(asked, found["sync"])


def back_from_local(cluster: Cluster) -> dict[str, Any]:
    """The run that trains alone for a while; and the run, resumed after it has gone back."""
    script(1, rank=1)
    heard = [0]

    def hear(self: Any, worker: int, seconds: float) -> dict[str, float] | None:
        heard[0] += 1
        return {"seconds": seconds, "usual": seconds} if heard[0] == 24 else None

    straggler_recovery.RecoveryJudge.observe_seconds = hear
    asked = digits(f"replicas=2 sync={ASKED}", steps=24, health=HEALTH)
    session, kept, num_samples, losses = build_test_session(cluster, asked), None, 0, list[float]()
    for stats in session.rounds():
        losses.append(stats.loss)
        num_samples += stats.num_samples
        if session.state.step == 22:
            kept = copy.deepcopy(session.snapshot())
    assert kept is not None
    names = [name for name, _ in session.events.take() if name in ("straggler", "recovered", "switch")]
    ended, again = whole_trajectory(losses, session), build_test_session(cluster, asked)
    return {
        "names": names,
        "phases": session.rule_switches.state_dict(),
        "missing": sum(session.work.num_samples(step) for step in range(24)) - num_samples,
        "resumed": ended.distance(goes_on(again, kept)),
    }


ASKED = "every-step@straggler,local:2"


@pytest.mark.capability("I9", clause="the way back")
def test_a_run_goes_back_from_replicas_that_trained_alone_too() -> None:
    """Every-step to step 8, alone to 20 in six rounds, and every-step; alike on both ranks."""
    first, second = run_ranks(back_from_local, 2)
    assert first == second
    assert first["names"] == ["straggler", "switch", "recovered", "switch"]
    assert first["phases"]["sync"] == f"every-step@8,local:2@20,{ASKED}" and first["phases"]["slow"] is None
    assert (first["missing"], first["resumed"]) == (0, 0.0)


def until_heard(times: int, number: int) -> None:
    """From now on a rank has recovered once one was heard so often."""
    heard = [0]

    def hear(self: Any, worker: int, seconds: float) -> dict[str, float] | None:
        heard[0] += worker == number
        return {"seconds": seconds, "usual": seconds} if heard[0] == times and worker == number else None

    straggler_recovery.RecoveryJudge.observe_seconds = hear


def once(cluster: Cluster, asked: Recipe) -> tuple[Trajectory, dict[str, Any]]:
    session, num_samples, losses = build_test_session(cluster, asked), 0, list[float]()
    for stats in session.rounds():
        losses.append(stats.loss)
        num_samples += stats.num_samples
    names = [name for name, _ in session.events.take() if name in ("straggler", "recovered", "switch")]
    told = {"names": names, "phases": session.rule_switches.state_dict()["sync"]}
    missing = sum(session.work.num_samples(step) for step in range(asked.steps or 0)) - num_samples
    return whole_trajectory(losses, session), {**told, "missing": missing}


def back_from_where_nobody_saw_it(cluster: Cluster) -> dict[str, Any]:
    """Rank 0 was slow, and serves; the same with a trial that runs nothing; and a link was slow."""
    found, ends, tried = {}, [], tried_out.run_trial
    for trial in (tried, lambda *given: 0.0):
        tried_out.run_trial = trial
        script(1, rank=0)
        until_heard(12, 2)
        end, found["server"] = once(cluster, waiting("server").replace(steps=24))
        ends.append(end)
    script(1, rank=1, cause="communication")
    until_heard(6, 1)
    _, found["link"] = once(cluster, digits(f"replicas=3 sync={ASKED}", steps=24, health=HEALTH))
    return {**found, "trials": ends[0].distance(ends[1])}


@pytest.mark.capability("I9", clause="the way back from a slow server, and of a slow link")
def test_a_run_goes_back_where_the_slow_rank_serves_and_where_a_link_was_slow() -> None:
    """Three rounds of tries each; a trial changes nothing, and none of its samples counts."""
    for rank in run_ranks(back_from_where_nobody_saw_it, 3):
        for name, known in (("server", "every-step@8,server@11"), ("link", "every-step@8,local:2@14")):
            asked = "every-step@straggler," + ("server" if name == "server" else "local:2")
            assert rank[name]["names"] == ["straggler", "switch", "recovered", "switch"], rank
            assert (rank[name]["phases"], rank[name]["missing"]) == (f"{known},{asked}", 0)
        assert rank["trials"] == 0.0
