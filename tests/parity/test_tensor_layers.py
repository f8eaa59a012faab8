"""Layers cut over tensor ranks: wrong plans are refused, columns gathered, repeated work counts once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import Loss, Task
from paceline.errors import StrategyError, TaskError
from paceline.job.cluster import Cluster
from paceline.models import GPT, GPT_TENSOR_PLAN, GPTConfig
from paceline.parallel import session_context
from paceline.parallel.placement import TensorPlacement, TensorTransform, even_span
from paceline.parallel.tensor import TensorPlanEntry, mappings, plan_tensor_cuts, resolve_tensor_plan
from paceline.recipe import Recipe, Strategy
from paceline.session import build
from paceline.session.partition_check import modules_to_compare
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session
from paceline.verification import compare_with_oracle
from tests.marks import soak_param


class Between(nn.Module):
    """Two linear layers, with something between them."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.between = between
        self.up = nn.Linear(6, 16 if between == "halves" else 8)
        self.down = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(BETWEEN[self.between](self.up(x)))


def halves(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, -1)
    return gate.sigmoid() * value


BETWEEN = {
    "each": torch.tanh,
    "halves": halves,
    "norm": lambda x: F.normalize(x, dim=-1),
    "softmax": lambda x: x.softmax(-1),
}
WRONG = [name for name in BETWEEN if name != "each"]


def task_of(between: str) -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Between(between), nn.Tanh(), nn.Linear(3, 3))
    samples = [(torch.randn(6), torch.randint(3, ())) for _ in range(24)]
    return Task(model, samples, loss, tensor={"1.up": "column", "1.down": "row"})


def loss(model: nn.Module, batch: Any) -> Loss:
    x, y = batch
    return Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))


def trained(cluster: Cluster, between: str, strategy: str) -> list[float] | str:
    """The losses of three steps, or what was said."""
    recipe = Recipe(
        task="own",
        steps=3,
        batch={"size": 8, "shards": 4, "shuffle": False},
        optimizer={"name": "sgd", "lr": 0.5},
        strategy=Strategy.parse(strategy),
    )
    try:
        session = build_test_session(cluster, recipe, lambda: task_of(between))
    except TaskError as error:
        return str(error)
    found = [stats.loss for stats in session.rounds()]
    session.close()
    return found


def all_of_them(cluster: Cluster, strategy: str) -> dict[str, list[float] | str]:
    return {between: trained(cluster, between, strategy) for between in BETWEEN}


@pytest.mark.capability("C4")
@pytest.mark.parametrize("strategy", ["replicas=1 tensor=2", "replicas=1 tensor=2 pipeline=2"])
def test_what_mixes_features_between_a_column_and_its_row_is_refused(strategy: str) -> None:
    num_ranks = 4 if "pipeline" in strategy else 2
    for found in run_ranks(all_of_them, num_ranks, strategy):
        for between in WRONG:
            text = str(found[between])
            assert "partitioned by its tensor plan, '1' computes other values than whole" in text
        assert len(found["each"]) == 3


@pytest.mark.capability("C4")
def test_what_is_refused_would_train_something_else() -> None:
    def unchecked(cluster: Cluster) -> dict[str, list[float] | str]:
        with patch.object(build, "check_tensor_plan", lambda *_: None):
            return all_of_them(cluster, "replicas=1 tensor=2")

    right, found = all_of_them(Cluster.single(), "replicas=1"), run_ranks(unchecked, 2)[0]
    assert found["each"] == pytest.approx(right["each"], rel=1e-6)
    for between in WRONG:
        assert found[between] != pytest.approx(right[between], rel=1e-4)


@pytest.mark.parametrize(
    "entries, parts",
    [
        (["h.0.up column", "h.0.down row", "h.1.up column", "h.1.down row"], ["h.0", "h.1"]),
        (["b.0.attn heads", "b.0.mid.dense column", "b.0.out.dense row"], ["b.0.attn", "b.0"]),
        (["gate column", "up column", "down row"], [""]),
        (["m.gate column", "m.up column", "m.drop split", "m.down row"], ["m"]),
    ],
)
def test_parts_are_where_results_are_whole_again(entries: list[str], parts: list[str]) -> None:
    found = modules_to_compare(
        [TensorPlanEntry(name, nn.Identity(), word) for name, word in map(str.split, entries)]
    )
    assert found == parts


RANKS = 3
WIDTHS = (6, 11, 10, 4)
"""Neither 11 nor 10 nor 4 outputs divide by three ranks."""


def loss_of(model: nn.Module, x: Tensor) -> Loss:
    y = model(x)
    return Loss(F.mse_loss(y, x[..., :4].roll(1, -1), reduction="sum"), len(x))


def build_gathered() -> Task:
    """Samples of five rows: what goes into a layer has three dimensions."""
    torch.manual_seed(0)
    first, second, third = (nn.Linear(a, b, bias=b != 10) for a, b in pairwise(WIDTHS))
    model = nn.Sequential(first, nn.LayerNorm(11), nn.Tanh(), second, nn.Softmax(-1), third)
    data = list(torch.randn(40, 5, 6, generator=torch.Generator().manual_seed(1)))
    return Task(model, data, loss_of, tensor={"0": "gathered", "3": "gathered", "5": "gathered"})


def recipe(*, checks: bool = True) -> Recipe:
    return Recipe(
        task="own",
        steps=4,
        batch={"size": 9, "shards": 3},
        optimizer={"name": "adamw", "lr": 1e-2, "clip_norm": 0.1},
        precision={"compute": "fp32"},
        strategy=Strategy.parse(f"replicas=1 tensor={RANKS}"),
        debug={"check": checks},
    )


