"""Several servers are one: parts of the model lie on each; of large embeddings touched rows alone travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.comm.channel import ChannelMessage, MessageChannel
from paceline.errors import CommunicationError
from paceline.job.cluster import Cluster
from paceline.parallel import server_partition
from paceline.parallel.server_partition import plan_partition
from paceline.recipe import Recipe, Strategy
from paceline.session import Session
from paceline.state.slot import TensorSlot
from paceline.sync.server import parameter_transfer
from paceline.sync.server.parameter_transfer import SparseRowTransfer
from paceline.sync.server.server_common import ShardServer
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.contracts import RuleContract
from paceline.testing.parity import (
    Trajectory,
    build_test_session,
    make_task,
    run_oracle,
    trajectory_of,
    whole_trajectory,
)
from tests.parity.test_server_storage import parameter_bytes
from tests.parity.training_runs import pause_seldom
from tests.recipes import recipe_of

STEPS = 12
TWO = "servers=2 sync=server"
CLIPPED = {"name": "adamw", "lr": 5e-3, "clip_norm": 0.05}


digits = partial(
    recipe_of,
    task="digits",
    options={"model": "mlp", "hidden": [32], "dropout": 0.1},
    steps=STEPS,
    batch={"size": 46, "shards": 6},
    optimizer=CLIPPED,
)


CONV = digits(TWO, options={"model": "convnet"}, optimizer={"name": "sgd", "lr": 0.05, "momentum": 0.9})


def ended(losses: list[float], session: Session) -> Trajectory:
    """The end of a run: a worker's own copy of the parameters; on a server, all of them, gathered."""
    whole, held = whole_trajectory(losses, session), trajectory_of(losses, session)
    is_server = session.cluster.global_rank < session.strategy.servers
    return replace(held, parameters=whole.parameters) if is_server else held


def trained(cluster: Cluster, recipe: Recipe) -> tuple[Trajectory, dict[str, Any]]:
    """Where a run ends, and what this rank held and knew."""
    session = build_test_session(cluster, recipe)
    losses = [stats.loss for stats in session.rounds()]
    found = ended(losses, session)
    told = {
        "moments": sum(t.numel() * t.element_size() for t in found.optimizer.values() if t.dim()),
        "parameters": parameter_bytes(session),
        "notes": dict(session.events.take()),
        **session.rule.ledger.record(),
    }
    session.close()
    return found, told


class Left(Exception):
    """A rank has closed its channel."""


class Leaving:
    """Closes its end with its tenth message in hand."""

    def __init__(self, inner: MessageChannel) -> None:
        self.inner, self.heard = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def receive(self, deadline_seconds: float) -> ChannelMessage:
        message = self.inner.receive(deadline_seconds)
        self.heard += 1
        if self.heard == 10:
            self.inner.close()
            raise Left
        return message


def norm_of_one(self: ShardServer, own: Sequence[Tensor], updates: int) -> Sequence[Tensor]:
    """The twin: each server clips by what it holds itself."""
    return own


def held_by_nobody(*args: Any) -> Any:
    """The twin: one tensor is on no server."""
    plan = plan_partition(*args)
    largest = max(plan, key=lambda name: max(stop - start for start, stop in filter(None, plan[name])))
    return plan | {largest: (None,) * len(plan[largest])}


def of_two_servers(cluster: Cluster) -> list[Any]:
    """Runs of one job, the last two with a mistake in them."""
    whole = [
        trained(cluster, recipe) for recipe in (digits(TWO), CONV, digits(f"{TWO} partition=max-size:4096"))
    ]
    with patch.object(ShardServer, "_norms", norm_of_one):
        whole.append(trained(cluster, digits(TWO)))
    with patch.object(server_partition, "plan_partition", held_by_nobody):
        session = build_test_session(cluster, digits(TWO))
        losses = [stats.loss for stats in session.rounds()]
        return [*whole, trajectory_of(losses, session)]


