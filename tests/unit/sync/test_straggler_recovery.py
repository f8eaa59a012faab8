"""When a worker that was slow is as fast as others again, from made-up times; phases of such a run."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from paceline.comm import Handle
from paceline.comm.channel import ChannelMessage
from paceline.job.cluster import Cluster
from paceline.job.mesh import RankGroup
from paceline.observe import PHASES, StepStats
from paceline.recipe import Recipe
from paceline.recipe.strategy_text import (
    append_return,
    count_returns,
    is_resolved_from,
    phase_at_step,
    phases_of,
    resolve_phases,
)
from paceline.sync import EveryStep, straggler_detection
from paceline.sync.server.server_policies import BoundedStaleness, WorkerPush, WorkTicket
from paceline.sync.straggler_recovery import (
    ANSWERS_PER_WINDOW,
    GOOD_WINDOWS,
    MAX_TRIAL_MICRO_BATCHES,
    RECOVERED,
    RecoveryJudge,
    ReplicaRecoveryRule,
    StopWhenRecovered,
    measure_compute,
    measure_links,
    run_trial,
)
from paceline.testing.parity import build_test_session
from tests.parity.virtual_clock import Clock

FACTOR, SLOW = 3.0, 1
ASKED = "local:2@4,every-step@straggler,bounded:2"


def drawn(draw: random.Random, seconds: float) -> float:
    return seconds * draw.lognormvariate(0, 0.15)


def recovered_after(times: list[float], seed: int = 0, returns: int = 0) -> int | None:
    """After how many answers of the slow worker, which takes so many times what the two others take."""
    draw, judge = random.Random(seed), RecoveryJudge(SLOW, 3, FACTOR, returns)
    for count, factor in enumerate(times, start=1):
        for worker in (0, SLOW, 2):
            found = judge.observe_seconds(worker, drawn(draw, 0.1 * (factor if worker == SLOW else 1.0)))
            if found is not None:
                return count
    return None


@pytest.mark.capability("I9", clause="the way back")
def test_it_has_recovered_after_three_windows_and_not_while_it_is_slow() -> None:
    for seed in range(50):
        assert recovered_after([FACTOR] * 400, seed) is None
        assert recovered_after([FACTOR] * 8 + [1.0] * 40, seed) == 8 + ANSWERS_PER_WINDOW * GOOD_WINDOWS


@pytest.mark.capability("I9", clause="the way back: hysteresis")
def test_what_is_no_longer_named_has_not_recovered_yet() -> None:
    """A worker between the two bounds stays where it is, and good windows between bad ones do not count."""
    assert recovered_after([2.6] * 400) is None
    in_turn = ([1.0] * ANSWERS_PER_WINDOW * (GOOD_WINDOWS - 1) + [FACTOR] * ANSWERS_PER_WINDOW) * 30
    assert recovered_after(in_turn) is None


def test_after_every_return_it_has_to_keep_up_for_twice_as_long() -> None:
    found = [recovered_after([1.0] * 100, returns=returns) for returns in range(3)]
    assert found == [12, 24, 48]


class Played:
    """A policy of two workers, the second of which is slow for its first parts; and what time it is."""

    def __init__(self) -> None:
        self.now, self.step = 0.0, 0
        self.policy = StopWhenRecovered(BoundedStaleness(2, 0), self.hear, 2, lambda: self.now)
        self.judge = RecoveryJudge(1, 2, FACTOR, 0)
        self.policy.begin(0, 100)

    def hear(self, worker: int, seconds: float) -> Mapping[str, float] | None:
        return self.judge.observe_seconds(worker, seconds)

    def one_step(self, seconds: float) -> bool:
        """Whether there was one."""
        tickets = [self.policy.ticket(worker) for worker in (0, 1)]
        if None in tickets:
            return False
        for worker, ticket in enumerate(tickets):
            assert isinstance(ticket, WorkTicket)
            self.now += seconds if worker else 0.1
            self.policy.push(worker, WorkerPush(ticket, 0, ChannelMessage("push")))
        return True


@pytest.mark.capability("I9", clause="the way back")
def test_the_policy_opens_no_further_step_then_and_says_so_at_the_end_of_the_round() -> None:
    played = Played()
    for _ in range(10):
        assert played.one_step(0.9)
    assert played.policy.round_events() == {}
    steps = 0
    while played.one_step(0.0):
        steps += 1
    # Two more until the third window ends, which was slow by half, and three that were not.
    assert steps == 14
    assert played.policy.is_complete and played.policy.step == 24
    (told,) = played.policy.round_events().items()
    assert told[0] == RECOVERED and (told[1]["step"], told[1]["rank"]) == (24, 2)


def test_a_run_that_has_lost_a_worker_does_not_go_back() -> None:
    played = Played()
    played.policy.drop_worker(0, None)
    while played.one_step(0.0):
        pass
    assert played.policy.step == 100 and played.policy.round_events() == {}


@pytest.mark.capability("I9", clause="the way back")
def test_the_phases_of_a_run_that_has_gone_there_and_back_are_a_reading_of_what_was_asked() -> None:
    there = resolve_phases(ASKED, 12)
    back = append_return(ASKED, there, 40)
    again = resolve_phases(back, 90)
    assert back == "local:2@4,every-step@12,bounded:2@40,every-step@straggler,bounded:2"
    assert [phase_at_step(phases_of(back), step).rule for step in (3, 11, 12, 39, 40, 999)] == [
        "local:2",
        "every-step",
        "bounded:2",
        "bounded:2",
        "every-step",
        "every-step",
    ]
    assert phase_at_step(phases_of(again), 90) == ("bounded:2", None)
    assert [count_returns(ASKED, found) for found in (ASKED, there, back, again)] == [0, 0, 1, 1]
    assert all(is_resolved_from(ASKED, found) for found in (ASKED, there, back, again))
    for other in (
        "local:2@5,every-step@12,bounded:2@40,every-step@straggler,bounded:2",
        "local:2@4,every-step@12,bounded:2@40,every-step@straggler,bounded:3",
        "local:2@4,every-step@12,bounded:2@40,every-step",
    ):
        assert not is_resolved_from(ASKED, other)
    assert not is_resolved_from(
        "every-step@12,bounded:2", "every-step@12,bounded:2@40,every-step@50,bounded:2"
    )


class Serving:
    """Two workers, and a server that was slow, of which only trials say how long a micro-batch takes it."""

    def __init__(self, trials: list[float]) -> None:
        judge, self.trials = RecoveryJudge(2, 3, FACTOR, 0), iter(trials)
        took = lambda push, seconds: push.message.fields["took"]  # noqa: E731
        self.policy = StopWhenRecovered(BoundedStaleness(2, 0), judge.observe_seconds, 0, lambda: 0.0, took)
        self.policy.bind_trial(2, lambda: next(self.trials))

    def rounds(self) -> Iterator[Mapping[str, Mapping[str, Any]]]:
        """What is told after each, of four steps."""
        for first in range(0, 100, 4):
            self.policy.begin(first, first + 4)
            for _ in range(4):
                for worker, ticket in enumerate([self.policy.ticket(worker) for worker in (0, 1)]):
                    assert ticket is not None
                    self.policy.push(worker, WorkerPush(ticket, 0, ChannelMessage("push", {"took": 0.1})))
            yield self.policy.round_events()


@pytest.mark.capability("I9", clause="the way back from a slow server")
def test_a_server_that_was_slow_has_recovered_after_three_rounds_in_which_it_was_tried() -> None:
    """A round is a window: two good ones and a slow one between them do not count."""
    slow, good = 0.1 * FACTOR, 0.1
    rounds = Serving([slow, good, good, slow, good, good, good]).rounds()
    told = [news for _, news in zip(range(7), rounds, strict=False)]
    assert told == [{}] * 6 + [{RECOVERED: {"step": 28, "rank": 0, "seconds": good, "usual": good}}]


def test_a_server_that_has_lost_a_worker_is_not_tried() -> None:
    serving = Serving([])
    serving.policy.drop_worker(0, None)
    assert serving.policy.round_events() == {}


STATS = StepStats(0, 0, 1.0, {}, 8, 8.0, 1.0, 0.1, True, 1.0, 0, 1.0, {}, 0.0)


class Rounds:
    """Rounds of `steps` steps; replica 1, whose numbers these are not, is slow in the first so many."""

    def __init__(self, steps: int, slow_rounds: int) -> None:
        self.steps, self.slow_rounds, self.made = steps, slow_rounds, 0

    def rounds(self, *given: Any) -> Iterator[StepStats]:
        for number in range(40):
            self.made = number + 1
            spent = {**dict.fromkeys(PHASES, 0.0), "forward": 0.1 * self.steps, "communication": 9.0}
            yield replace(STATS, step=(number + 1) * self.steps - 1, phases=spent)

    def all_gather(self, mine: Tensor, group: RankGroup, *, equal: bool) -> Handle:
        other = mine * (FACTOR if self.made <= self.slow_rounds else 1.0)
        return Handle.ready([mine, other])


def told_of(made: Rounds) -> list[tuple[str, Any]]:
    """What is told in all rounds, while replica 1, of rank 5, is followed."""
    told: list[tuple[str, Any]] = []
    rule: Any = ReplicaRecoveryRule(
        cast("Any", made),
        RecoveryJudge(1, 2, FACTOR, 0).observe_seconds,
        5,
        measure_compute(lambda step: 2, RankGroup("replica", (0, 5), 0), cast("Any", made)),
        lambda name, record: told.append((name, record)),
    )
    assert len([*rounds_of(rule)]) == 40
    return told


def rounds_of(rule: Any) -> Iterator[StepStats]:
    """The rounds of a rule, on the CPU, from step 0."""
    runner = SimpleNamespace(sharded_model=SimpleNamespace(device=torch.device("cpu")))
    return rule.rounds(None, runner, SimpleNamespace(state=SimpleNamespace(step=0)))


@pytest.mark.capability("I9", clause="the way back")
@pytest.mark.parametrize(("steps", "rounds"), [(8, 3), (4, 3), (2, 6), (1, 12)])
def test_replicas_that_train_alone_see_it_where_they_meet(steps: int, rounds: int) -> None:
    """A round is an answer a step, and a window at most; it is told once, and waiting is not counted."""
    for slow in (0, 12):
        ((name, record),) = told_of(Rounds(steps, slow))
        assert name == RECOVERED and record["rank"] == 5 and record["step"] == (slow + rounds) * steps
        assert record["seconds"] == record["usual"] == pytest.approx(0.05)
    assert told_of(Rounds(steps, 40)) == []


@pytest.mark.capability("I9", clause="the way back of a slow link")
def test_replicas_that_train_alone_try_the_link_where_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both links of replica 1 of four are slow for five rounds; the faster of a replica's two counts."""
    made, received = Rounds(4, 5), [[0.01, 0.3, 0.4, 0.02], [0.01, 0.01, 0.02, 0.01]]
    told: list[tuple[str, Any]] = []
    recovered = RecoveryJudge(1, 4, FACTOR, 0)

    def all_gather(mine: Tensor, group: RankGroup, *, equal: bool) -> Handle:
        return Handle.ready([torch.tensor([one]) for one in received[made.made > 5]])

    monkeypatch.setattr(made, "all_gather", all_gather)
    monkeypatch.setattr(straggler_detection, "ring_receive_seconds", lambda *given: 0.0)
    look = measure_links(RankGroup("replica", (0, 1, 2, 3), 0), cast("Any", made))
    note = lambda name, record: told.append((name, record))  # noqa: E731
    rule = ReplicaRecoveryRule(cast("Any", made), recovered.observe_seconds, 1, look, note)
    assert len([*rounds_of(rule)]) == 40
    ((name, record),) = told
    assert (name, record["rank"], record["step"]) == (RECOVERED, 1, 8 * 4)
    assert record["seconds"] == pytest.approx(0.01) == record["usual"]


