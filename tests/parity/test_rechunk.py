"""A stage may run a micro-batch in parts: the answer is that of one process, and it keeps what was proven."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.job.cluster import Cluster
from paceline.models import KeyedDropout
from paceline.parallel.pipeline import forward_backward, rechunk
from paceline.pipeline_schedule import ScheduleTable, one_f_one_b, simulate_schedule, write_schedule_csv
from paceline.recipe import Recipe, Strategy
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import Trajectory, build_test_session, whole_trajectory
from paceline.verification import VerificationReport, compare_with_oracle
from paceline.verification.verification_report import conclusion_lines
from tests.marks import soak_param
from tests.parity.test_pipeline_schedules import deep
from tests.parity.test_strategy_combinations import verify

SMALLER = "replicas=1 pipeline=3 schedule=1f1b rechunk=1,2,4"
FEW_SAMPLES: dict[str, Any] = {"batch": {"size": 7, "shards": 4}}  # some have one sample, and parts have none
THREE: list[tuple[str, dict[str, Any]]] = [
    (SMALLER, {}),
    (SMALLER, FEW_SAMPLES),
    ("replicas=1 pipeline=3 rechunk=4,1,2", FEW_SAMPLES),
    ("replicas=1 pipeline=3 schedule=zero-bubble rechunk=1,2,4", FEW_SAMPLES),
    (SMALLER, {"memory": {"recompute": "blocks"}}),
]
FOUR = [
    "replicas=2 pipeline=2 schedule=1f1b rechunk=1,4",
    "replicas=1 shard=2 zero=2 pipeline=2 schedule=1f1b rechunk=2,1",
    "replicas=1 shard=2 zero=3 pipeline=2 rechunk=1,2",
    "replicas=1 tensor=2 pipeline=2 schedule=1f1b rechunk=1,3",
    "replicas=1 pipeline=4 schedule=1f1b rechunk=1,2,1,4",
]


def reports(cluster: Cluster, cases: Sequence[tuple[str, dict[str, Any]]]) -> list[VerificationReport]:
    return [verify(cluster, deep(text, **changes)) for text, changes in cases]


def require_ok(cases: Sequence[tuple[str, dict[str, Any]]], ranks: int) -> None:
    for found in run_ranks(reports, ranks, cases, deadline=600):
        for case, report in zip(cases, found, strict=True):
            assert report.ok, (case, report.failure, report.diagnosis)


@pytest.mark.capability("D9", "Z1", "Z2")
@pytest.mark.parametrize("cases", [THREE[3:], soak_param(THREE[:3])], ids=["some", "the others"])
def test_every_step_in_parts_is_that_of_the_oracle(cases: list[tuple[str, dict[str, Any]]]) -> None:
    require_ok(cases, 3)


@pytest.mark.soak
@pytest.mark.capability("D9", "Z1", "Z2")
def test_under_every_product_too(tmp_path: Path) -> None:
    by_position = {"tensor": {"blocks.*": "sequence"}}
    require_ok([*((text, {}) for text in FOUR), (FOUR[3], by_position)], 4)
    rows = halved(one_f_one_b(2, 5, (1, 2)))
    write_schedule_csv(simulate_schedule(rows, 5), tmp_path / "own.csv")
    require_ok([(f"replicas=1 pipeline=2 schedule={tmp_path / 'own.csv'}", {})], 2)


def halved(table: ScheduleTable) -> ScheduleTable:
    """The last stage makes gradients of weights after those of what came in."""
    *others, last = table.orders
    return ScheduleTable(
        [*others, [b for a in last for b in ([a, a._replace(kind="W")] if a.kind == "B" else [a])]]
    )


def three_steps(cluster: Cluster, recipe: Recipe) -> tuple[Trajectory, int]:
    """What was trained, and the most parts that this rank kept at a time."""
    session = build_test_session(cluster, recipe)
    losses = [stats.loss for stats in session.rounds()]
    return whole_trajectory(losses, session), getattr(session.runner, "peak_in_flight", 0)


@pytest.mark.capability("D9")
def test_gradients_are_those_of_whole_micro_batches_and_a_stage_keeps_what_was_proven() -> None:
    """Plain gradient descent, so that a gradient is what a parameter has moved by; the steps are large."""
    more: dict[str, Any] = {"steps": 3, "optimizer": {"name": "sgd", "lr": 0.5}}
    ((right, _),) = run_ranks(three_steps, 1, deep("replicas=1", **more))
    proof = simulate_schedule(one_f_one_b(3, 5, (1, 2, 4)), 5)
    assert list(proof.in_flight) == [3, 1, 0.25]
    for stage, (found, peak) in enumerate(run_ranks(three_steps, 3, deep(SMALLER, **more))):
        assert found.distance(right) <= 1e-6
        assert found.losses == pytest.approx(right.losses, rel=1e-6)
        assert peak == proof.in_flight[stage] * (1, 2, 4)[stage]


OWN = rechunk.slice_batch


def backwards(column: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Parts are joined in the wrong order."""
    return torch.cat(list(reversed(column)))


def first_samples(batch: Any, samples: range, num_samples: int) -> Any:
    """The last stage holds every part against the labels of the first."""
    return OWN(batch, range(len(samples)), num_samples)


