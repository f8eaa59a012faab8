"""Rows of large embeddings travel to and from a server where they are touched, and the run is the same."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.data import TrainingFeed
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.state.slot import TensorSlot
from paceline.sync.server import parameter_transfer
from paceline.sync.server.parameter_transfer import SparseRowTransfer
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import Trajectory, build_test_session, trajectory_of

WORDS, WIDTH, STEPS = 4096, 8, 12


class OneRound(TrainingFeed):
    """No pause, at which all parameters go to all workers."""

    def next_pause(self, step: int) -> int:
        return self.num_steps


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
        steps=STEPS,
        batch={"size": 16, "shards": 4},
        optimizer=optimizer,
        strategy=Strategy.parse(f"servers={servers} sync=server"),
    )


def trained(
    cluster: Cluster, optimizer: dict[str, Any], sparse: bool, servers: int = 1
) -> tuple[Trajectory, float]:
    """Where a run ends, and the bytes that this rank put on the channel."""
    session = build_test_session(cluster, recipe(optimizer, servers), partial(build, sparse))
    session.parts.feed = OneRound(session.feed.work, session.feed.loader, STEPS)
    losses = [stats.loss for stats in session.rounds()]
    sent = session.net.ledger.rows["send", "channel"].sent_bytes
    session.close()
    return trajectory_of(losses, session), float(sent)


def both(cluster: Cluster, whole: int) -> list[tuple[Trajectory, float]]:
    """SGD, AdamW and a sparse embedding; a last run with every matrix sent whole."""
    sgd, adamw = {"name": "sgd", "lr": 0.5}, {"name": "adamw", "lr": 0.01}
    found = [trained(cluster, sgd, False), trained(cluster, sgd, True), trained(cluster, adamw, False)]
    parameter_transfer.MIN_ROWS = whole
    return [*found, trained(cluster, sgd, False), trained(cluster, adamw, False)]


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
    one, two = (run_ranks(trained, n + 2, adamw, True, n) for n in (1, 2))
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
