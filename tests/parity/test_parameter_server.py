"""A server and its workers: what is applied, how old it was, what is never applied, and how a run goes on."""

from __future__ import annotations

import os
import select
import time
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from paceline.checkpoint.storage import StorageFolder
from paceline.comm.channel import ChannelMessage
from paceline.errors import StrategyError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.session import checkpointing, evaluate
from paceline.session.fit_loop import hash_and_compare
from paceline.sync.server.server_policies import (
    AsynchronousUpdates,
    BackupWorkers,
    BoundedStaleness,
    ServerPolicy,
    WorkerPush,
    WorkTicket,
)
from paceline.task import Task
from paceline.testing import RanksFailed, run_ranks
from paceline.testing.parity import Trajectory, build_test_session, make_task, run_oracle, whole_trajectory
from tests.parity.training_runs import SlowSamples, each_case, held_out_losses, train_whole
from tests.recipes import recipe_of

STEPS = 24


digits = partial(
    recipe_of,
    task="digits",
    options={"model": "mlp", "hidden": [32]},
    steps=STEPS,
    batch={"size": 48, "shards": 6},
    optimizer={"name": "sgd", "lr": 0.1},
)


ASYNC = "servers=1 sync=server-async"


def push(policy: ServerPolicy, worker: int, ticket: WorkTicket, version: int) -> Any:
    return policy.push(worker, WorkerPush(ticket, version, ChannelMessage("push")))


@pytest.mark.capability("I3", "B3")
def test_a_scripted_order_of_arrival_gives_the_exact_staleness() -> None:
    """Worker 0 is fast: it brings three pushes while worker 1 works on its first."""
    policy, updates, read, ages = AsynchronousUpdates(2), 0, {}, []
    policy.begin(0, 3)
    tickets = {}
    for worker in (0, 1):
        tickets[worker], read[worker] = policy.ticket(worker), updates
    for worker in (0, 0, 0, 1, 0, 1):
        (applied,) = push(policy, worker, tickets[worker], read[worker])
        ages.append(updates - applied.version)
        updates += 1
        tickets[worker], read[worker] = policy.ticket(worker), updates
    assert ages == [0, 0, 0, 3, 1, 1]
    assert policy.step == 3 and tickets == {0: None, 1: None}


@pytest.mark.capability("I7")
def test_a_late_push_is_dropped_for_good() -> None:
    policy = BackupWorkers(3, 1)
    policy.begin(0, 2)
    tickets = [policy.ticket(worker) for worker in range(3)]
    assert push(policy, 2, tickets[2], 0) == []
    assert policy.ticket(2) is None  # its share of this step is done
    assert [p.ticket.part for p in push(policy, 0, tickets[0], 0)] == [0, 2]
    assert push(policy, 1, tickets[1], 0) is None  # late
    late = policy.ticket(1)
    assert late == WorkTicket(1, 1)
    assert push(policy, 1, late, 1) == []


@pytest.mark.capability("I7")
def test_with_no_backups_it_is_every_step() -> None:
    ends = run_ranks(train_whole, 3, digits("servers=1 sync=backup:0"))
    right = run_oracle(digits("replicas=1"), STEPS)
    assert all(end.distance(right) <= 1e-6 for end in ends)


def with_straggler(cluster: Cluster, recipe: Recipe, straggler: int, seconds: float) -> dict[str, Any]:
    def build() -> Task:
        task = make_task(recipe)
        slow = cluster.global_rank == straggler
        return replace(task, data=SlowSamples(task.data, seconds)) if slow else task

    session = build_test_session(cluster, recipe, build)
    losses = [stats.loss for stats in session.rounds()]
    evaluation = evaluate(session)
    assert evaluation is not None
    return {"loss": evaluation.loss, "losses": losses, **session.rule.ledger.record()}


