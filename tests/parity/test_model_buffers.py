"""Buffers whose changes are added up, or followed on the first micro-batch only, on any number of ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import StrategyError, TaskError
from paceline.job.cluster import Cluster
from paceline.parallel.model_buffers import MicroBatchBuffers
from paceline.recipe import Recipe, Strategy
from paceline.session.build import build_session
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import CPU
from paceline.verification.verify_on_rank import compare_with_oracle

HOWS = {"*.seen": "sum", "1.first": "first"}
STRATEGIES = ("replicas=2", "replicas=1 shard=2 zero=3", "replicas=1 pipeline=2", "replicas=2 lanes=2")
STEPS, BATCH = 3, 7


class Counting(nn.Module):
    """Counts samples, and remembers a mean that each micro-batch has its own of."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("first", torch.zeros(()))
        self.register_buffer("middle", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.add_(len(x))
            self.first.copy_(x.detach().mean())
            self.middle.copy_(x.detach().mean())
        return x


def build(buffer_reductions: dict[str, str] | None = None) -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), Counting(), nn.Linear(6, 5), Counting(), nn.Linear(5, 1))
    data = torch.randn(28, 4, generator=torch.Generator().manual_seed(1))

    def loss(model: nn.Module, batch: Tensor) -> Loss:
        return Loss(model(batch).square().sum(), len(batch))

    return Task(model, data, loss, buffers=HOWS if buffer_reductions is None else buffer_reductions)


def recipe(strategy: str, **more: Any) -> Recipe:
    sizes = {"size": BATCH, "shards": 4, **more}
    return Recipe(
        steps=STEPS, batch=sizes, optimizer={"name": "sgd", "lr": 0.1}, strategy=Strategy.parse(strategy)
    )


def after_steps(cluster: Cluster, strategy: str) -> dict[str, Tensor]:
    """The buffers that this rank holds, after some steps."""
    session = build_session(recipe(strategy), build(), cluster, CPU)
    list(session.rounds())
    model = session.complete()
    session.close()
    return {name: b.clone() for name, b in model.named_buffers()}


def verified(cluster: Cluster, strategies: tuple[str, ...], planted: bool = False) -> Any:
    torch.set_num_threads(1)
    if planted:
        setattr(MicroBatchBuffers, "changes_of", lambda self, shards: self.changes)  # noqa: B010
    found = [compare_with_oracle(recipe(one), build(), cluster, CPU, STEPS) for one in strategies]
    return [(report.ok, report.failure.tensor if report.failure else "") for report in found]


@pytest.mark.capability("A7")
def test_every_layout_has_the_buffers_of_the_oracle_and_a_mistake_is_found() -> None:
    found = run_ranks(verified, 2, STRATEGIES)
    assert found == [[(True, "")] * len(STRATEGIES)] * 2
    ok, tensor = run_ranks(verified, 2, STRATEGIES[:1], True)[0][0]
    assert not ok and tensor == "model/1.first"


@pytest.mark.capability("A7")
def test_sums_count_every_sample_and_the_first_is_that_of_the_first_micro_batch() -> None:
    one = after_steps(Cluster.single(), "replicas=1")
    two = run_ranks(after_steps, 2, "replicas=2")[1]
    for found in (one, two):
        assert found["1.seen"] == found["3.seen"] == STEPS * BATCH
        assert found["1.first"] != found["1.middle"]
        assert found["3.first"] == found["3.middle"]  # no pattern names it: the mean
    assert torch.equal(one["1.seen"], two["1.seen"]) and torch.allclose(one["1.first"], two["1.first"])


ALONE = (
    "sync=local:2",
    "sync=diloco:3",
    "sync=hogwild",
    "sync=gossip:1",
    "replicas=1 pipeline=2 sync=pipedream",
)
SERVED = ("servers=1 sync=server-async", "servers=1 sync=bounded:0", "servers=1 sync=backup:0")


def of_the_data(cluster: Cluster, strategies: tuple[str, ...], planted: bool = False) -> list[list[float]]:
    """By rule: buffers that follow from the data alone, samples seen and the first micro-batch's mean."""
    torch.set_num_threads(1)
    if planted:
        plain = MicroBatchBuffers.change_since
        setattr(MicroBatchBuffers, "weighted_change_since", lambda self, b, n: plain(self, b) * n)  # noqa: B010
    found = []
    for strategy in strategies:
        task = build({"*.seen": "sum", "0.first": "first"})
        task = replace(task, model=nn.Sequential(Counting(), *task.model))
        session = build_session(recipe(strategy), task, cluster, CPU)
        list(session.rounds())
        model = session.complete()
        session.close()
        found.append([float(model.get_buffer(name)) for name in ("0.seen", "2.seen", "0.first")])
    return found


