"""Ranks leave, die and join while a job trains, or their number changes between steps: nothing is lost.

With sums in one order, the bits are those of a run that never changed, on any number of ranks."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from paceline.errors import CommunicationError, StrategyError
from paceline.job.cluster import Cluster
from paceline.job.epochs import waiting_processes
from paceline.optim import build_schedule
from paceline.recipe import Recipe, Strategy
from paceline.session.membership_change import change_members, join_as_member, prepare_new_member
from paceline.session.session import Session
from paceline.testing import run_ranks
from paceline.testing.parity import Trajectory, build_test_session, make_task, run_oracle, whole_trajectory
from tests.marks import soak_param
from tests.parity.training_runs import train_whole
from tests.ports import free_port
from tests.recipes import recipe_of

STEPS, CHANGE = 6, 3


def digits(**changes: Any) -> Recipe:
    return Recipe(
        task="digits",
        options={"model": "mlp", "dropout": 0.1},
        steps=STEPS,
        batch={"size": 46, "shards": 6},
        optimizer={"name": "adamw", "lr": 1e-3, "clip_norm": 0.5},
        precision={"compute": "fp32"},
        **changes,
    )


ORDERED = digits(reproducible=True)
NATIVE = digits(strategy="replicas=all route=native")


def until(session: Session, step: int, losses: dict[int, float]) -> None:
    """Train up to a step, if no rank is lost on the way."""
    for stats in session.rounds():
        losses[session.state.step - 1] = stats.loss
        if session.state.step == step:
            return


def end_of(session: Session, losses: dict[int, float]) -> Trajectory:
    found = whole_trajectory([losses[step] for step in sorted(losses)], session)
    session.close()
    session.cluster.disconnect()
    return found


def survive(cluster: Cluster, recipe: Recipe, leaver: int, how: str, wrongly: bool = False) -> Any:
    """One rank leaves between two steps, or is killed in a backward."""
    session, losses = build_test_session(cluster, recipe), {}
    until(session, CHANGE, losses)
    if cluster.global_rank == leaver:
        if how == "leaves":
            session.close()
            session.cluster.disconnect()
            return None
        parameter = next(iter(session.runner.sharded_model.model.parameters()))
        parameter.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
    feed = session.feed
    if how == "is killed":
        with pytest.raises(CommunicationError):
            until(session, STEPS, losses)
    change_members(session, 60.0)
    if wrongly:
        session.parts.feed = feed
    until(session, STEPS, losses)
    return session.cluster.world_size, os.getpid(), end_of(session, losses)


def run(recipe: Recipe, leaver: int, how: str, *more: Any) -> list[Any]:
    dying = (leaver,) if how == "is killed" else ()
    return run_ranks(survive, 3, recipe, leaver, how, *more, group_deadline=60.0, may_die=dying)


@pytest.mark.capability("Z1")
@pytest.mark.parametrize(
    ("recipe", "leaver", "how"),
    [
        (ORDERED, 0, "is killed"),
        (ORDERED, 2, "leaves"),
        (NATIVE, 1, "is killed"),
        soak_param(ORDERED, 0, "leaves"),
        soak_param(ORDERED, 2, "is killed"),
        soak_param(NATIVE, 1, "leaves"),
    ],
)
def test_the_others_go_on_in_process_and_end_where_they_would_have(
    recipe: Recipe, leaver: int, how: str
) -> None:
    """In the order of sums that is fixed, to the bit; else as far as rounding."""
    found = [one for one in run(recipe, leaver, how) if one is not None]
    right = run_oracle(recipe, STEPS)
    for world_size, _, end in found:
        assert world_size == 2 and len(end.losses) == STEPS
        assert end.distance(found[0][2]) == 0.0
        assert end.distance(right) <= 1e-5
    if recipe.reproducible:
        assert found[0][2].distance(end_of_two()) == 0.0
        assert found[0][2].losses == end_of_two().losses


@cache
def end_of_two() -> Trajectory:
    """The end of a run of two ranks that never changes."""
    return run_ranks(train_whole, 2, ORDERED)[0]


@pytest.mark.capability("Z1")
def test_samples_that_nobody_takes_over_are_seen() -> None:
    """The mutation twin: the ranks that are left go on with their old share of the samples."""
    found = run(NATIVE, 2, "leaves", True)
    assert found[0][2].distance(run_oracle(NATIVE, STEPS)) > 1e-4


def grow(cluster: Cluster, recipe: Recipe) -> Any:
    """Rank 2 is no member at first: it leaves at once, builds alone, and joins at step 3."""
    losses: dict[int, float] = {}
    if cluster.global_rank == 2:
        cluster.disconnect()
        session = prepare_new_member(recipe, make_task(recipe), torch.device("cpu"), lambda text: None)
        join_as_member(session, cluster)
    else:
        session = build_test_session(cluster.renew(60.0), recipe)
        until(session, CHANGE, losses)
        while not session.cluster.connected.store.check(["joining"]):
            pass
        change_members(session, 60.0)
    began = session.state.step
    until(session, STEPS, losses)
    return session.cluster.world_size, began, end_of(session, losses)


@pytest.mark.capability("Z1")
@pytest.mark.parametrize("model", ["mlp", "convnet"])
def test_a_process_that_joins_has_the_state_of_the_others_and_takes_its_share(model: str) -> None:
    """The convnet has running statistics, which the change of members between two steps must not reset."""
    recipe = ORDERED.replace(options={**ORDERED.options, "model": model})
    found = run_ranks(grow, 3, recipe, group_deadline=60.0)
    right = end_of_two() if model == "mlp" else run_ranks(train_whole, 2, recipe)[0]
    assert [(size, began) for size, began, _ in found] == [(3, CHANGE)] * 3
    assert [end.distance(right) for _, _, end in found] == [0.0] * 3
    assert found[0][2].losses == right.losses


EPOCHS_STEPS = 16  # two epochs of six steps, and a part of a third one
Spans = list[tuple[int, int]]
"""From which step to which each process is a member."""


def history_of(seed: int, processes: int = 4) -> Spans:
    """Random spans of membership: at every step there is a member, and the first step has one."""
    chance = random.Random(seed)
    while True:
        begins = [chance.choice((0, 0, chance.randrange(1, EPOCHS_STEPS))) for _ in range(processes)]
        spans = [(begin, chance.randrange(begin + 1, EPOCHS_STEPS + 1)) for begin in begins]
        last = chance.randrange(processes)
        spans[last] = spans[last][0], EPOCHS_STEPS
        # A change needs a member that stays: it passes on the state.
        stays = all(any(a < step < b for a, b in spans) for step in range(1, EPOCHS_STEPS))
        if stays and any(begin == 0 for begin, _ in spans):
            return spans


def live(cluster: Cluster, recipe: Recipe, spans: Spans) -> Any:
    """Be a member from the first step of the span to its end; the samples of each step, and the end."""
    number = cluster.global_rank
    begin, end = spans[number]
    losses: dict[int, float] = {}
    samples: list[tuple[int, list[int]]] = []
    if begin:
        cluster.disconnect()
        session = prepare_new_member(recipe, make_task(recipe), torch.device("cpu"), lambda text: None)
        join_as_member(session, cluster)
    else:
        session = build_test_session(cluster.renew(60.0), recipe)
    while session.state.step < EPOCHS_STEPS:
        step = session.state.step
        if step == end:
            session.close()
            session.cluster.disconnect()
            return samples, None
        joining = {i for i, (first, _) in enumerate(spans) if first == step and step}
        cluster = session.cluster
        while not joining <= {*cluster.connected.members, *waiting_processes(cluster.connected)}:
            time.sleep(0.01)
        members = cluster.connected.members
        if not joining <= {*members} or any(spans[one][1] == step for one in members):
            change_members(session, 60.0)
            assert session.state.step == step
        samples += [(step, [*map(int, one.indices)]) for one in session.work.micro_batches(step)]
        until(session, step + 1, losses)
    return samples, end_of(session, losses)


@cache
def end_of_history() -> Trajectory:
    """The end of the run on one process."""
    return run_ranks(train_whole, 1, SHORT)[0]


SHORT = ORDERED.replace(steps=EPOCHS_STEPS, batch={"size": 299, "shards": 6})  # six steps an epoch


@pytest.mark.capability("Z10", clause="random histories of members")
@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 50), marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
)
def test_random_histories_use_every_sample_once_and_end_with_the_same_bits(seeds: range) -> None:
    for seed in seeds:
        spans = history_of(seed)
        found = run_ranks(live, 4, SHORT, spans, group_deadline=60.0)
        by_epoch = {epoch: Counter[int]() for epoch in range(3)}
        steps_of_epoch = -(-num_samples() // SHORT.batch.size)
        for step, indices in samples_of(found):
            by_epoch[step // steps_of_epoch].update(indices)
        whole = EPOCHS_STEPS // steps_of_epoch
        for epoch in range(whole):
            assert len(by_epoch[epoch]) == num_samples() and set(by_epoch[epoch].values()) == {1}, spans
        ends = [end for _, end in found if end is not None]
        assert ends and all(end.distance(end_of_history()) == 0.0 for end in ends), (seed, spans)


def samples_of(found: list[Any]) -> list[tuple[int, list[int]]]:
    return [row for samples, _ in found for row in samples]


@cache
def num_samples() -> int:
    return len(make_task(SHORT).data)


def behind(cluster: Cluster, recipe: Recipe) -> Any:
    """Rank 0 has lost the last step: it takes over from one that has made it."""
    session, losses = build_test_session(cluster, recipe), {}
    until(session, CHANGE - 1, losses)
    snapshot = (
        {name: value.clone() for name, value in session.state.tensors().items()},
        session.state.scalars(),
    )
    until(session, CHANGE, losses)
    if cluster.global_rank == 0:
        session.restore(*snapshot)
    change_members(session, 60.0)
    step = session.state.step
    until(session, STEPS, losses)
    return step, end_of(session, losses)


def test_a_rank_that_has_missed_a_step_takes_it_over() -> None:
    found = run_ranks(behind, 2, ORDERED, group_deadline=60.0)
    assert [step for step, _ in found] == [CHANGE, CHANGE]
    assert found[0][1].distance(end_of_two()) == 0.0


def test_where_no_rank_has_the_whole_state_it_is_refused() -> None:
    def refused(cluster: Cluster) -> None:
        for strategy in ("replicas=1 shard=2 zero=1", "replicas=2 codec=int8", "replicas=2 sync=gossip:1"):
            session = build_test_session(cluster, digits(strategy=strategy))
            with pytest.raises(StrategyError, match="members cannot change in a running process with"):
                change_members(session)
            session.close()

    run_ranks(refused, 2)


ENDS = (3, 6, 9)  # the step at which each phase ends
STEPS_RESIZED = ENDS[-1]
ALONE, ZERO_3 = "replicas=1", "replicas=1 shard=3 zero=1"
PHASES = [  # one strategy for each
    ("replicas=2", "replicas=3", ALONE),
    ("replicas=1 shard=2 zero=1", ZERO_3, ALONE),
    ("replicas=2 pipeline=2", "replicas=3 pipeline=2", "replicas=1 pipeline=2"),
    ("replicas=1 pipeline=2", "replicas=1 pipeline=3", ALONE),
    ("replicas=1 pipeline=2", ZERO_3, "replicas=1 pipeline=2"),
]


digits_resized = partial(
    recipe_of,
    task="digits",
    options={"model": "convnet", "dropout": 0.1},
    steps=STEPS_RESIZED,
    batch={"size": 46, "shards": 6},
    optimizer={"name": "adamw", "lr": 1e-3, "clip_norm": 0.5},
)


@cache
def end_of_one() -> Trajectory:
    return run_oracle(digits_resized(ALONE), STEPS_RESIZED)


def ranks_of(text: str) -> int:
    strategy = Strategy.parse(text)
    return (strategy.replicas or 1) * strategy.ranks_per_replica


def connect(cluster: Cluster, port: int, num_ranks: int) -> Cluster:
    """The first ranks of the world as a job of their own."""
    alone = replace(
        cluster,
        world_size=num_ranks,
        local_world_size=num_ranks,
        port=port,
        store_fd=None,
        membership=None,
        token=f"of {num_ranks}",
    )
    if num_ranks == 1:
        return Cluster.single()
    return alone.connect("cpu", 30.0)


def resized(
    cluster: Cluster, phases: tuple[str, ...], ports: list[int], forgets: str = ""
) -> Trajectory | None:
    """Run the phases one after another; the state moves from one job to the next in memory."""
    cluster.disconnect()
    snapshot, losses, end = None, [], None
    for text, last, port in zip(phases, ENDS, ports, strict=True):
        num_ranks = ranks_of(text)
        if cluster.global_rank >= num_ranks:
            continue
        job = connect(cluster, port, num_ranks)
        session = build_test_session(job, digits_resized(text))
        if losses or last != ENDS[0]:
            session.restore_shared(snapshot)
            _forget(session, forgets)
        for stats in session.rounds():
            losses.append(stats.loss)
            if session.state.step == last:
                break
        found = session.snapshot()
        snapshot = replace(found, whole={n: t.detach().clone() for n, t in found.tensors().items()})
        end = whole_trajectory(losses, session)
        job.disconnect()
    return end


def _forget(session: Any, what: str) -> None:
    if what == "moments":
        session.state.optimizer.state.clear()


def run_resized(phases: tuple[str, ...], *more: str) -> list[Any]:
    return run_ranks(resized, max(map(ranks_of, phases)), phases, [free_port() for _ in ENDS], *more)


@pytest.mark.capability("Z1", "A11", "D1")
@pytest.mark.parametrize(
    "phases",
    [phases if number in (1, 2, 4) else soak_param(phases) for number, phases in enumerate(PHASES)],
    ids=" to ".join,
)
def test_replicas_shards_and_stages_take_over_from_each_other(phases: tuple[str, ...]) -> None:
    """Two, three, one: the run ends where the run of one process ends."""
    ends = run_resized(phases)
    right = end_of_one()
    assert len(ends[0].losses) == STEPS_RESIZED
    assert ends[0].distance(right) <= 1e-5
    assert max(abs(a - b) for a, b in zip(ends[0].losses, right.losses, strict=True)) <= 1e-5


@pytest.mark.capability("Z1")
def test_a_resize_that_forgets_the_moments_is_seen() -> None:
    """The mutation twin."""
    ends = run_resized(PHASES[0], "moments")
    assert ends[0].distance(end_of_one()) > 1e-4


def growing(strategy: str) -> Recipe:
    """Eight samples a rank: the batch grows with the ranks, and with it the rate."""
    recipe = digits_resized(strategy)
    return recipe.replace(
        batch={"size": 8 * ranks_of(strategy), "shards": 6},
        schedule={"batch_scaling": "linear", "base_batch": 8, "warmup_steps": 4, "decay": "cosine"},
    )


def rates(cluster: Cluster, phases: tuple[str, ...], ports: list[int]) -> list[tuple[int, float]]:
    """By update, the rate of this rank."""
    cluster.disconnect()
    snapshot, found = None, []
    for text, last, port in zip(phases, ENDS, ports, strict=True):
        if cluster.global_rank >= ranks_of(text):
            continue
        job = connect(cluster, port, ranks_of(text))
        session = build_test_session(job, growing(text))
        if last != ENDS[0]:
            session.restore_shared(snapshot)
        for stats in session.rounds():
            found.append((stats.step, stats.lr))
            if session.state.step == last:
                break
        snapshot = session.snapshot()
        job.disconnect()
    return found


@pytest.mark.soak
@pytest.mark.capability("J17", clause="the rates of recipes with other batches")
def test_a_resize_that_changes_the_batch_applies_the_scaling_rule_anew() -> None:
    """Two, three, one: in its warm-up and after it the rate is that of the ranks that there are."""
    phases = PHASES[0]
    expected = []
    for text, first, last in zip(phases, (0, *ENDS), ENDS, strict=False):
        schedule = build_schedule(growing(text).schedule, STEPS_RESIZED, growing(text).batch.size)
        expected += [(step, 1e-3 * schedule.factor(step)) for step in range(first, last)]
    assert run_ranks(rates, 3, phases, [free_port() for _ in ENDS])[0] == expected
    assert len({round(rate / 1e-3, 1) for _, rate in expected}) > 5
