"""What is kept of clients: SCAFFOLD as in the paper, equal bits on any number of processes, and resumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline import Loss, Task
from paceline.errors import StrategyError
from paceline.federated.client_keeper import KeeperChange, KeptVectors, LocalTraining
from paceline.federated.cohorts import build_order_of_clients
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.session import evaluate
from paceline.session.train_rank import train
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session, run_strategy
from paceline.verification import compare_with_oracle
from tests.parity.training_runs import each_case
from tests.recipes import recipe_of

Tensors = Mapping[str, Tensor]
SIZES, RATE = (8, 21, 13, 30, 9), 0.05


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The bits of one thread, in this process as well."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Scaffold:
    """SCAFFOLD (Karimireddy et al. 2020, arXiv:1910.06378, Algorithm 1, option II)."""

    def kept(self, parameters: Tensors) -> Tensors:
        return {name: torch.zeros_like(p) for name, p in parameters.items()}

    shared = kept

    def correction(self, kept: Tensors, shared: Tensors) -> Tensors:
        return {name: shared[name] - kept[name] for name in kept}

    def after(self, training: LocalTraining) -> KeeperChange:
        span = training.num_steps * training.lr
        new = {
            name: training.kept[name] - training.shared[name] - training.update[name] / span
            for name in training.kept
        }
        moved = {name: (new[name] - training.kept[name]) / training.num_clients for name in new}
        return KeeperChange(new, moved)


def squared_error(model: nn.Module, batch: Any) -> Loss:
    x, y = batch
    return Loss(F.mse_loss(model(x), y, reduction="sum"), len(x))


def task(keeper: Any = None) -> Task:
    generator = torch.Generator().manual_seed(3)
    sources = {}
    for number, n in enumerate(SIZES):
        x = torch.randn(n, 4, generator=generator, dtype=torch.float64) + number
        sources[f"site-{number}"] = TensorDataset(x, x.sum(1, keepdim=True) * number)
    torch.manual_seed(1)
    return Task(nn.Linear(4, 1).to(torch.float64), loss=squared_error, clients=sources, keeper=keeper)


def recipe(steps: int = 9, **settings: Any) -> Recipe:
    table = {"clients": 5, "cohort": 3, "partition": "natural", "weights": "equal"}
    table |= settings.pop("federated", {})
    return recipe_of(
        "sync=federated:1",
        steps=steps,
        batch={},
        optimizer={"name": "sgd", "lr": RATE},
        federated=table,
        **settings,
    )


def plain_scaffold(steps: int) -> tuple[dict[str, Tensor], list[dict[str, Tensor]], dict[str, Tensor]]:
    """Algorithm 1 as a loop: the weights, the variates of the clients, and that of the server."""
    own = task()
    order, model = build_order_of_clients(recipe(), own), own.model
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    variates = [{n: torch.zeros_like(w) for n, w in weights.items()} for _ in SIZES]
    server = {n: torch.zeros_like(w) for n, w in weights.items()}
    for number in range(steps):
        members = order.cohort(number)
        moves, changes = [], []
        for member in members:
            local, c = {n: w.clone() for n, w in weights.items()}, variates[member.client]
            batches = order.micro_batches(number, member)
            for batch in batches:
                x, y = (
                    torch.stack(column)
                    for column in zip(*(own.data[int(i)] for i in batch.indices), strict=True)
                )
                leaves = {n: w.detach().requires_grad_() for n, w in local.items()}
                error = F.mse_loss(F.linear(x, leaves["weight"], leaves["bias"]), y)
                grads = torch.autograd.grad(error, [*leaves.values()])
                local = {
                    n: w.detach() - RATE * (g - c[n] + server[n])
                    for (n, w), g in zip(leaves.items(), grads, strict=True)
                }
            new = {n: c[n] - server[n] + (weights[n] - local[n]) / (len(batches) * RATE) for n in c}
            moves.append({n: local[n] - weights[n] for n in weights})
            changes.append((member.client, new, {n: new[n] - c[n] for n in c}))
        weights = {n: w + sum(m[n] for m in moves) / len(moves) for n, w in weights.items()}
        for client, new, change in changes:
            variates[client] = new
            server = {n: s + change[n] / len(SIZES) for n, s in server.items()}
    return weights, variates, server


def forget(self: KeptVectors, cohort: Any, vectors: Any) -> None:
    """Keep nothing."""


@pytest.mark.capability("Q2")
def test_scaffold_as_a_keeper_follows_algorithm_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twins: without a keeper, and with one whose store forgets."""
    weights, variates, server = plain_scaffold(9)
    session = build_test_session(Cluster.single(), recipe(), partial(task, Scaffold()))
    list(session.rounds())
    tensors = session.state.tensors()
    for name, expected in weights.items():
        assert torch.allclose(tensors[f"model/{name}"], expected, atol=1e-12), name
    packed = [torch.cat([v[n].flatten() for n in sorted(v)]) for v in variates]
    for number, expected in enumerate(packed):
        assert torch.allclose(tensors[f"kept/client/site-{number}"], expected, atol=1e-9)
    flat = torch.cat([server[n].flatten() for n in sorted(server)])
    assert torch.allclose(tensors["kept/shared"], flat, atol=1e-9)
    plain = run_strategy(Cluster.single(), recipe(), task).parameters
    monkeypatch.setattr(KeptVectors, "keep", forget)
    forgetful = run_strategy(Cluster.single(), recipe(), partial(task, Scaffold())).parameters
    assert all(
        float((wrong["weight"] - weights["weight"]).abs().max()) > 1e-3 for wrong in (plain, forgetful)
    )


