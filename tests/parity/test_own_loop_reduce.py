"""Values of all replicas in an own loop: equal on all, of a rank without samples too, and verified."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.session import OwnLoop
from paceline.session.fit_loop import fitting
from paceline.session.own_loop_reduce import reduce_values, tensor_from_bytes, tensor_to_bytes
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session
from paceline.verification.verify_on_rank import compare_with_oracle
from tests.recipes import recipe_of

STEPS, SIZES = 5, [8, 8, 1, 8, 8]  # 17 samples: in the third step one of two ranks has none


def build() -> Task:
    torch.manual_seed(0)
    data = torch.randn(17, 3, generator=torch.Generator().manual_seed(1)) + 1.0
    return Task(nn.Linear(3, 2), data, lambda model, x: Loss(model(x).square().sum(), len(x)))


def loop_recipe(**batch: Any) -> Recipe:
    return recipe_of(
        "replicas=2",
        steps=STEPS,
        batch={"size": 8, "shards": 2, "shuffle": False, **batch},
        optimizer={"name": "sgd", "lr": 0.1},
        precision={"compute": "fp32"},
    )


def centred(loop: Any, found: list[Any] | None = None) -> None:
    """Takes off the mean of the whole batch, as one process would."""
    assert float(loop.reduce(1.0)) == loop.num_replicas, "before the first batch every rank is asked"
    for x in loop.batches():
        count, total = loop.reduce(len(x)), loop.reduce(x.sum(0))
        loop.backward(Loss(loop.model(x - total / count).square().sum(), len(x)))
        loop.step()
        most = loop.reduce(x.amax(), "max")
        if found is not None:
            found.append((int(count), float(most)))


def alone(loop: Any) -> None:
    """The mutation twin: each rank takes off its own mean."""
    for x in loop.batches():
        loop.backward(Loss(loop.model(x - x.mean(0)).square().sum(), len(x)))
        loop.step()


def uneven(loop: Any) -> None:
    for x in loop.batches():
        if float(x[0, 0]) > 1.0:
            loop.reduce(1.0)
        loop.backward(Loss(loop.model(x).square().sum(), len(x)))
        loop.step()


def trained(cluster: Cluster, loop: Callable[[Any], None], **batch: Any) -> dict[str, Tensor]:
    session = build_test_session(cluster, loop_recipe(**batch), build)
    with fitting(session, None, ()) as found:
        own = OwnLoop(session, found)
        loop(own)
        own.end()
    return {n: p.detach().clone() for n, p in session.runner.sharded_model.model.named_parameters()}


def on_two(cluster: Cluster) -> tuple[list[Any], list[dict[str, Tensor]], list[str]]:
    torch.set_num_threads(1)
    said: list[Any] = []
    ends = [trained(cluster, lambda loop: centred(loop, said)), trained(cluster, alone)]
    report = compare_with_oracle(loop_recipe(), build(), cluster, CPU, STEPS, loop=centred)
    assert report.ok and report.steps == STEPS, report
    refused = []
    for loop, batch in ((lambda loop: loop.reduce(1.0, "mean"), {}), (centred, {"shards": 4})):
        with pytest.raises(PacelineError) as error:
            trained(cluster, loop, **batch)
        refused.append(str(error.value))
    return said, ends, refused


@pytest.mark.capability("B1")
def test_every_rank_has_the_values_of_all_replicas() -> None:
    model, data = build().model, build().data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    most, place = [], 0
    for size in SIZES:
        x = data[place % 17 : place % 17 + size]
        place += size
        most.append(float(x.max()))
        optimizer.zero_grad()
        (model(x - x.mean(0)).square().sum() / size).backward()
        optimizer.step()
    ranks = run_ranks(on_two, 2)
    assert max((said for said, _, _ in ranks), key=len) == [*zip(SIZES, most, strict=True)]
    for _, (right, wrong), (mean, parts) in ranks:
        for name, p in model.named_parameters():
            assert torch.allclose(right[name], p, atol=1e-6), name
        assert not torch.allclose(wrong["weight"], model.get_parameter("weight"), atol=1e-3)
        assert "expected one of sum, max, min" in mean and "whole batch of a rank at once" in parts


def test_values_keep_their_type_and_travel_whole() -> None:
    for value in (
        torch.tensor(3),
        torch.zeros(0, 2),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.ones(2).bfloat16(),
    ):
        again = tensor_from_bytes(tensor_to_bytes(value))
        assert torch.equal(again, value) and again.dtype == value.dtype
    assert torch.equal(
        reduce_values([torch.tensor([1, 5]), torch.tensor([2, 3])], "max"), torch.tensor([2, 5])
    )
    assert reduce_values([torch.tensor(True), torch.tensor(True)], "sum").dtype == torch.bool
    with pytest.raises(PacelineError, match="values of one shape"):
        reduce_values([torch.zeros(2), torch.zeros(3)], "sum")