@pytest.mark.capability("I7")
def test_backup_workers_drop_the_straggler_and_divide_by_those_that_came() -> None:
    """Three workers, the first two count: with one slow worker its work is mostly dropped."""
    recipe = digits("servers=1 sync=backup:1")
    found = run_ranks(with_straggler, 4, recipe, 3, 0.002)
    ledger = found[0]
    assert ledger["applied"] == 2 * STEPS
    assert ledger["dropped"] > 0
    assert ledger["taken"] == ledger["applied"] + ledger["dropped"]
    assert set(ledger["staleness"]) == {"0"}  # nothing old was ever applied
    assert all(rank["loss"] == ledger["loss"] for rank in found)
    assert ledger["loss"] < 2.0


@pytest.mark.capability("I7")
def test_the_gradient_is_that_of_the_contributors_alone(tmp_path: Path) -> None:
    """One step by hand: parts 0 and 1 of three are summed and divided by their own items."""

    def run(cluster: Cluster) -> list[torch.Tensor]:
        def told(policy: BackupWorkers, worker: int, push: WorkerPush, take: Any = BackupWorkers.push) -> Any:
            (tmp_path / f"has-come-{worker}").touch()
            return take(policy, worker, push)

        def late(module: nn.Module, inputs: Any) -> None:
            while len(list(tmp_path.glob("has-come-*"))) < 2:
                time.sleep(0.01)

        session = build_test_session(cluster, digits("servers=1 sync=backup:1", steps=1))
        if cluster.global_rank == 3:
            session.runner.sharded_model.model.register_forward_pre_hook(late)
        with patch.object(BackupWorkers, "push", told):
            list(session.rounds())
        return [p.detach().clone() for p in session.runner.sharded_model.computes.values()]

    found = run_ranks(run, 4)[0]
    recipe = digits("replicas=1")
    session = build_test_session(Cluster.single(), recipe)
    micro_batches = [
        u for u in session.work.micro_batches(0) if u.shard < 4
    ]  # shards 0 to 3 of 6 are parts 0 and 1 of 3
    session.runner.sharded_model.model.train()
    total, count = 0.0, 0
    with session.feed.open(micro_batches) as stream:
        for loaded in stream:
            loss = session.task.loss(session.runner.sharded_model.model, loaded.batch)
            total, count = total + loss.total, count + loss.count
    (total / count).backward()
    for p, other in zip(session.runner.sharded_model.computes.values(), found, strict=True):
        assert torch.allclose(p.detach() - 0.1 * p.grad, other, atol=1e-6)


@pytest.mark.capability("B3", "I3")
def test_an_asynchronous_server_waits_for_nobody_and_knows_how_old_its_gradients_are() -> None:
    found = run_ranks(with_straggler, 3, digits(ASYNC, steps=100), 2, 0.003)
    ledger = found[0]
    assert ledger["taken"] == ledger["applied"] == 2 * 100  # every part once, none lost
    assert ledger["dropped"] == 0
    assert sum(ledger["staleness"].values()) == ledger["applied"]
    assert max(int(age) for age in ledger["staleness"]) >= 2  # the fast one overtook the slow one
    assert all({**rank, "losses": 0} == {**ledger, "losses": 0} for rank in found)


@pytest.mark.soak
@pytest.mark.capability("B3")
def test_the_asynchronous_loss_is_near_the_synchronous_one() -> None:
    """At equal samples, three seeds."""

    def losses(cluster: Cluster, strategy: str) -> list[float]:
        sgd = {"name": "sgd", "lr": 0.05 if strategy == ASYNC else 0.1}  # two updates a step, of half a batch
        seeds = (digits(strategy, steps=120, optimizer=sgd, seed=seed) for seed in (1, 2, 3))
        return held_out_losses(cluster, seeds)

    stale, sync = run_ranks(losses, 3, ASYNC)[0], run_ranks(losses, 2, "replicas=2")[0]
    assert mean(stale) <= 1.15 * mean(sync) + 2 * stdev(sync), (stale, sync)