def state_of(cluster: Cluster) -> tuple[dict[str, Tensor], int]:
    session = build_test_session(cluster, recipe(), partial(task, Scaffold()))
    list(session.rounds())
    held = session.state.extra_states["kept"]
    assert isinstance(held, KeptVectors)
    return dict(session.snapshot().copied().tensors()), held.num_held


@pytest.mark.capability("Q2", "Z19")
def test_what_is_kept_has_equal_bits_on_any_number_of_processes_and_lies_on_one_of_them(
    tmp_path: Path,
) -> None:
    alone, num_held = state_of(Cluster.single())
    assert num_held == len(SIZES)
    ranks = [results[0] for results in run_ranks(each_case, 2, state_of, [()])]
    assert sum(held for _, held in ranks) == num_held and all(held for _, held in ranks)
    for state, _ in ranks:
        assert state.keys() == alone.keys() and all(torch.equal(state[n], t) for n, t in alone.items())
    saving = {"checkpoint": {"every_steps": 3}, "run_dir": str(tmp_path)}
    train(recipe(steps=3, **saving), task(Scaffold()))
    resumed = train(recipe(**saving), task(Scaffold()), resume=tmp_path)
    assert resumed.model is not None
    assert torch.equal(resumed.model.weight, alone["model/weight"])


def test_a_keeper_is_refused_where_it_would_have_no_effect() -> None:
    batched = recipe(federated={"vectorize": 2})
    with pytest.raises(StrategyError, match="has no correction by client"):
        build_test_session(Cluster.single(), batched, partial(task, Scaffold()))
    with pytest.raises(StrategyError, match="does not know what a task keeps"):
        compare_with_oracle(recipe(), task(Scaffold()), Cluster.single(), CPU, 1)


def clients_evaluation(cluster: Cluster) -> Any:
    settings = {"federated": {"held_out": 0.25, "vectorize": 2}}
    session = build_test_session(cluster, recipe(steps=2, **settings), task)
    list(session.rounds())
    work: Any = session.feed.work
    rows = [(session.task.data, indices) for indices in work.order.clients.held_out]
    losses = []
    for data, indices in rows:
        x, y = (torch.stack(column) for column in zip(*(data[int(i)] for i in indices), strict=True))
        losses.append(F.mse_loss(session.runner.sharded_model.model(x), y).item())
    trained = [set(indices) for indices in work.order.clients.indices]
    assert all(not own & set(kept) for own, (_, kept) in zip(trained, rows, strict=True))
    assert [len(kept) for _, kept in rows] == [2, 5, 3, 8, 2]
    return evaluate(session), losses


@pytest.mark.capability("Q7")
def test_clients_are_evaluated_on_what_they_keep_from_training_each_counting_once() -> None:
    """Mean and worst decile: of five clients the one with the highest loss; equal on two processes."""
    alone, losses = clients_evaluation(Cluster.single())
    assert alone.loss == pytest.approx(sum(losses) / 5) and alone.num_samples == 20
    assert alone.metrics["clients.loss_worst_decile"] == pytest.approx(max(losses))
    for results in run_ranks(each_case, 2, clients_evaluation, [()]):
        assert results[0][0].metrics == alone.metrics
