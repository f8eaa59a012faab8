"""`verify` of loops that update several parts a step: every update is compared, a fault names its part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import TaskError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.session import Components
from paceline.sync import PendingUpdate, UpdatePart
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import CPU
from paceline.testing.planted_faults import PLANTED_FAULTS
from paceline.verification.verification_report import VerificationReport, conclusion_lines
from paceline.verification.verify_on_rank import compare_with_oracle

PARTS = ("critic", "generator")


class Centred(nn.Module):
    """Takes off a running mean, of one sample too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


def gan() -> Task:
    """19 samples: of batches of 6 the last has one, and a rank of two has none in it."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(2, 4), Centred(), nn.ReLU(), nn.Linear(4, 2))
    judge = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.2), nn.Tanh(), nn.Linear(4, 1))
    model = nn.ModuleDict({"generator": made, "critic": judge})
    data = list(torch.randn(19, 2, generator=torch.Generator().manual_seed(1)) + 2.0)
    return Task(model, data, lambda model, x: Loss(model["critic"](x).square().sum(), len(x)), optimizer=two)


def two(model: Any) -> torch.optim.Optimizer:
    """Other options for each part, as two optimizers have them."""
    rates = {"generator": 2e-2, "critic": 1e-2}
    groups = [{"params": list(model[part].parameters()), "lr": rate} for part, rate in rates.items()]
    return torch.optim.Adam(groups, betas=(0.5, 0.99))


def real_or_not(model: Any, x: Tensor, fake: Tensor) -> Loss:
    return Loss(F.softplus(-model["critic"](x)).sum() + F.softplus(model["critic"](fake)).sum(), len(x))


def fools(model: Any, fake: Tensor) -> Loss:
    return Loss(F.softplus(-model["critic"](fake)).sum(), len(fake))


def alternating(loop: Any) -> None:
    """The textbook's: new draws for each update."""
    for x in loop.batches():
        loop.backward(real_or_not(loop.model, x, loop.model["generator"](torch.randn_like(x)).detach()))
        loop.step("critic")
        loop.backward(fools(loop.model, loop.model["generator"](torch.randn_like(x))))
        loop.step("generator")


def remembering(loop: Any) -> None:
    """Two updates of the critic, the generator's in every second step; a mean of what it has seen."""
    seen = torch.zeros(2)
    for x in loop.batches():
        seen = 0.8 * seen + 0.2 * x.mean(0)
        for number in range(2):
            fake = loop.model["generator"](torch.randn_like(x)).detach()
            loss = real_or_not(loop.model, x - seen, fake)
            loop.backward(Loss(loss.total * (1.0 + number + loop.step_number), loss.count))
            loop.step("critic")
        if loop.step_number % 2 == 1:
            loop.backward(fools(loop.model, loop.model["generator"](torch.randn_like(x))))
            loop.step("generator")


def by_rank(loop: Any, rank: int) -> None:
    """Not one loop: ranks update different parts."""
    for x in loop.batches():
        loop.backward(real_or_not(loop.model, x, loop.model["generator"](x)))
        loop.step(PARTS[rank])


def reusing(loop: Any) -> None:
    """One graph of the generator, from before the critic's update; a frozen critic behind it."""
    for x in loop.batches():
        fake = loop.model["generator"][3](torch.randn(len(x), 4))
        loop.backward(real_or_not(loop.model, x, fake.detach()))
        loop.step("critic")
        loop.model["critic"].requires_grad_(False)
        loop.backward(fools(loop.model, fake))
        loop.step("generator")
        loop.model["critic"].requires_grad_(True)


def check(
    cluster: Cluster, loop: Callable[[Any], None], strategy: str, pieces: Components | None = None
) -> VerificationReport:
    recipe = Recipe(
        task="own",
        steps=8,
        batch={"size": 6, "shards": 2, "shuffle": False},
        optimizer={"clip_norm": 0.5},
        precision={"compute": "fp32"},
        strategy=Strategy.parse(strategy),
    )
    return compare_with_oracle(recipe, gan(), cluster, CPU, 5, pieces=pieces, loop=loop)


def wrong_on(rank: int, part: str) -> Callable[[dict[str, UpdatePart]], dict[str, UpdatePart]]:
    """The update of one part is made twice as long, on one rank."""

    def edit(parts: dict[str, UpdatePart]) -> dict[str, UpdatePart]:
        right = parts["step"]

        def step(record: PendingUpdate) -> None:
            before = {slot: p.detach().clone() for slot, p in record.updates.items()}
            right(record)
            with torch.no_grad():
                for slot, p in record.updates.items():
                    if slot.name.startswith(part) and torch.distributed.get_rank() == rank:
                        p.add_(p - before[slot])

        return {**parts, "step": step}

    return edit


def on_two(cluster: Cluster) -> None:
    torch.set_num_threads(1)
    for strategy in ("replicas=2", "replicas=1 shard=2 zero=1"):
        for loop in (alternating, remembering):
            report = check(cluster, loop, strategy)
            assert report.ok and report.steps == 5, (strategy, loop, conclusion_lines(report))
            seen = {(f.quantity, f.part) for f in report.worst.values()}
            assert {("gradient", part) for part in PARTS} <= seen
    report = check(cluster, reusing, "replicas=2")
    assert report.ok and report.steps == 5, conclusion_lines(report)
    for part in PARTS:
        found = check(cluster, alternating, "replicas=2", Components(update=wrong_on(1, part)))
        failure = found.failure
        assert failure is not None and (failure.quantity, failure.part) == ("state", part)
        assert failure.tensor.startswith(f"model/{part}.")
        assert failure.errors[0] <= failure.bound < failure.errors[1]
        assert f"update of '{part}'" in conclusion_lines(found)[0]
    for name in ("bucket-not-reduced", "stepped-twice", "not-divided", "optimizer-state-lost"):
        found = check(cluster, remembering, "replicas=2", PLANTED_FAULTS[name].pieces(cluster.world_size))
        assert found.failure is not None and found.failure.part in PARTS, name
    with pytest.raises(TaskError, match="but another rank updates another part"):
        check(cluster, lambda loop: by_rank(loop, cluster.global_rank), "replicas=2")


@pytest.mark.capability("A2")
def test_every_update_of_a_step_is_verified_and_a_wrong_one_named() -> None:
    run_ranks(on_two, 2)
