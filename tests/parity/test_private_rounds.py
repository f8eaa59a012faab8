"""Noise in federated rounds: where it is added, what divides, who is clipped, and what a run says of it."""

from __future__ import annotations

import base64
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline import Loss, Task
from paceline.errors import RecipeError, TaskError
from paceline.federated.network_rounds import NetworkWork
from paceline.federated.rounds import FederatedRounds
from paceline.job.cluster import Cluster
from paceline.parallel.session_context import Components
from paceline.privacy.accountant import NoisyRelease, compute_epsilon
from paceline.privacy.entropy import KNOWN_ENTROPY, Entropy
from paceline.privacy.noise import PrivateDraws
from paceline.privacy.privacy_ledger import LEDGER, read_releases
from paceline.privacy.private_sum import PrivateSum
from paceline.recipe import Recipe
from paceline.report.run_reader import read_run
from paceline.report.summary_sentences import summarize_run
from paceline.session.train_rank import train
from paceline.state.slot import TensorSlot
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from tests.recipes import recipe_of

pytest.importorskip("dp_accounting", reason="needs paceline[private]")
CLIP, NUM_CLIENTS, NUM_VALUES = 0.5, 8, 2000


def pulling_task(num_values: int = 1) -> Task:
    """Every client pulls every weight up by far more than the clip norm, each from a sample of its own."""
    model = nn.Linear(num_values, 1, bias=False)
    nn.init.zeros_(model.weight)

    def loss(model: nn.Module, batch: list[Tensor]) -> Loss:
        return Loss((model(batch[0]) - batch[1]).sum() * 100.0, len(batch[0]))

    data = TensorDataset(-torch.ones(NUM_CLIENTS, num_values), torch.ones(NUM_CLIENTS, 1))
    return Task(model, data, loss)


def recipe(cohort: int | str = "poisson:0.5", **tables: Any) -> Recipe:
    tables = {
        "steps": 6,
        "batch": {},
        "optimizer": {"name": "sgd", "lr": 1.0},
        "debug": {"entropy_seed": 3},
        **tables,
    }
    federated = {"clients": NUM_CLIENTS, "cohort": cohort, "weights": "equal", **tables.pop("federated", {})}
    private = {"noise": 1e-6, "clip_norm": CLIP, **tables.pop("private", {})}
    return recipe_of("sync=federated:1", federated=federated, private=private, **tables)


def clients_in_moves(components: Components | None = None, **tables: Any) -> tuple[list[float], list[int]]:
    """Return how many clip norms each round has moved the weight by, times 4, and the sizes of cohorts."""
    session = build_test_session(Cluster.single(), recipe(**tables), pulling_task, components)
    weight, before = cast(Tensor, session.runner.sharded_model.model.weight), 0.0
    moves, sizes = list[float](), list[int]()
    for stats in session.rounds():
        sizes.append(len(cast(Any, session.work).order.cohort(stats.step)))
        moves.append((weight.item() - before) / CLIP * 4.0)
        before = weight.item()
    return moves, sizes


class DividesByPresent(FederatedRounds):
    def divisor(self, table: Any) -> float:
        return math.fsum(table.returned()[:, 1].tolist())


class ClipsTheSum(FederatedRounds):
    def _add_update(self, *args: Any, **options: Any) -> float | None:
        private, self._private = self._private, None
        try:
            return super()._add_update(*args, **options)
        finally:
            self._private = private

    def add_noise(
        self, private: PrivateSum, sums: Mapping[TensorSlot, Tensor | None], step: int
    ) -> Mapping[TensorSlot, Tensor | None]:
        limit = private.clip_norm
        clipped = {slot: None if t is None else t.clamp(-limit, limit) for slot, t in sums.items()}
        return super().add_noise(private, clipped, step)


class EveryRankAddsNoise(FederatedRounds):
    def add_noise(
        self, private: PrivateSum, sums: Mapping[TensorSlot, Tensor | None], step: int
    ) -> Mapping[TensorSlot, Tensor | None]:
        for _ in range(2):
            sums = super().add_noise(private, sums, step)
        return sums


def test_each_client_is_clipped_and_the_expected_cohort_divides() -> None:
    moves, sizes = clients_in_moves()
    assert moves == pytest.approx(sizes, abs=1e-3) and len({*sizes}) > 1
    for twin in (DividesByPresent, ClipsTheSum):
        wrong, sizes = clients_in_moves(Components(federated=twin))
        assert wrong != pytest.approx(sizes, abs=1e-3), twin