def bytes_of_weights(cluster: Cluster) -> int:
    """What this rank holds of the layers."""
    held = build_test_session(cluster, recipe(), build_gathered).runner.sharded_model.computes
    return sum(p.nbytes for slot, p in held.items() if not slot.name.startswith("1."))


def not_summed(x: Tensor, collective: object, key: str) -> Tensor:
    return x.detach().clone()


@pytest.mark.capability("C3", "Z2")
def test_a_column_by_itself_is_that_of_one_process() -> None:
    """A norm and a softmax see all features. The twin: gradients of inputs that are not summed."""

    def run(cluster: Cluster) -> tuple[str, int, bool]:
        report = compare_with_oracle(recipe(), build_gathered(), cluster, CPU, 4)
        wrong = "" if report.ok and report.steps == 4 else f"{report.failure} {report.diagnosis}"
        held = bytes_of_weights(cluster)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mappings, "summed", not_summed)
            broken = compare_with_oracle(recipe(checks=False), build_gathered(), cluster, CPU, 1)
        return wrong, held, broken.ok

    for rank, (wrong, held, is_ok) in enumerate(run_ranks(run, RANKS)):
        assert wrong == ""
        assert held == sum(4 * rows_of(b, rank) * (a + (b != 10)) for a, b in pairwise(WIDTHS))
        assert not is_ok


def rows_of(outputs: int, rank: int) -> int:
    start, stop = even_span(outputs, RANKS, rank)
    return stop - start


def test_a_block_by_positions_takes_no_gathered_layer() -> None:
    model = GPT(GPTConfig(heads=2, width=8, layers=1))
    plan = {**GPT_TENSOR_PLAN, "blocks.*": "sequence", "feed_forward.expand": "gathered"}
    with pytest.raises(TaskError, match=r"the outputs of 'blocks\.0\.feed_forward\.expand'"):
        plan_tensor_cuts(resolve_tensor_plan({**plan, "feed_forward.project": "whole"}, model), 2)


def build_redundant(zero_gradient: bool = False) -> Task:
    """All tensor ranks see the same in BatchNorm. A bias right before one has a gradient of zero."""
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(4)] if zero_gradient else []
    pair = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)]
    model = nn.Sequential(nn.BatchNorm1d(6), *pair, *norm, nn.Tanh(), nn.Linear(4, 2))

    def loss(model: nn.Module, x: Tensor) -> Loss:
        return Loss((model(x) - 1).square().sum(), len(x))

    plan = {"1": "column", "3": "row"}
    return Task(model, torch.randn(32, 6) * 3 + 1, loss, tensor=plan, stages=chain)


def chain(model: nn.Sequential) -> Sequence[nn.Module]:
    return list(model)


def recipe_redundant(strategy: str, *, checks: bool = True) -> Recipe:
    settings = {"task": "own", "steps": 6, "batch": {"size": 8, "shards": 2}, "debug": {"check": checks}}
    return Recipe(**settings, strategy=Strategy.parse(strategy))


@pytest.mark.capability("Z1", "Z2")
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        soak_param("replicas=1 tensor=2", 2),
        ("replicas=2 tensor=2", 4),
        soak_param("replicas=1 tensor=2 pipeline=2", 4),
    ],
)
def test_running_statistics_move_once_however_many_ranks_compute_them(strategy: str, ranks: int) -> None:
    def verified(cluster: Cluster) -> tuple[bool, bool]:
        """The twin: all ranks report."""
        settings = recipe_redundant(strategy)
        right = compare_with_oracle(settings, build_redundant(), cluster, CPU, 3).ok
        with patch.object(session_context.SessionContext, "reports", True):
            return right, compare_with_oracle(settings, build_redundant(), cluster, CPU, 3).ok

    assert run_ranks(verified, ranks) == [(True, False)] * ranks


@pytest.mark.capability("Z2")
def test_a_gradient_that_is_zero_but_for_rounding_raises_no_alarm() -> None:
    """Ranks add up a product in parts, so no digit of it agrees with the oracle's; bounds stay sharp."""

    def verified(cluster: Cluster) -> tuple[bool, float, str]:
        report = compare_with_oracle(
            recipe_redundant("replicas=1 tensor=2"), build_redundant(True), cluster, CPU, 4
        )
        bounds = [f.bound for f in report.worst.values() if f.quantity == "gradient"]
        return report.ok, max(bounds), str(report.failure)

    for ok, widest, failure in run_ranks(verified, 2):
        assert ok, failure
        assert widest < 1e-4  # gradients are of the size of 1


@pytest.mark.capability("E2")
def test_a_sum_over_ranks_that_hold_other_pieces_is_an_error() -> None:
    def refused(cluster: Cluster) -> str:
        cut = TensorTransform.cut

        def summed_too(
            self: TensorTransform, held: TensorPlacement, coordinate: int
        ) -> TensorPlacement | None:
            found = cut(self, held, coordinate)
            return found and replace(found, sums=("tensor", *found.sums))

        with (
            patch.object(TensorTransform, "cut", summed_too),
            pytest.raises(StrategyError, match="should be summed over tensor, replica, shard"),
        ):
            settings = recipe_redundant("replicas=1 tensor=2", checks=False)
            build_test_session(cluster, settings, build_redundant)
        return "refused"

    assert run_ranks(refused, 2) == ["refused"] * 2
