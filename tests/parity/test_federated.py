"""Federated rounds: the oracle's bits on any number of processes, and the equalities of the papers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline import Loss, Task
from paceline.errors import CheckpointError, NumericError
from paceline.federated.cohorts import ClientOrder, CohortMember
from paceline.job.cluster import Cluster
from paceline.parallel.state_hash import find_divergence
from paceline.recipe import Recipe
from paceline.session import Session
from paceline.session.train_rank import train
from paceline.sync.outer_optimizer import AdaptiveServer
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, Trajectory, build_test_session, make_task, run_strategy
from paceline.testing.planted_faults import PLANTED_FAULTS
from paceline.verification import compare_with_oracle
from paceline.verification.verification_report import VerificationReport
from tests.marks import soak_param
from tests.parity.training_runs import each_case
from tests.recipes import recipe_of

SGD = {"name": "sgd", "lr": 0.1}
ADAMW = {"name": "adamw", "lr": 1e-2, "clip_norm": 0.5}
SKEWED = {"clients": 20, "cohort": 5, "partition": "dirichlet:0.5", "batch": 24}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The bits of one thread, in this process as well."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def digits(strategy: str = "sync=federated:1", **settings: Any) -> Recipe:
    defaults: dict[str, Any] = {
        "task": "digits",
        "options": {"model": "mlp", "hidden": [16]},
        "steps": 3,
        "batch": {},
        "optimizer": SGD,
    }
    if "federated" in strategy:
        defaults["federated"] = SKEWED
    return recipe_of(strategy, **(defaults | settings))


def own(strategy: str = "sync=federated:1", clients: int = 2, **settings: Any) -> Recipe:
    """A recipe of a task with clients of its own, all of which take part."""
    federated = {"clients": clients, "cohort": clients, "partition": "natural"} | settings.pop(
        "federated", {}
    )
    return recipe_of(strategy, **({"batch": {}, "optimizer": SGD, "federated": federated} | settings))


def squared_error(model: nn.Module, batch: Any) -> Loss:
    x, y = batch
    return Loss(F.mse_loss(model(x), y, reduction="sum"), len(x))


def half_squared_error(model: nn.Module, batch: Any) -> Loss:
    loss = squared_error(model, batch)
    return Loss(loss.total / 2, loss.count)


def regression(
    sizes: tuple[int, ...], dtype: torch.dtype, *, norm: bool = False, bad: int | None = None
) -> Task:
    """Clients of these sizes with data of their own; that of client `bad` is not finite."""
    generator = torch.Generator().manual_seed(3)

    def draw(n: int, number: int) -> TensorDataset:
        x = torch.randn(n, 4, generator=generator, dtype=torch.float64) + number
        y = x.sum(1, keepdim=True) * (math.nan if number == bad else 1.0)
        return TensorDataset(x.to(dtype), y.to(dtype))

    torch.manual_seed(1)
    layers = [nn.Linear(4, 6), *([nn.BatchNorm1d(6)] if norm else []), nn.Tanh(), nn.Linear(6, 1)]
    sources = {f"site-{number}": draw(n, number) for number, n in enumerate(sizes)}
    return Task(nn.Sequential(*layers).to(dtype), loss=squared_error, clients=sources)


def keep_only(clients: Mapping[str, TensorDataset], kept: tuple[str, ...], *, norm: bool = False) -> Task:
    """A task in which all clients but these have no samples."""
    sources = {n: d if n in kept else TensorDataset(*(x[:0] for x in d.tensors)) for n, d in clients.items()}
    return replace(regression((1,), torch.float64, norm=norm), data=None, clients=sources)


# -- the oracle


CASES: dict[str, dict[str, Any]] = {
    "FedAvg": {},
    "FedYogi with BatchNorm, dropout and a clip": {
        "outer": {"name": "yogi"},
        "optimizer": ADAMW,
        "options": {"model": "convnet", "channels": 4, "dropout": 0.2},
    },
    "FedAvgM, FedProx and clipped updates of a Poisson cohort": {
        "outer": {"momentum": 0.9},
        "federated": {
            "clients": 20,
            "cohort": "poisson:0.3",
            "partition": "labels:2",
            "proximal": 0.1,
            "clip_norm": 0.05,
        },
    },
    "FedAdam of equal clients with local steps": {
        "outer": {"name": "adam", "lr": 0.02},
        "federated": {**SKEWED, "local_steps": 3, "weights": "equal", "batch": 7},
    },
    "FedAdagrad of a schedule": {"outer": {"name": "adagrad"}, "schedule": {"decay": "cosine"}},
}


def verified(cluster: Cluster, settings: dict[str, Any], fault: str = "") -> VerificationReport:
    recipe = digits(**settings)
    components = PLANTED_FAULTS[fault].components(cluster.world_size) if fault else None
    return compare_with_oracle(recipe, make_task(recipe), cluster, CPU, 3, components=components)


@pytest.mark.capability("Q2", "Q3")
@pytest.mark.parametrize(
    ("world", "names"),
    [(3, [*CASES][1:4]), *(soak_param(world, [*CASES]) for world in (2, 3, 5))],
    ids=["3-some", "2-all", "3-all", "5-all"],
)
def test_every_tensor_of_every_round_has_the_bits_of_the_oracle_on_any_number_of_processes(
    world: int, names: list[str]
) -> None:
    cases = [({"reproducible": True, **CASES[name]},) for name in names]
    alone = [verified(Cluster.single(), *case) for case in cases]
    reports = run_ranks(each_case, world, verified, cases, deadline=300)[0]
    for name, one, several in zip(names, alone, reports, strict=True):
        assert one.ok and several.ok and several.steps == 3, (name, one.failure, several.failure)
        assert one.sha256 == several.sha256 is not None, name


@pytest.mark.capability("Q2")
def test_a_run_that_is_not_reproducible_is_compared_within_a_bound() -> None:
    report = verified(Cluster.single(), {"optimizer": ADAMW})
    assert report.ok and report.sha256 is None


@pytest.mark.capability("Q2", "Z2")
@pytest.mark.parametrize("fault", [name for name, planted in PLANTED_FAULTS.items() if planted.of_clients])
def test_planted_faults_of_federated_rounds_are_found_and_named(fault: str) -> None:
    recipe = own(clients=3, steps=2, optimizer=ADAMW, outer={"lr": 0.5})
    for components, ok in ((None, True), (PLANTED_FAULTS[fault].components(1), False)):
        # One client is left out, since the divisor is right if all return an update.
        task = regression((8, 40, 12), torch.float32, bad=2)
        report = compare_with_oracle(recipe, task, Cluster.single(), CPU, 2, components=components)
        assert report.ok == ok, report.failure
        assert ok or report.diagnosis.cause in PLANTED_FAULTS[fault].causes


# -- equalities


def run_own(cluster: Cluster, recipe: Recipe, make: Callable[[], Task], fault: str = "") -> Trajectory:
    components = PLANTED_FAULTS[fault].components(1) if fault else None
    return run_strategy(cluster, recipe, make, components)


@pytest.mark.capability("Q1")
def test_one_full_batch_step_of_all_clients_is_every_step() -> None:
    """Clients of 3 and 200 samples, in float64; the twin counts both of them once."""
    make = partial(regression, (3, 200), torch.float64)
    fed_sgd = own(steps=5, federated={"full": True, "local_steps": 1})
    central = recipe_of("replicas=1", steps=5, batch={"size": 203}, optimizer=SGD)
    alone = run_own(Cluster.single(), central, make)
    assert run_own(Cluster.single(), fed_sgd, make).distance(alone) <= 1e-12
    both = run_ranks(run_own, 2, fed_sgd, make)
    assert all(trajectory.distance(alone) <= 1e-12 for trajectory in both)
    assert run_own(Cluster.single(), fed_sgd, make, "unweighted-clients").distance(alone) > 1e-3


@pytest.mark.capability("Q2")
@pytest.mark.parametrize(("optimizer", "rounds"), [(SGD, 3), (ADAMW, 1)])
def test_one_client_is_plain_training_for_its_passes(optimizer: dict[str, Any], rounds: int) -> None:
    """Bitwise, since the update is a difference in float64; AdamW for one round, as moments are not kept."""
    federated = digits(
        "sync=federated:2",
        steps=rounds,
        optimizer=optimizer,
        federated={"clients": 1, "cohort": 1, "batch": 64},
    )
    steps = rounds * 2 * -(-len(make_task(federated).data) // 64)
    plain = digits("replicas=1", steps=steps, optimizer=optimizer, batch={"size": 64})
    one, other = (run_strategy(Cluster.single(), recipe) for recipe in (federated, plain))
    assert one.parameters.keys() == other.parameters.keys()
    assert one.distance(other) == 0.0


@pytest.mark.capability("Q2")
def test_the_order_of_a_cohort_does_not_matter() -> None:
    make, recipe = partial(regression, (5, 9, 30, 14, 6), torch.float64), own(clients=5, steps=3)
    plain = ClientOrder.cohort

    def reversed_cohort(self: ClientOrder, round_number: int) -> tuple[CohortMember, ...]:
        members = plain(self, round_number)
        return tuple(
            m._replace(client=other.client) for m, other in zip(members, reversed(members), strict=True)
        )

    forwards = run_own(Cluster.single(), recipe, make)
    with patch.object(ClientOrder, "cohort", reversed_cohort):
        backwards = run_own(Cluster.single(), recipe, make)
    assert 0.0 < backwards.distance(forwards) <= 1e-12


@pytest.mark.capability("Q2")
def test_fedavgm_without_momentum_is_fedavg_and_with_it_the_formula() -> None:
    make = partial(regression, (5, 9), torch.float64)

    def weights(**outer: Any) -> list[Tensor]:
        session = build_test_session(Cluster.single(), own(steps=2, outer=outer), make)
        values = [torch.cat([p.detach().flatten() for p in session.runner.sharded_model.computes.values()])]
        for _ in session.rounds():
            values.append(
                torch.cat([p.detach().flatten() for p in session.runner.sharded_model.computes.values()])
            )
        return values

    plain, zero, heavy = weights(), weights(momentum=0.0), weights(momentum=0.5, lr=0.5)
    assert all(torch.equal(a, b) for a, b in zip(plain, zero, strict=True))
    first = plain[1] - plain[0]
    assert torch.allclose(heavy[1], plain[0] + 0.5 * first, atol=1e-14)
    # The second round starts elsewhere, so only what the momentum of the first adds is known.
    alone = build_test_session(Cluster.single(), own(steps=2, outer={"lr": 0.5}), make)
    list(alone.rounds())
    without = torch.cat([p.detach().flatten() for p in alone.runner.sharded_model.computes.values()])
    assert torch.allclose(heavy[2], without + 0.5 * 0.5 * first, atol=1e-14)


@pytest.mark.parametrize("name", ["adagrad", "yogi", "adam"])
def test_adaptive_servers_follow_algorithm_2_on_two_parameters(name: str) -> None:
    p = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    server = AdaptiveServer([p], name, 0.1, (0.9, 0.99), 1e-3)
    w, m, v = [1.0, -2.0], [0.0, 0.0], [1e-6, 1e-6]
    for updates in ([0.5, -0.25], [-0.125, 0.0]):
        p.grad = -torch.tensor(updates, dtype=torch.float64)
        server.step()
        for i, d in enumerate(updates):
            m[i] = d if name == "adagrad" else 0.9 * m[i] + 0.1 * d
            v[i] = {
                "adagrad": v[i] + d * d,
                "yogi": v[i] - 0.01 * d * d * ((v[i] > d * d) - (v[i] < d * d)),
                "adam": 0.99 * v[i] + 0.01 * d * d,
            }[name]
            w[i] += 0.1 * m[i] / (v[i] ** 0.5 + 1e-3)
        assert torch.allclose(p.detach(), torch.tensor(w, dtype=torch.float64), rtol=1e-14)


def test_the_proximal_term_pulls_local_steps_to_the_start_of_the_round() -> None:
    """Gradient descent on (w - 1)^2 / 2 from 0 with mu = 0.5: w = 0.1, then 0.1 + 0.1 (0.9 - 0.05)."""

    def make() -> Task:
        model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(model.weight)
        one = torch.ones(1, 1, dtype=torch.float64)
        return Task(model, loss=half_squared_error, clients={"only": TensorDataset(one, one)})

    recipe = own(clients=1, federated={"local_steps": 2, "proximal": 0.5})
    after = run_own(Cluster.single(), recipe, make).parameters["weight"].item()
    assert after == pytest.approx(0.1 + 0.1 * (0.9 - 0.05), abs=1e-15)


# -- clients that are left out, and buffers


def events_of(session: Session) -> dict[str, list[dict[str, Any]]]:
    events: dict[str, list[dict[str, Any]]] = {}
    for name, record in session.events.take():
        events.setdefault(name, []).append(dict(record))
    return events


@pytest.mark.capability("Q6")
def test_clients_without_samples_or_with_nan_are_left_out_and_named() -> None:
    make = partial(regression, (5, 0, 9, 7), torch.float64, bad=2)
    session = build_test_session(Cluster.single(), own(clients=4), make)
    stats = next(session.rounds())
    (record,) = events_of(session)["cohort"]
    assert record["left_out"] == {
        "site-1": "it has no samples",
        "site-2": "its loss or update is not finite",
    }
    assert record["clients"] == ["site-0", "site-1", "site-2", "site-3"] and record["samples"] == 12
    assert math.isfinite(stats.loss) and stats.num_items == 12
    data = make().clients
    alone = run_own(Cluster.single(), own(clients=4), partial(keep_only, data, ("site-0", "site-3")))
    state = session.runner.sharded_model.model.state_dict()
    assert all(torch.equal(p, alone.parameters[n]) for n, p in state.items())


@pytest.mark.capability("Q6")
def test_a_round_without_any_update_ends_the_run_or_is_skipped() -> None:
    make = partial(regression, (5,), torch.float32, bad=0)
    with pytest.raises(NumericError, match="no client of round 0 returned an update"):
        run_own(Cluster.single(), own(clients=1), make)
    skipping = own(clients=1, steps=2, health={"non_finite": "skip"})
    session = build_test_session(Cluster.single(), skipping, make)
    before = {n: t.clone() for n, t in session.runner.sharded_model.model.state_dict().items()}
    assert [stats.applied for stats in session.rounds()] == [False, False]
    assert [record["step"] for record in events_of(session)["skip"]] == [0, 1]
    assert all(torch.equal(t, before[n]) for n, t in session.runner.sharded_model.model.state_dict().items())


@pytest.mark.capability("Q6")
def test_a_round_whose_cohort_is_empty_changes_nothing() -> None:
    rare = {"clients": 20, "cohort": "poisson:0.02"}
    session = build_test_session(Cluster.single(), digits(steps=8, federated=rare, outer={"name": "adam"}))
    before, seen = session.snapshot().copied().tensors(), set()
    for stats in session.rounds():
        after = session.snapshot().copied().tensors()
        (record,) = events_of(session)["cohort"]
        assert stats.applied == bool(record["clients"])
        is_same = all(torch.equal(t, before[n]) for n, t in after.items() if n in before)
        assert is_same == (not record["clients"]) and session.state.step == record["step"] + 1
        before, seen = after, seen | {stats.applied}
    assert seen == {True, False} and session.state.num_updates < 8


@pytest.mark.capability("Q2")
def test_statistics_move_by_the_weighted_mean_and_the_counter_by_the_longest_client() -> None:
    make = partial(regression, (10, 30), torch.float64, norm=True)
    both = run_own(Cluster.single(), own(), make).parameters
    single = [
        run_own(Cluster.single(), own(), partial(keep_only, make().clients, (kept,), norm=True)).parameters
        for kept in ("site-0", "site-1")
    ]
    for name, value in both.items():
        if name.endswith("num_batches_tracked"):
            assert value.item() == 3 and [s[name].item() for s in single] == [1, 3]
        else:
            mean = 0.25 * single[0][name] + 0.75 * single[1][name]
            assert torch.allclose(value, mean, atol=1e-14), name


# -- runs


@pytest.mark.capability("Q2")
def test_a_run_that_is_resumed_has_the_same_bits(tmp_path: Path) -> None:
    """Moments of the server and the place in the rounds are state; a client has none."""
    recipe = digits(
        steps=6, outer={"name": "adam"}, optimizer=ADAMW, reproducible=True, checkpoint={"every_steps": 3}
    )
    whole = train(recipe.replace(run_dir=str(tmp_path / "whole")))
    train(recipe.replace(run_dir=str(tmp_path / "parts"), steps=3))
    resumed = train(recipe.replace(run_dir=str(tmp_path / "parts")), resume=tmp_path / "parts")
    assert resumed.sha256 == whole.sha256 is not None and resumed.steps == 6
    records = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    cohorts = [record for record in records if record["event"] == "cohort"]
    assert [record["step"] for record in cohorts] == [*range(6)]
    assert all(record["up_bytes"] == record["down_bytes"] > 0 for record in cohorts)
    (partition,) = [record for record in records if record["event"] == "partition"]
    assert partition["clients"] == 20 and sum(map(sum, partition["table"])) == partition["samples"]
    with (
        patch("paceline.federated.cohorts.ClientSamples.sha256", lambda self: "another"),
        pytest.raises(CheckpointError, match="divided among the clients in another way"),
    ):
        train(recipe.replace(run_dir=str(tmp_path / "parts"), steps=8), resume=tmp_path / "parts")


@pytest.mark.capability("Q2")
def test_ranks_hold_equal_state_and_send_one_sum_per_round() -> None:
    def bytes_and_divergence(cluster: Cluster, cohort: int) -> tuple[float, Any]:
        recipe = digits(
            federated={**SKEWED, "cohort": cohort}, steps=2, strategy="sync=federated:1 route=native"
        )
        session = build_test_session(cluster, recipe)
        list(session.rounds())
        calls = session.net.ledger.rows["all_reduce", "data"].calls  # of each round the sum, and the table
        return calls, find_divergence(session.state, session.mesh, session.net)

    (few, none), (many, no_other) = run_ranks(each_case, 2, bytes_and_divergence, [(4,), (16,)])[0]
    assert few == many == 4 and none is no_other is None