@pytest.mark.capability("B3", "Z1")
def test_a_run_goes_on_under_another_rule() -> None:
    """Saved between two rounds of the server; two replicas go on from there as one process does."""

    def first(cluster: Cluster) -> Any:
        session = build_test_session(cluster, digits(ASYNC, optimizer={"name": "adamw", "lr": 2e-3}))
        for _, _stats in zip(range(8), session.rounds(), strict=False):
            pass
        found = session.snapshot()
        tensors = {n: t.detach().clone() for n, t in found.tensors().items() if not n.startswith("work/")}
        return tensors, found.scalars(), session.state.step

    def second(cluster: Cluster, strategy: str, tensors: Any, scalars: Any) -> Trajectory:
        session = build_test_session(cluster, digits(strategy, optimizer={"name": "adamw", "lr": 2e-3}))
        session.restore(tensors, scalars)
        return whole_trajectory([stats.loss for stats in session.rounds()], session)

    tensors, scalars, step = run_ranks(first, 3)[0]
    assert 0 < step < STEPS
    (alone,) = run_ranks(second, 1, "replicas=1", tensors, scalars)
    for end in run_ranks(second, 2, "replicas=2", tensors, scalars):
        assert len(end.losses) == STEPS - step and end.distance(alone) < 1e-5
        assert end.losses[-1] < end.losses[0]


@pytest.mark.capability("B3")
def test_a_worker_that_dies_is_named() -> None:
    def run(cluster: Cluster) -> None:
        session = build_test_session(cluster, digits(ASYNC, steps=100))
        for stats in session.rounds():
            if cluster.global_rank == 2 and stats.step > 10:
                os._exit(3)

    with pytest.raises(RanksFailed) as caught:
        run_ranks(run, 3)
    assert "rank 2" in str(caught.value)


@pytest.mark.capability("B3")
def test_readers_that_work_ahead_are_refused() -> None:
    def run(cluster: Cluster) -> str:
        with pytest.raises(StrategyError) as caught:
            build_test_session(cluster, digits(ASYNC, loader={"workers": 1}))
        return str(caught.value)

    assert all("loader.workers" in text for text in run_ranks(run, 3))


STEPS_LATE, SAMPLES, MICRO_BATCHES = 12, 24, 4
SECONDS = 60.0  # until something has to have come


def digits_late() -> Recipe:
    return Recipe(
        task="digits",
        options={"model": "mlp", "hidden": [16]},
        steps=STEPS_LATE,
        batch={"size": SAMPLES, "shards": 2 * MICRO_BATCHES},
        optimizer={"name": "sgd", "lr": 0.1},
        strategy=Strategy.parse("servers=1 sync=backup:1"),
    )


def with_one_that_waits(cluster: Cluster) -> dict[str, Any]:
    """The last worker begins a part, and goes on once the server has said something."""
    session, forwards, heard = build_test_session(cluster, digits_late()), [0], list[bool]()

    def wait(module: nn.Module, inputs: Any) -> None:
        forwards[0] += 1
        if cluster.global_rank == 2:
            (peer,) = session.rule.channel._peers.values()
            heard.append(bool(select.select([peer.socket], [], [], SECONDS)[0]))

    session.runner.sharded_model.model.register_forward_pre_hook(wait)
    samples = sum(stats.num_samples for stats in session.rounds())
    record = {**session.rule.ledger.record(), "step": session.state.step, "samples": samples}
    session.close()
    return {**record, "forwards": forwards[0], "heard": all(heard)}


@pytest.mark.capability("I7", clause="late work is left between two micro-batches")
def test_whoever_comes_too_late_is_told_and_leaves_the_rest() -> None:
    server, first, last = run_ranks(with_one_that_waits, 3)
    assert last["heard"] and last["forwards"] == server["dropped"]  # one micro-batch of each part
    assert first["forwards"] == STEPS_LATE * MICRO_BATCHES
    assert server["applied"] == STEPS_LATE and server["taken"] == server["applied"] + server["dropped"]
    for rank in (server, first, last):
        assert rank["step"] == STEPS_LATE and rank["samples"] == STEPS_LATE * SAMPLES