@pytest.mark.capability("B2", "B4")
def test_two_servers_and_two_workers_are_two_replicas() -> None:
    """With a clip by the norm of all, AdamW, BatchNorm and several partitioners; and two twins."""
    ranks = run_ranks(of_two_servers, 4)
    right, conv = run_oracle(digits("replicas=1"), STEPS), run_oracle(CONV, STEPS)
    for mlp, cnn, cut_otherwise, alone, _ in ranks:
        assert mlp[0].distance(right) <= 1e-6 and cut_otherwise[0].distance(right) <= 1e-6
        assert cnn[0].distance(conv) <= 1e-5
        assert mlp[0].losses == ranks[0][0][0].losses
        assert alone[0].distance(right) > 1e-3, "each server clips by its own norm, and nobody notices"
    for *_, nobody in ranks[2:]:
        assert nobody.distance(right) > 1e-3, "a tensor is updated by nobody, and nobody notices"
    first, second, *workers = (rank[0][1] for rank in ranks)
    assert first["notes"]["servers"]["bytes"] == [first["moments"] // 2, second["moments"] // 2]
    assert all(worker["moments"] == 0 for worker in workers)
    model = workers[0]["parameters"]
    assert first["parameters"] + second["parameters"] == model == workers[1]["parameters"]
    assert [first["parameters"], second["parameters"]] == first["notes"]["servers"]["bytes"]
    assert max(first["parameters"], second["parameters"]) <= 1.1 * model / 2
    assert all(rank["applied"] == 2 * STEPS and rank["dropped"] == 0 for rank in (first, second, *workers))


def as_one(cluster: Cluster, strategy: str) -> list[Trajectory]:
    """Values as they are, and coded without loss; no clip, so that no sum of squares has another order."""
    found = []
    for recipe in (digits(strategy, optimizer={}), digits(f"{strategy} codec=lossless", optimizer={})):
        session = build_test_session(cluster, recipe, lambda r=recipe: plainly_updated(r))
        found.append(ended([stats.loss for stats in session.rounds()], session))
    return found


def plainly_updated(recipe: Recipe) -> Task:
    """A fused kernel rounds the end of a tensor otherwise than its middle, so bits would follow the cut."""
    return replace(
        make_task(recipe), optimizer=lambda model: torch.optim.AdamW(model.parameters(), 5e-3, fused=False)
    )


@pytest.mark.capability("B4")
@pytest.mark.parametrize("rule", ["server", "server-async"])
def test_two_servers_have_the_bits_of_one(rule: str) -> None:
    """One worker's order of arrival is the only one, so an asynchronous run repeats another."""
    num_workers = 1 + (rule == "server")
    two, one = (
        run_ranks(as_one, servers + num_workers, f"servers={servers} sync={rule}") for servers in (2, 1)
    )
    for rank in two:
        for mine, theirs in zip(rank, one[0], strict=True):
            assert mine.distance(theirs) == 0.0 and mine.losses == theirs.losses


def lossy(cluster: Cluster) -> list[Trajectory]:
    """Codecs that lose something, backup workers, and nobody waiting."""
    strategies = ("server codec=int8", "server codec=topk:0.2", "backup:1", "server-async", "bounded:1")
    return [
        trained(cluster, digits(f"servers=2 sync={one}", steps=40, optimizer={"name": "sgd", "lr": 0.1}))[0]
        for one in strategies
    ]


@pytest.mark.capability("B4", "I7")
def test_codecs_and_rules_go_with_two_servers() -> None:
    first, *others = run_ranks(lossy, 4)
    for number, found in enumerate(first):
        assert found.losses[-1] < 0.8 * found.losses[0]
        assert all(rank[number].distance(found) == 0.0 for rank in others)


def half_way(cluster: Cluster) -> tuple[dict[str, Tensor], dict[str, Any]]:
    session = build_test_session(cluster, digits(TWO))
    for _, _stats in zip(range(STEPS // 2), session.rounds(), strict=False):
        pass
    found = session.snapshot()
    assert session.state.step == STEPS // 2
    return {name: t.detach().clone() for name, t in found.tensors().items()}, dict(found.scalars())


def onwards(cluster: Cluster, strategy: str, tensors: Any, scalars: Any) -> Trajectory:
    session = build_test_session(cluster, digits(strategy))
    session.restore({n: t for n, t in tensors.items() if "servers" in strategy or "work/" not in n}, scalars)
    list(session.rounds())
    return ended([], session)


@pytest.mark.capability("B4", "N3")
def test_a_run_goes_on_with_other_numbers_of_servers_and_workers() -> None:
    """Two servers and two workers, then three and one, or replicas: all end where one process ends."""
    tensors, scalars = run_ranks(half_way, 4)[2]
    right = run_oracle(digits("replicas=1"), STEPS)
    for strategy, num_ranks in (("servers=3 sync=server", 4), ("replicas=2", 2)):
        for end in run_ranks(onwards, num_ranks, strategy, tensors, scalars):
            assert end.distance(right) <= 1e-6


def with_a_loss(cluster: Cluster, lost: int, steps: int) -> str:
    """One rank closes its channel and leaves; what the others say."""
    recipe = digits("servers=2 sync=server-async", steps=steps, runtime={"deadline_seconds": 20.0})
    session = pause_seldom(build_test_session(cluster, recipe))
    if cluster.global_rank == lost:
        session.rule.channel = Leaving(session.rule.channel)
    try:
        list(session.rounds())
    except (Left, CommunicationError) as error:
        return f"{type(error).__name__} {error}"
    weight = session.snapshot().tensors()["model/layers.0.weight"]
    return f"whole {session.rule.ledger.applied} {weight.sum()}"


@pytest.mark.capability("B4", "N5")
def test_a_server_that_is_lost_is_named_and_a_worker_is_not_missed() -> None:
    first, left, *workers = run_ranks(with_a_loss, 4, 1, 400)
    assert left.startswith("Left")
    assert "server rank 1 is lost" in first
    assert all("rank 1 is gone" in worker or "rank 0 is gone" in worker for worker in workers)
    first, second, left, worker = run_ranks(with_a_loss, 4, 2, 40)
    assert left.startswith("Left")
    assert first.startswith("whole 80 ") and first == second == worker


@pytest.mark.soak
@pytest.mark.capability("B2", "B4")
class TestTwoServers(RuleContract):
    strategy, num_ranks, interrupts = "servers=2 sync=server", 4, 2


WORDS, WIDTH, STEPS_ROWS = 4096, 8, 12


def build(sparse: bool) -> Task:
    """A word's number to its parity, by an embedding of which a batch sees few rows."""
    words = torch.randint(0, WORDS, (64, 3), generator=torch.Generator().manual_seed(1))
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = nn.Sequential(nn.EmbeddingBag(WORDS, WIDTH, mode="sum", sparse=sparse), nn.Linear(WIDTH, 2))

    def loss(model: nn.Module, batch: Any) -> Loss:
        found = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        return Loss(found, len(batch[0]))

    return Task(model, TensorDataset(words, words.sum(1) % 2), loss)


def recipe(optimizer: dict[str, Any], servers: int = 1) -> Recipe:
    return Recipe(
        task="own",
        steps=STEPS_ROWS,
        batch={"size": 16, "shards": 4},
        optimizer=optimizer,
        strategy=Strategy.parse(f"servers={servers} sync=server"),
    )


def trained_rows(
    cluster: Cluster, optimizer: dict[str, Any], sparse: bool, servers: int = 1
) -> tuple[Trajectory, float]:
    """Where a run ends, and the bytes that this rank put on the channel."""
    session = build_test_session(cluster, recipe(optimizer, servers), partial(build, sparse))
    pause_seldom(session)
    losses = [stats.loss for stats in session.rounds()]
    sent = session.net.ledger.rows["send", "channel"].sent_bytes
    end = ended(losses, session)
    session.close()
    return end, float(sent)


def both(cluster: Cluster, whole: int) -> list[tuple[Trajectory, float]]:
    """SGD, AdamW and a sparse embedding; a last run with every matrix sent whole."""
    sgd, adamw = {"name": "sgd", "lr": 0.5}, {"name": "adamw", "lr": 0.01}
    found = [
        trained_rows(cluster, sgd, False),
        trained_rows(cluster, sgd, True),
        trained_rows(cluster, adamw, False),
    ]
    parameter_transfer.MIN_ROWS = whole
    return [*found, trained_rows(cluster, sgd, False), trained_rows(cluster, adamw, False)]


@pytest.mark.capability("B4", clause="only touched rows are moved")
def test_touched_rows_alone_travel_and_the_run_keeps_its_bits() -> None:
    for rank, found in enumerate(run_ranks(both, 3, 2 * WORDS)):
        (sgd, few), (sparse, also_few), (adamw, _), (whole, all_bytes), (whole_adamw, _) = found
        assert sgd.distance(whole) == sparse.distance(whole) == adamw.distance(whole_adamw) == 0.0
        assert sgd.losses == sparse.losses == whole.losses
        # down, the first ticket and the pause are whole, and the eleven tickets between are not
        assert max(few, also_few) < (0.25 if rank == 0 else 0.05) * all_bytes


@pytest.mark.capability("B4", clause="rows of an embedding spread over servers")
def test_two_servers_have_half_of_the_rows_each_and_move_the_touched_ones() -> None:
    adamw = {"name": "adamw", "lr": 0.01}
    one, two = (run_ranks(trained_rows, n + 2, adamw, True, n) for n in (1, 2))
    assert all(end.distance(one[0][0]) == 0.0 for end, _ in two)
    (first, sent), (second, also_sent) = two[:2]
    assert [end.optimizer["0.weight/exp_avg"].shape for end in (first, second)] == [(WORDS // 2, WIDTH)] * 2
    # halves go to two workers at the first ticket and at the pause, and to the other server: 5, not 8
    assert max(sent, also_sent) < 0.65 * one[0][1]


def test_the_rows_of_a_gradient_and_back() -> None:
    grad = torch.zeros(1000, 3)
    grad[[4, 7]] = torch.tensor([[1.0, 0.0, float("nan")], [0.0, -2.0, 0.0]])
    slots = {TensorSlot.whole("a", grad): grad, TensorSlot.whole("b", grad[:2]): grad[:2].clone()}
    traffic = SparseRowTransfer()
    sent = traffic.encode_push(slots, (0, 0))
    assert [x.shape[0] for x in sent] == [2, 2, 2]
    first, second = traffic.decode_push(sent, slots, (0, 0))
    assert torch.equal(first.nan_to_num(9.0), grad.nan_to_num(9.0)) and torch.equal(second, grad[:2])


@pytest.mark.parametrize("rows", [0, 1, 499, 500, 1000])
def test_half_of_the_rows_or_more_travel_whole(rows: int) -> None:
    grad = torch.zeros(1000, 2)
    grad[:rows] = 1.0
    slots: dict[TensorSlot, Tensor] = {TensorSlot.whole("a", grad): grad}
    numbers, values = SparseRowTransfer().encode_push(slots, (0, 0))
    assert (len(numbers), len(values)) == ((rows, rows) if rows < 500 else (0, 1000))
    assert torch.equal(SparseRowTransfer().decode_push([numbers, values], slots, (0, 0))[0], grad)


def test_a_matrix_that_changes_whole_is_compared_now_and_then_and_no_change_is_missed() -> None:
    """It changes whole for thirty versions, by single rows for thirty, and whole again; a worker follows."""
    draw = torch.Generator().manual_seed(1)
    p, theirs, traffic, end = (
        torch.randn(400, 20, generator=draw),
        torch.zeros(400, 20),
        SparseRowTransfer(),
        SparseRowTransfer(),
    )
    sizes = []
    for version in range(90):
        rows = slice(None) if version // 30 != 1 else slice(7 * (version % 30), 7 * (version % 30) + 2)
        p[rows, 18:] += 1.0  # the first values of a row stay
        if version % 3:
            p[rows] += 1.0
        if version % 4:  # the worker does not ask in every version
            sent = traffic.encode_parameters(1, [p], version)
            sizes.append(len(sent[1]))
            kept = sent[1].clone()
            end.decode_parameters(sent, [theirs], 1, version)
            assert torch.equal(theirs, p)
            p.add_(0.0)
            assert torch.equal(sent[1], kept)
    assert min(sizes) <= 8 and max(sizes) == 400
    assert traffic.lasts
    before = traffic.encode_parameters(2, [p], 90)[1]
    p.zero_()
    assert bool(before.any()), "a ticket changed with the parameters"
