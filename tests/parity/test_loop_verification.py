"""`verify` of an own loop: its losses, draws and updates against the oracle; what it cannot judge."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline.errors import PacelineError, TaskError
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
from tests.marks import soak_param


def task_loss(model: nn.Module, batch: list[Tensor]) -> Loss:
    """Another one than that of the loops: theirs is what is verified, and this what evaluations are of."""
    out = model(batch[0])
    return Loss(out.square().sum(), len(batch[0]), {"accuracy": (out.argmax(1) == batch[1]).sum()})


def build() -> Task:
    x = torch.randn(91, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 2))
    samples = list(zip(x, (x[:, 0] > 0).long(), strict=True))
    return Task(model, samples[:56], task_loss, held_out=samples[56:])


def one(loop: Any) -> None:
    for x, y in loop.batches():
        noisy = x + 0.1 * torch.randn_like(x)
        loop.backward(Loss(F.cross_entropy(loop.model(noisy), y, reduction="sum"), len(y)))
        loop.step()


def two_losses(loop: Any) -> None:
    for x, y in loop.batches():
        out = loop.model(x)
        loop.backward(Loss(F.cross_entropy(out, y, reduction="sum"), len(y)))
        loop.backward(Loss(0.1 * loop.model(x.flip(0)).square().sum(), len(y)))
        if loop.step() is not None and loop.session.is_first:
            loop.last = out


def parts(loop: Any) -> None:
    for x, y in loop.batches():
        loop.backward(Loss(F.cross_entropy(loop.model(x), y, reduction="sum"), len(y)))
        loop.step("0")


def counting(loop: Any) -> None:
    """A loss that grows with the batches that were seen, and a part of it that grows with the updates."""
    updates = 0
    for i, (x, y) in enumerate(loop.batches()):
        total = F.cross_entropy(loop.model(x), y, reduction="sum")
        loop.backward(Loss(total * (1.0 + i) + updates * loop.model[0].weight.square().sum(), len(y)))
        updates += loop.step() is not None


def looking(loop: Any) -> None:
    """A forward in training behind the update, as to count hits: statistics are not this rank's to move."""
    for x, y in loop.batches():
        loop.backward(Loss(F.cross_entropy(loop.model(x), y, reduction="sum"), len(y)))
        loop.step()
        loop.model(x)


def scheduled(loop: Any, most: float = 1e-2) -> None:
    scheduler = loop.schedule(lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, most, 20))
    for x, y in loop.batches():
        loop.backward(Loss(F.cross_entropy(loop.model(x), y, reduction="sum"), len(y)))
        if loop.step() is not None:
            scheduler.step()


def evaluating(loop: Any) -> None:
    """What it finds, on two sets and before the first step too, weighs the losses that come."""
    weight = loop.evaluate().loss
    for x, y in loop.batches():
        loop.backward(Loss(weight * F.cross_entropy(loop.model(x), y, reduction="sum"), len(y)))
        if loop.step() is not None and loop.step_number % 2:
            found = loop.evaluate()
            other = loop.evaluate([(torch.ones(4) * i, torch.tensor(i % 2)) for i in range(5)])
            weight = found.loss + other.metrics["accuracy"] + 0.1 * loop.step_number


def asking(loop: Any) -> None:
    for x, y in loop.batches():
        loop.backward(Loss(F.cross_entropy(loop.model(x), y, reduction="sum"), len(y)))
        if loop.step() is not None:
            loop.evaluate()


def stopping(loop: Any) -> None:
    for x, y in loop.batches():
        loop.backward(Loss(F.cross_entropy(loop.model(x), y, reduction="sum"), len(y)))
        loop.step()
        if loop.step_number == 3:
            loop.stop("it has seen enough")


def short(loop: Any) -> None:
    for x, y in loop.batches():
        loop.backward(Loss(F.cross_entropy(loop.model(x), y, reduction="sum"), len(y)))
        loop.step()
        break


def stepless(loop: Any) -> None:
    for x, _ in loop.batches():
        loop.backward(Loss(loop.model(x).sum(), len(x)))


def raising(loop: Any) -> None:
    raise ValueError("the user's own")


REFUSED = {parts: "the whole batch of a rank", short: "the loop ended"}
REFUSED |= {stepless: "without calling step"}


def check(
    cluster: Cluster,
    loop: Callable[[Any], None],
    strategy: str,
    fault: str = "",
    task: Task | None = None,
    **more: Any,
) -> VerificationReport:
    settings: dict[str, Any] = {"task": "own", "steps": 9, "batch": {"size": 16, "shards": 4}}
    settings |= {"optimizer": {"name": "adamw", "lr": 1e-2, "clip_norm": 1.0}}
    settings |= {"precision": {"compute": "fp32"}, "strategy": Strategy.parse(strategy), **more}
    components = PLANTED_FAULTS[fault].components(cluster.world_size) if fault else None
    return compare_with_oracle(
        Recipe(**settings), task or build(), cluster, CPU, 6, components=components, loop=loop
    )


LOOPS = (one, two_losses, counting, looking, scheduled, evaluating)


def on_shards(cluster: Cluster) -> None:
    torch.set_num_threads(1)
    for loop in LOOPS:
        report = check(cluster, loop, "replicas=1 shard=2 zero=1")
        assert report.ok and report.steps == 6, (loop, report)