@pytest.mark.capability("I9", clause="the way back from a slow server")
def test_a_trial_measures_a_micro_batch_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, batch = Clock(real=0.0), {"size": 24, "shards": 6}
    monkeypatch.setattr("paceline.observe.step_stats.time", clock)
    options = {"model": "convnet", "channels": 4, "dropout": 0.1}
    recipe = Recipe(task="digits", options=options, steps=4, batch=batch)
    runs = [build_test_session(Cluster.single(), recipe) for _ in range(2)]
    forwards = [0]

    def compute(module: nn.Module, inputs: object) -> None:
        forwards[0] += 1
        clock.spend(2.5)

    for number, session in enumerate(runs):
        for _ in session.rounds():
            if number:
                before = session.snapshot().copied()
                hook = session.runner.sharded_model.model.register_forward_pre_hook(compute)
                phases = cast("EveryStep", session.rule).phases
                assert run_trial(session.feed, session.runner, session.state, phases) == 2.5
                hook.remove()
                after = session.snapshot()
                assert after.numbers == before.numbers
                assert all(torch.equal(value, after.whole[name]) for name, value in before.whole.items())
    assert forwards[0] == 4 * MAX_TRIAL_MICRO_BATCHES
    first, second = (session.snapshot().tensors() for session in runs)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
