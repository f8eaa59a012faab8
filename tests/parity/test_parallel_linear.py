"""A linear layer cut by its outputs, by itself: they are put together, and all is as in one process."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import Loss, Task
from paceline.errors import TaskError
from paceline.job.cluster import Cluster
from paceline.models import GPT, GPT_TENSOR_PLAN, GPTConfig
from paceline.parallel.placement import even_span
from paceline.parallel.tensor import mappings, plan_tensor_cuts, resolve_tensor_plan
from paceline.recipe import Recipe, Strategy
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session
from paceline.verification import compare_with_oracle

RANKS = 3
WIDTHS = (6, 11, 10, 4)
"""Neither 11 nor 10 nor 4 outputs divide by three ranks."""


def loss_of(model: nn.Module, x: Tensor) -> Loss:
    y = model(x)
    return Loss(F.mse_loss(y, x[..., :4].roll(1, -1), reduction="sum"), len(x))


def build() -> Task:
    """Samples of five rows: what goes into a layer has three dimensions."""
    torch.manual_seed(0)
    first, second, third = (nn.Linear(a, b, bias=b != 10) for a, b in pairwise(WIDTHS))
    model = nn.Sequential(first, nn.LayerNorm(11), nn.Tanh(), second, nn.Softmax(-1), third)
    data = list(torch.randn(40, 5, 6, generator=torch.Generator().manual_seed(1)))
    return Task(model, data, loss_of, tensor={"0": "gathered", "3": "gathered", "5": "gathered"})


def recipe() -> Recipe:
    return Recipe(
        task="own",
        steps=4,
        batch={"size": 9, "shards": 3},
        optimizer={"name": "adamw", "lr": 1e-2, "clip_norm": 0.1},
        precision={"compute": "fp32"},
        strategy=Strategy.parse(f"replicas=1 tensor={RANKS}"),
    )


def bytes_of_weights(cluster: Cluster) -> int:
    """What this rank holds of the layers."""
    held = build_test_session(cluster, recipe(), build).runner.sharded_model.computes
    return sum(p.nbytes for slot, p in held.items() if not slot.name.startswith("1."))


def not_summed(x: Tensor, collective: object, key: str) -> Tensor:
    return x.detach().clone()


@pytest.mark.capability("C3", "Z2")
def test_a_column_by_itself_is_that_of_one_process() -> None:
    """A norm and a softmax see all features. The twin: gradients of inputs that are not summed."""

    def run(cluster: Cluster) -> tuple[str, int, bool]:
        report = compare_with_oracle(recipe(), build(), cluster, CPU, 4)
        wrong = "" if report.ok and report.steps == 4 else f"{report.failure} {report.diagnosis}"
        held = bytes_of_weights(cluster)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mappings, "summed", not_summed)
            broken = compare_with_oracle(recipe(), build(), cluster, CPU, 1)
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
