"""A run that a server has taken over goes back to every-step once the slow rank keeps up; nothing is lost."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.job.cluster import Cluster
from paceline.job.launcher_reports import TRAINING_FOR_SERVER, read_phase
from paceline.parallel.state_transfer import StateSnapshot
from paceline.recipe import Recipe
from paceline.recipe.strategy_text import is_resolved_from
from paceline.sync import straggler_detection, straggler_recovery
from paceline.sync import straggler_recovery as tried_out
from paceline.sync.straggler_detection import SlowRank
from paceline.testing import run_ranks
from paceline.testing.parity import Trajectory, build_test_session, whole_trajectory
from tests.parity.test_straggler_recovery import HEALTH, digits, goes_on, waiting

STEPS, RECOVERS, PUSH = 80, (20, 60), straggler_recovery.StopWhenRecovered.push


def script(named: int, rank: int = 2, cause: str = "compute") -> None:
    """A rank is named so often, after two windows of every-step; and has recovered in certain steps."""
    looks = [0]

    def find(data: Any, compute: Any, factor: float) -> SlowRank | None:
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
    session = build_test_session(cluster, waiting("server").replace(steps=STEPS))
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
    plain = build_test_session(cluster, digits("replicas=3", steps=STEPS))
    plain.restore_shared(StateSnapshot(back.step, back.whole, {**back.numbers, "others": {}}))
    alone = {stats.step: stats.loss for stats, _ in zip(plain.rounds(), range(4), strict=False)}
    names = [
        name for name, _ in session.events.take() if name in ("straggler", "recovered", "switch", "gain")
    ]
    ended = whole_trajectory([*losses.values()], session)
    script(1)
    again = build_test_session(cluster, waiting("server").replace(steps=STEPS))
    resumed = goes_on(again, kept)
    return {
        "ended": ended,
        "resumed": ended.distance(resumed),
        "names": names,
        "missing": sum(session.work.num_samples(step) for step in range(STEPS)) - num_samples,
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