def test_a_client_that_fails_is_accounted_as_if_it_had_taken_part() -> None:
    class LosesOne(FederatedRounds):
        def _add_update(self, member: Any, *args: Any, **options: Any) -> float | None:
            self._is_finite = member.client != 2
            return super()._add_update(member, *args, **options)

    tables: dict[str, Any] = {"cohort": NUM_CLIENTS, "steps": 1}
    assert clients_in_moves(Components(federated=LosesOne), **tables)[0] == pytest.approx([3.5], abs=1e-3)


def noise_of_a_round(cluster: Cluster, twin: type[FederatedRounds] | None = None) -> Tensor:
    """Return 2,000 weights after a round in which no client moves any, in units of the claimed deviation."""
    private, optimizer = {"noise": 2.0}, {"name": "sgd", "lr": 1e-30}
    settings = recipe(steps=1, private=private, optimizer=optimizer, debug={})
    session = build_test_session(
        cluster, settings, lambda: pulling_task(NUM_VALUES), Components(federated=twin)
    )
    list(session.rounds())
    return cast(Tensor, session.runner.sharded_model.model.weight).detach().flatten() / (2.0 * CLIP / 4.0)


def test_noise_is_added_once_on_two_ranks_with_the_claimed_variance_and_differs_from_run_to_run() -> None:
    interval = 3.29 * math.sqrt(2.0 / NUM_VALUES) + 0.02  # of 99.9 %, for a draw that no seed repeats
    first, second = run_ranks(noise_of_a_round, 2)
    assert torch.equal(first, second)
    assert abs(float(first.var(correction=0)) - 1.0) < interval and abs(float(first.mean())) < 0.1
    again = noise_of_a_round(Cluster.single())
    assert abs(float(again.var(correction=0)) - 1.0) < interval
    assert abs(float((first * again).mean())) < 0.1
    twice = noise_of_a_round(Cluster.single(), EveryRankAddsNoise)
    assert abs(float(twice.var(correction=0)) - 2.0) < 2 * interval


@pytest.mark.capability("R3")
def test_noise_in_the_ring_is_that_of_the_plain_sum_with_masks_and_without() -> None:
    def weights(secure: str) -> Tensor:
        federated = {} if secure == "none" else {"secure": secure}
        settings = recipe(5, steps=2, private={"noise": 1.0}, federated=federated)
        session = build_test_session(Cluster.single(), settings, lambda: pulling_task(50))
        list(session.rounds())
        return cast(Tensor, session.runner.sharded_model.model.weight).detach().clone()

    plain, ring, masks = map(weights, ("none", "ring", "masks"))
    assert torch.equal(ring, masks)
    torch.testing.assert_close(ring, plain, atol=1e-6, rtol=0)


def test_a_run_stops_before_the_round_that_would_exceed_its_budget(tmp_path: Path) -> None:
    private = {"noise": 4.0, "budget": 3.0}
    run = tmp_path / "run"
    settings = recipe(2, steps=50, private=private, run_dir=str(run), debug={}, checkpoint={"every_steps": 2})
    result = train(settings, pulling_task)
    release = NoisyRelease(4.0, "fixed", size=2, num_units=NUM_CLIENTS)
    assert 1 < result.steps < 50 and not result.stopped
    assert result.reason.startswith("the privacy budget is spent")
    epsilon = compute_epsilon({release: result.steps}, 1e-5)
    assert epsilon <= 3.0 < compute_epsilon({release: result.steps + 1}, 1e-5)
    assert result.privacy["epsilon"] == pytest.approx(epsilon, abs=1e-9)
    assert result.privacy["unit"] == "client" and result.privacy["relation"] == "replace one client"
    assert result.privacy["events"] == [
        {"noise": 4.0, "sampling": "fixed", "size": 2, "num_units": NUM_CLIENTS, "count": result.steps}
    ]
    recorded = read_run(run)
    text = " ".join(summarize_run(recorded))
    assert recorded.status == "finished" and "It ended early: the privacy budget is spent" in text
    assert "neighbours" in text.lower() and "without replacement" in text and "dp-accounting" in text
    # Who took part is in no record, since epsilon counts on nobody knowing it.
    assert not recorded.of("cohort")
    resumed = train(settings.replace(steps=60), pulling_task, resume=run)
    assert resumed.steps == result.steps and resumed.reason == result.reason