@pytest.mark.capability("A7")
def test_rules_under_which_replicas_train_alone_add_up_and_follow_the_first_alike() -> None:
    (right,) = of_the_data(Cluster.single(), ("replicas=1",))
    assert right[:2] == [STEPS * BATCH] * 2
    for found in (*run_ranks(of_the_data, 2, ALONE), *run_ranks(of_the_data, 3, SERVED)):
        for strategy, values in zip(ALONE if len(found) == len(ALONE) else SERVED, found, strict=True):
            stale = strategy.endswith(
                ("server-async", "hogwild", "gossip:1")
            )  # changes of several steps at a time
            assert values[:2] == right[:2], strategy
            assert stale or values[2] == pytest.approx(right[2], abs=1e-6), strategy
    weighted = run_ranks(of_the_data, 2, ALONE[:1], True)[0]
    assert weighted[0][0] > right[0], "weighed as a mean, every sample counts several times"


def test_what_cannot_be_is_refused_by_name() -> None:
    cluster = Cluster.single()
    with pytest.raises(TaskError, match="separate values on each device"):
        build({"*": "none"})
    with pytest.raises(TaskError, match=r"the pattern '2\.\*' in .* matches no persistent buffer"):
        build_session(recipe("replicas=1"), build({"2.*": "sum"}), cluster, CPU)
    with pytest.raises(StrategyError, match="sync_batchnorm"):
        build_session(recipe("replicas=1", shards=1, sync_batchnorm=True), build(), cluster, CPU)


CODES, DECAY = 5, 0.9


class Codebook(nn.Module):
    """A codebook that follows by moving averages (VQ-VAE)."""

    def __init__(self) -> None:
        super().__init__()
        embed = torch.randn(CODES, 6, generator=torch.Generator().manual_seed(7))
        self.register_buffer("embed", embed / 1.001)
        self.register_buffer("size", torch.ones(CODES))
        self.register_buffer("total", embed.clone())

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.embed).argmin(1)
        chosen = self.embed[nearest]
        if self.training:
            with torch.no_grad():
                hot = torch.nn.functional.one_hot(nearest, CODES).float()
                self.size.mul_(DECAY).add_(hot.sum(0), alpha=1 - DECAY)
                self.total.mul_(DECAY).add_(hot.T @ x, alpha=1 - DECAY)
                self.embed.copy_(centers(self))
        return x + (chosen - x).detach()


def centers(module: nn.Module) -> Tensor:
    return module.total / (module.size + 1e-3).unsqueeze(1)


RULES = {"*.size": "ema:0.9", "*.total": "ema:0.9", "*.embed": centers}


def quantized(rules: Any = None) -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), Codebook(), nn.Linear(6, 1))
    data = torch.randn(28, 4, generator=torch.Generator().manual_seed(1))

    def loss(model: nn.Module, batch: Tensor) -> Loss:
        return Loss(model(batch).square().sum(), len(batch))

    return Task(model, data, loss, buffers=RULES if rules is None else rules)


def codebook_and_warnings(cluster: Cluster, strategy: str, rules: Any = None) -> tuple[Tensor, list[str]]:
    warnings: list[str] = []
    session = build_session(
        recipe(strategy, shuffle=False), quantized(rules), cluster, CPU, warn=warnings.append
    )
    list(session.rounds())
    embed = session.complete()[1].embed.clone()
    session.close()
    return embed, [text for text in warnings if "the forward changes the buffer" in text]


@pytest.mark.capability("A7")
def test_a_codebook_of_moving_averages_is_that_of_the_whole_batch_on_any_number_of_ranks() -> None:
    task = quantized()
    optimizer = torch.optim.SGD(task.model.parameters(), 0.1)
    for step in range(STEPS):
        sums = task.loss(task.model, task.data[step * BATCH : step * BATCH + BATCH])
        optimizer.zero_grad()
        (sums.total / sums.count).backward()
        optimizer.step()
    right = task.model[1].embed
    strategies = ("replicas=2", "replicas=1 shard=2 zero=3", "replicas=1 pipeline=2")

    def ranks(cluster: Cluster) -> list[Any]:
        found: list[Any] = [codebook_and_warnings(cluster, strategy) for strategy in strategies]
        report = compare_with_oracle(recipe("replicas=2"), quantized(), cluster, CPU, STEPS)
        return [*found, (right, [str(report.failure)] if report.failure else [])]

    found = [codebook_and_warnings(Cluster.single(), s) for s in ("replicas=1", "replicas=1 lanes=2")]
    for embed, warnings in [*found, *(pair for rank in run_ranks(ranks, 2) for pair in rank)]:
        assert torch.allclose(embed, right, atol=1e-5) and not warnings, warnings


def test_a_codebook_without_rules_differs_and_the_log_names_it() -> None:
    """The twin of the rules."""
    ruled, _ = codebook_and_warnings(Cluster.single(), "replicas=1")
    found, warnings = codebook_and_warnings(Cluster.single(), "replicas=1", {})
    assert not torch.allclose(found, ruled, atol=1e-2)
    assert len(warnings) == 1 and "'1.embed' and 2 more" in warnings[0] and "4 micro-batches" in warnings[0]
    with pytest.raises(TaskError, match="unknown aggregation"):
        quantized({"*": "ema:1.5"})