DIGITS = {
    "task": "digits",
    "options": {"model": "mlp", "hidden": [32]},
    "steps": 6,
    "batch": {"size": 48, "shards": 6},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "strategy": Strategy.parse("servers=1 sync=server codec=topk:0.1"),
}


def to_whoever_asks(policy: BoundedStaleness, worker: int) -> int | None:
    """The next part in order, as before parts had workers."""
    part = min({*range(policy._num_workers)} - policy._handed_out)
    policy._handed_out.add(part)
    return part


def trained(cluster: Cluster, folder: Path, late: int, *, anybody: bool) -> Trajectory:
    """The end of a run in which one worker comes to the first step when another has pushed already."""
    has_come, push = folder / f"{late}-{anybody}", BoundedStaleness.push

    def told(policy: BoundedStaleness, worker: int, found: WorkerPush) -> Any:
        has_come.touch()
        return push(policy, worker, found)

    session = build_test_session(cluster, Recipe(**DIGITS))
    twin = patch.object(BoundedStaleness, "_own_part", to_whoever_asks) if anybody else nullcontext()
    with closing(session), patch.object(BoundedStaleness, "push", told), twin:
        while cluster.global_rank == late and not has_come.exists():
            time.sleep(0.01)
        return whole_trajectory([stats.loss for stats in session.rounds()], session)


def apart(cluster: Cluster, folder: Path) -> list[float]:
    """How far runs end from each other in which other workers are late; then where anybody has any part."""
    found = []
    for anybody in (False, True):
        one, other = (trained(cluster, folder, late, anybody=anybody) for late in (1, 2))
        found.append(one.distance(other))
    return found


@pytest.mark.timeout(240)
@pytest.mark.capability("H4", "I3")
def test_a_coded_run_under_a_server_ends_equally_whoever_comes_first(tmp_path: Path) -> None:
    """And the twin, whose parts go to whoever asks, does not."""
    for same, other in run_ranks(apart, 3, tmp_path):
        assert same == 0.0 < 1e-4 < other


STRATEGIES = (
    "servers=1 replicas=2 sync=server",
    "servers=1 replicas=2 sync=server codec=topk:0.1",
    "servers=2 replicas=1 sync=server",
)


def digits_resumed(strategy: str, optimizer: str) -> Recipe:
    """Rounds of one step."""
    settings: dict[str, Any] = {
        "task": "digits",
        "options": {"model": "mlp", "hidden": [24, 15]},
        "steps": 8,
        "batch": {"size": 46, "shards": 6},
        "optimizer": {"name": optimizer, "lr": 1e-3},
        "strategy": Strategy.parse(strategy),
    }
    return Recipe(**settings)


def hashes(cluster: Cluster, recipe: Recipe, run_dir: Path) -> tuple[list[str], list[str]]:
    """After each round of a run that is saved in the middle, and of one that goes on from there."""
    found = []
    for goes_on in (False, True):
        session, seen, name = build_test_session(cluster, recipe), list[str](), "step-00000004"
        if goes_on:
            checkpointing.restore_checkpoint(session, StorageFolder(str(run_dir / "checkpoints")), name)
        saver = checkpointing.build_saver(session, run_dir, print)
        for _ in session.rounds():
            seen.append(hash_and_compare(session, []))  # an error, where ranks differ
            if session.state.step == 4:
                saver.wait_published(saver.save())
        session.close()
        found.append(seen)
    return found[0], found[1]


@pytest.mark.capability("N2", "B3")
def test_ranks_agree_after_a_resume(tmp_path: Path) -> None:
    """A worker updates nothing: what a checkpoint had of an optimizer is the server's."""
    recipes = [digits_resumed(text, name) for text in STRATEGIES for name in ("adamw", "rmsprop")]
    cases = [(recipe, tmp_path / str(number)) for number, recipe in enumerate(recipes)]
    for rank in run_ranks(each_case, 3, hashes, cases):
        assert all(len(whole) == 8 and rest == whole[4:] for whole, rest in rank)