def test_a_resumed_run_draws_other_noise_and_lists_all_releases_in_no_file_but_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets, plain_bytes = list[bytes](), Entropy.bytes

    def recorded_bytes(self: Entropy, num_bytes: int) -> bytes:
        secrets.append(plain_bytes(self, num_bytes))
        return secrets[-1]

    monkeypatch.setattr(Entropy, "bytes", recorded_bytes)
    first = tmp_path / "first"
    settings = recipe(
        2, steps=2, private={"noise": 4.0}, debug={}, run_dir=str(first), checkpoint={"every_steps": 1}
    )
    train(settings, pulling_task)
    with (first / LEDGER).open("a") as file:  # as a run that was killed in the round after its checkpoint
        file.write(
            json.dumps({"step": 2, "noise": 4.0, "sampling": "fixed", "size": 2, "num_units": 8}) + "\n"
        )
    killed = read_run(first)
    assert killed.epsilon is not None and killed.epsilon["events"][0]["count"] == 3
    weights = []
    for name in ("one", "two"):
        shutil.copytree(first, tmp_path / name)
        result = train(settings.replace(steps=3, run_dir=None), pulling_task, resume=tmp_path / name)
        assert sum(event["count"] for event in result.privacy["events"]) == 4
        assert [*read_releases(tmp_path / name / LEDGER).values()] == [4]
        assert result.model is not None
        weights.append(float(cast(Tensor, result.model.weight)))
    assert weights[0] != weights[1]
    assert len({*secrets}) == len(secrets) == 3
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    for secret in secrets:
        for form in (secret, secret.hex().encode(), base64.b64encode(secret)[:40]):
            assert not any(form in content for content in files)


@pytest.mark.capability("R3")
def test_a_run_whose_entropy_follows_from_a_seed_says_that_it_has_no_privacy(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = recipe(2, steps=1, private={"noise": 4.0}, run_dir=str(run))
    result = train(settings, pulling_task)
    assert result.privacy["warning"] == KNOWN_ENTROPY == "no privacy: the noise is known"
    assert any(KNOWN_ENTROPY in sentence for sentence in summarize_run(read_run(run)))
    again = train(settings.replace(steps=2, run_dir=None, debug={}), pulling_task, resume=run)
    assert again.privacy["warning"] == KNOWN_ENTROPY


def test_clients_of_a_network_that_are_gone_are_drawn_as_if_they_were_there() -> None:
    def draw(cohort: Any, gone: Sequence[str]) -> list[list[int]]:
        settings = recipe(cohort).federated
        work = NetworkWork(settings, cast(Any, None), 1, 1.0, draws=PrivateDraws(bytes(32)))
        work.roster.add([f"c{i}" for i in range(6)])
        work.gone |= {*gone}
        return [[member.client for member in work.draw(step)] for step in range(20)]

    assert draw("poisson:0.5", ["c1"]) == draw("poisson:0.5", []) and any(
        1 in d for d in draw("poisson:0.5", ["c1"])
    )
    assert not any(1 in members for members in draw(3, ["c1"]))


def norm_task(layer: Callable[[], nn.Module]) -> Task:
    model = nn.Sequential(nn.Linear(2, 4), layer(), nn.Linear(4, 1))

    def loss(model: nn.Module, batch: list[Tensor]) -> Loss:
        return Loss(model(batch[0]).square().sum(), len(batch[0]))

    return Task(model, TensorDataset(torch.randn(16, 2)), loss)


class CountsCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x


def test_what_would_be_released_without_noise_is_refused() -> None:
    settings = recipe(2, steps=1)
    with pytest.raises(TaskError, match="BatchNorm1d, whose statistics mix samples"):
        build_test_session(Cluster.single(), settings, lambda: norm_task(lambda: nn.BatchNorm1d(4)))
    session = build_test_session(Cluster.single(), settings, lambda: norm_task(CountsCalls))
    with pytest.raises(TaskError, match="changes a buffer"):
        list(session.rounds())
    with pytest.raises(RecipeError, match=r'expected federated\.weights = "equal"'):
        recipe(2, federated={"weights": "samples"})