def on_two(cluster: Cluster) -> None:
    torch.set_num_threads(1)
    before = threading.active_count()
    for strategy, loop in [("replicas=2", loop) for loop in LOOPS] + [("shard=2 zero=1", evaluating)]:
        report = check(cluster, loop, strategy)
        assert report.ok and report.steps == 6, (strategy, loop, report)
    report = check(cluster, stopping, "replicas=2")
    assert report.ok and report.steps == 4, report
    for fault in ("bucket-not-reduced", "shared-dropout-seed", "not-divided"):
        assert not check(cluster, one, "replicas=2", fault).ok, fault
    found = check(cluster, by_rank_of(cluster.global_rank), "replicas=2")
    assert (
        not found.ok and found.failure is not None and found.failure.quantity in ("loss", "gradient", "task")
    )
    found = check(cluster, lambda loop: scheduled(loop, 1e-2 * (1 + cluster.global_rank)), "replicas=2")
    assert found.failure is not None and (found.failure.quantity, found.failure.tensor) == ("update", "rate")
    found = check(cluster, asking, "replicas=2", task=with_another_evaluation(cluster.global_rank))
    assert found.failure is not None and found.failure.quantity == "evaluation", found
    for loop, says in REFUSED.items():
        with pytest.raises(PacelineError, match=says) as error:
            check(cluster, loop, "replicas=2")
        assert error.value.next_step
    with pytest.raises(ValueError, match="the user's own"):
        check(cluster, raising, "replicas=2")
    with pytest.raises(PacelineError, match="an own loop is not possible with"):
        check(cluster, one, "replicas=1 pipeline=2")
    assert threading.active_count() == before, "no thread is left"


def with_another_evaluation(rank: int) -> Task:
    """The twin: a rank finds something else on the held-out samples."""

    def loss(model: nn.Module, batch: list[Tensor]) -> Loss:
        found = task_loss(model, batch)
        return found if model.training else replace(found, total=found.total * (1 + 0.01 * rank))

    return replace(build(), loss=loss)


def by_rank_of(rank: int) -> Callable[[Any], None]:
    def weighed(loop: Any) -> None:
        for x, y in loop.batches():
            total = F.cross_entropy(loop.model(x), y, reduction="sum")
            loop.backward(Loss(total * (1 + 0.1 * rank), len(y)))
            loop.step()

    return weighed


@pytest.mark.capability("A2")
@pytest.mark.parametrize("checks", [on_two, soak_param(on_shards)])
def test_an_own_loop_is_verified_with_its_own_losses(checks: Callable[[Cluster], None]) -> None:
    run_ranks(checks, 2)


def test_alone_and_by_the_public_call() -> None:
    recipe = Recipe(task="own", steps=9, batch={"size": 16, "shards": 4}, precision={"compute": "fp32"})
    assert paceline.verify(recipe, build, steps=4, loop=counting).ok
    report = paceline.verify(recipe, build, steps=2, loop=two_losses, strict=True)
    assert report.ok, report.diagnosis


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


def check_of_updates(
    cluster: Cluster, loop: Callable[[Any], None], strategy: str, components: Components | None = None
) -> VerificationReport:
    recipe = Recipe(
        task="own",
        steps=8,
        batch={"size": 6, "shards": 2, "shuffle": False},
        optimizer={"clip_norm": 0.5},
        precision={"compute": "fp32"},
        strategy=Strategy.parse(strategy),
    )
    return compare_with_oracle(recipe, gan(), cluster, CPU, 5, components=components, loop=loop)


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


def on_two_of_updates(cluster: Cluster) -> None:
    torch.set_num_threads(1)
    for strategy in ("replicas=2", "replicas=1 shard=2 zero=1"):
        for loop in (alternating, remembering):
            report = check_of_updates(cluster, loop, strategy)
            assert report.ok and report.steps == 5, (strategy, loop, conclusion_lines(report))
            seen = {(f.quantity, f.part) for f in report.worst.values()}
            assert {("gradient", part) for part in PARTS} <= seen
    report = check_of_updates(cluster, reusing, "replicas=2")
    assert report.ok and report.steps == 5, conclusion_lines(report)
    for part in PARTS:
        found = check_of_updates(cluster, alternating, "replicas=2", Components(update=wrong_on(1, part)))
        failure = found.failure
        assert failure is not None and (failure.quantity, failure.part) == ("state", part)
        assert failure.tensor.startswith(f"model/{part}.")
        assert failure.errors[0] <= failure.bound < failure.errors[1]
        assert f"update of '{part}'" in conclusion_lines(found)[0]
    for name in ("bucket-not-reduced", "stepped-twice", "not-divided", "optimizer-state-lost"):
        found = check_of_updates(
            cluster, remembering, "replicas=2", PLANTED_FAULTS[name].components(cluster.world_size)
        )
        assert found.failure is not None and found.failure.part in PARTS, name
    with pytest.raises(TaskError, match="but another rank updates another part"):
        check_of_updates(cluster, lambda loop: by_rank(loop, cluster.global_rank), "replicas=2")


@pytest.mark.capability("A2")
def test_every_update_of_a_step_is_verified_and_a_wrong_one_named() -> None:
    run_ranks(on_two_of_updates, 2)