def own_mask(self: KeyedDropout, own: range, num_samples: int) -> None:
    """A part draws a mask of its own."""


TWINS: dict[str, tuple[Any, str, Any, str]] = {
    "joined backwards": (rechunk, "_joined", backwards, "2,1"),
    "labels of another part": (forward_backward, "slice_batch", first_samples, "1,2"),
    "a mask for each part": (KeyedDropout, "take_samples", own_mask, "1,2"),
}


@pytest.mark.capability("D9", "Z2")
@pytest.mark.parametrize("twin", TWINS)
def test_a_mistake_in_the_parts_is_found(twin: str) -> None:
    """The mutation twins; samples of a part are exchanged with others of the same number."""
    owner, name, broken, numbers = TWINS[twin]

    def found(cluster: Cluster) -> VerificationReport:
        setattr(owner, name, broken)
        even = {"batch": {"size": 16, "shards": 4}}
        return verify(cluster, deep(f"replicas=1 pipeline=2 rechunk={numbers}", **even))

    for report in run_ranks(found, 2):
        assert not report.ok


def normed() -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    return Task(model, torch.rand(64, 4), lambda model, x: Loss(model(x).square().sum(), len(x)))


def running_means(cluster: Cluster) -> list[list[float]]:
    """Of the first stage, where the last one runs whole micro-batches, and parts of them."""
    found = []
    for words in ("", " rechunk=1,2"):
        strategy = Strategy.parse(f"replicas=1 pipeline=2 stages=2,3 schedule=1f1b{words}")
        sgd: Any = {"optimizer": {"name": "sgd", "lr": 0.01}, "batch": {"size": 16, "shards": 4}}
        recipe = Recipe(task="sum", steps=3, strategy=strategy, **sgd)
        session = build_test_session(cluster, recipe, normed)
        list(session.rounds())
        means = [x for name, x in whole_trajectory([], session).parameters.items() if "running_mean" in name]
        found.append(means[0].tolist())
        session.close()
    return found


@pytest.mark.capability("D9")
def test_statistics_of_another_stage_move_as_by_whole_micro_batches() -> None:
    """Parts that counted as micro-batches would let them move half as far."""
    for plain, parted in run_ranks(running_means, 2):
        assert max(map(abs, plain)) > 0.01 and parted == pytest.approx(plain, rel=1e-5, abs=1e-7)


class Both(nn.Module):
    """Sends two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


class Overwrites(nn.Module):
    """Keeps what it makes of one tensor for backward, then writes to the other, and to the first."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        kept = x.clone().square()
        y.mul_(kept).relu_()
        return y + x.sigmoid_()


class Overwritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.over, self.last = Both(), Overwrites(), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.over(*self.both(x)))


def overwritten() -> Task:
    torch.manual_seed(0)
    return Task(
        Overwritten(),
        torch.rand(64, 4),
        lambda model, x: Loss(model(x).square().sum(), len(x)),
        stages=lambda m: [m.both, m.over, m.last],
    )


@pytest.mark.capability("D1", "D9")
def test_a_stage_may_write_to_all_that_came_in_one_message_whole_or_in_parts() -> None:
    """Parts of a tensor lie in one memory: what one of them writes must not disturb another's backward."""

    def run(cluster: Cluster) -> list[VerificationReport]:
        found = []
        for words in ("", " rechunk=1,2", " rechunk=2,1"):
            strategy = Strategy.parse(f"replicas=1 pipeline=2 stages=1,2 schedule=1f1b{words}")
            recipe = Recipe(task="sum", steps=2, strategy=strategy, batch={"size": 16, "shards": 4})
            found.append(compare_with_oracle(recipe, overwritten(), cluster, torch.device("cpu"), 2))
        return found

    for report in run_ranks(run, 2)[0]:
        assert report.ok, (report.failure, report.diagnosis)


class Attention(nn.Module):
    """Attention with a key of its own, whose bias moves all scores alike: its gradient is zero."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (2, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + mixed.transpose(1, 2).flatten(2)


def small_gpt() -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(17, 16), Attention(), nn.LayerNorm(16), Attention(), nn.Linear(16, 17))

    def loss(model: nn.Module, tokens: Tensor) -> Loss:
        logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
        total = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return Loss(total, targets.numel())

    return Task(model, torch.randint(17, (64, 9), generator=torch.Generator().manual_seed(1)), loss)


@pytest.mark.capability("D9", "Z2")
def test_a_gradient_that_is_zero_up_to_rounding_is_no_false_alarm() -> None:
    """Parts of a micro-batch round the bias of keys otherwise than the whole."""

    def verify_parts(cluster: Cluster) -> VerificationReport:
        strategy = Strategy.parse("replicas=1 pipeline=2 rechunk=1,2 schedule=1f1b")
        recipe = Recipe(task="sum", steps=3, strategy=strategy, batch={"size": 16, "shards": 4})
        return compare_with_oracle(recipe, small_gpt(), cluster, torch.device("cpu"), 3)

    for report in run_ranks(verify_parts, 2):
        assert report.ok, conclusion_lines(report)
