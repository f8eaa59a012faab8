"""BatchNorm over all ranks of a step is that of one forward of all samples; without it, it is not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.errors import RecipeError, StrategyError
from paceline.job.cluster import Cluster
from paceline.parallel import sync_batchnorm
from paceline.recipe import Recipe
from paceline.task import Loss, Task
from paceline.testing.parity import CPU, build_test_session, run_oracle, run_strategy
from paceline.testing.rank_processes import run_ranks
from paceline.verification import VerificationReport, compare_with_oracle
from paceline.verification.verification_report import conclusion_lines

STEPS = 4


class Net(nn.Module):
    """Norms of one and of two dimensions, one without weights, one that averages over all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.first = nn.BatchNorm2d(3)
        self.second = nn.BatchNorm1d(3, affine=False, momentum=None)
        self.out = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.conv(x)).relu().mean((2, 3))
        return self.out(self.second(x))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    x, y = batch
    return Loss((model(x) - y).square().sum(), len(x))


def build(samples: int = 22) -> Task:
    """Samples that are far from zero, so that a variance by cancellation would show."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 1, 5, 5, generator=generator) + 30.0 * torch.rand(
        samples, 1, 1, 1, generator=generator
    )
    torch.manual_seed(1)
    return Task(model=Net(), data=TensorDataset(x, x.mean((1, 2, 3)).unsqueeze(1)), loss=loss)


def recipe(strategy: str = "replicas=all", **changes: Any) -> Recipe:
    batch = {"size": 11, "sync_batchnorm": True} | changes.pop("batch", {})
    settings = {"task": "given", "steps": STEPS, "batch": batch, "runtime": {"device": "cpu"}}
    return Recipe(**(settings | {"strategy": strategy, "optimizer": {"name": "sgd", "lr": 0.05}} | changes))


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative difference of a tensor."""
    return max(
        float((found[n] - expected[n]).abs().max() / expected[n].abs().max().clamp(min=1e-3))
        for n in expected
    )


def far(cluster: Cluster, chosen: Recipe) -> float:
    return apart(
        run_strategy(cluster, chosen, build).parameters, run_oracle(chosen, STEPS, build, shards=1).parameters
    )


@pytest.mark.parametrize("strategy", ["replicas=2", "replicas=3", "replicas=1 shard=2 zero=1"])
def test_ranks_end_where_one_forward_of_all_samples_ends(strategy: str) -> None:
    world = 3 if "3" in strategy else 2
    assert max(run_ranks(partial(far, chosen=recipe(strategy)), world)) < 2e-5


def test_without_it_they_do_not() -> None:
    """The twin: 6 and 5 samples have other statistics than 11."""
    chosen = recipe(batch={"sync_batchnorm": False})
    assert min(run_ranks(partial(far, chosen=chosen), 2)) > 1e-2


def wrong_sums(wrong: Callable[[Tensor, Any], Tensor]) -> Any:
    """Let backward take other sums than those over all ranks."""
    normalize = sync_batchnorm._NormalizeOverRanks
    right = normalize.backward

    def backward(ctx: Any, dy: Tensor, *unused: Any) -> Any:
        of_all = ctx.total
        ctx.total = lambda sums: wrong(sums, of_all)
        return right(ctx, dy, *unused)

    return patch.object(normalize, "backward", staticmethod(backward))


def with_wrong_backward(cluster: Cluster) -> float:
    """As if gradients did not flow through the statistics of other ranks."""
    with wrong_sums(lambda own, of_all: own):
        return far(cluster, recipe())


def test_gradients_that_stay_on_a_rank_are_found() -> None:
    """The twin of the backward."""
    assert min(run_ranks(with_wrong_backward, 2)) > 1e-3


def verified(cluster: Cluster, strategy: str) -> tuple[VerificationReport, VerificationReport]:
    """As it is, and with a thousandth too much in the sums of backward."""
    right = compare_with_oracle(recipe(strategy), build(), cluster, CPU, STEPS)
    with wrong_sums(lambda own, of_all: of_all(own) * 1.001):
        return right, compare_with_oracle(recipe(strategy), build(), cluster, CPU, STEPS)


@pytest.mark.capability("Z2")
@pytest.mark.parametrize(("strategy", "world"), [("replicas=3", 3), ("replicas=1 shard=2 zero=1", 2)])
def test_verify_holds_it_against_one_forward_of_all_samples(strategy: str, world: int) -> None:
    for report, twin in run_ranks(verified, world, strategy):
        assert report.ok and report.steps == STEPS, conclusion_lines(report)
        assert not twin.ok and "gradient of" in " ".join(conclusion_lines(twin))


def test_verify_says_that_ranks_draw_for_their_own_samples() -> None:
    task = build()
    task.model.out = nn.Sequential(nn.Dropout(0.5), task.model.out)

    def refused(cluster: Cluster) -> None:
        with pytest.raises(StrategyError, match="draws random numbers"):
            compare_with_oracle(recipe(), task, cluster, CPU, STEPS)

    run_ranks(refused, 2)


def test_the_model_is_plain_again_when_the_session_is_closed() -> None:
    def kinds(cluster: Cluster) -> tuple[str, str]:
        session = build_test_session(cluster, recipe(), build)
        norm = session.state.model.first
        during = type(norm).__name__
        session.close()
        return during, type(norm).__name__

    assert run_ranks(kinds, 2) == [("SyncedBatchNorm2d", "BatchNorm2d")] * 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"batch": {"accumulation": 2}}, "run one after another"),
        ({"strategy": "pipeline=2"}, "one whole forward"),
        ({"strategy": "replicas=2 sync=local:2"}, "one whole forward"),
        ({"strategy": "lanes=2"}, "one whole forward"),
        ({"reproducible": True}, "an order of its own"),
        ({"memory": {"recompute": "blocks"}}, "again in backward"),
        ({"runtime": {"compile": True}}, "compiled graph"),
    ],
)
def test_what_it_does_not_go_with_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=rf"batch.sync_batchnorm: does not go with .*{says}"):
        recipe(**changes)


@pytest.mark.parametrize(
    ("batch", "samples", "says"),
    [({"shards": 4}, 22, "a batch has 4 micro-batches for 2 ranks"), ({}, 12, "has 1 sample for 2 ranks")],
)
def test_a_rank_without_its_one_micro_batch_is_refused(
    batch: dict[str, Any], samples: int, says: str
) -> None:
    def refused(cluster: Cluster) -> str:
        with pytest.raises(StrategyError) as caught:
            build_test_session(cluster, recipe(batch=batch), partial(build, samples))
        return caught.value.what

    assert all(says in text for text in run_ranks(refused, 2))
