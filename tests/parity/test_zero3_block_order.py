"""ZeRO-3 by block: samples choose which blocks compute, in which order, and the loss looks into blocks.

Ranks run different samples, so their blocks differ in every micro-batch. No gather may meet that of another
block: equal blocks would mix up without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from paceline.errors import TaskError
from paceline.job.cluster import Cluster
from paceline.parallel import zero
from paceline.parallel.zero import GatherCycle
from paceline.recipe import Recipe
from paceline.session.evaluation import evaluate
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session
from paceline.testing.rank_processes import RanksFailed
from paceline.verification import compare_with_oracle
from paceline.verification.verification_report import conclusion_lines
from tests.marks import soak_param
from tests.parity.training_runs import each_case
from tests.recipes import recipe_of

WIDTH = 6
Choose = Callable[[nn.ModuleList, Tensor], list[nn.Module]]


class Chosen(nn.Module):
    """Equal blocks, of which the samples choose."""

    def __init__(self, choose: Choose) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(4)
        )
        self.out = nn.Linear(WIDTH, 3)
        self.choose = choose

    def forward(self, x: Tensor) -> Tensor:
        for block in self.choose(self.blocks, x):
            x = x + block(x)
        return self.out(x)


def in_order(blocks: nn.ModuleList, x: Tensor) -> list[nn.Module]:
    return [*blocks]


def some(blocks: nn.ModuleList, x: Tensor) -> list[nn.Module]:
    """Each with a chance, as stochastic depth does it; sometimes none."""
    bits = int(x[0].abs().sum() * 1000)
    return [block for number, block in enumerate(blocks) if bits >> number & 1]


def turned(blocks: nn.ModuleList, x: Tensor) -> list[nn.Module]:
    """From another one on, or backwards."""
    first = int(x[0].abs().sum() * 1000)
    found = [blocks[(first + number) % 4] for number in range(4)]
    return found[::-1] if first >> 2 & 1 else found


def again(blocks: nn.ModuleList, x: Tensor) -> list[nn.Module]:
    """Some of them twice."""
    times = 1 + int(x[0].abs().sum() * 1000) % 3
    return [blocks[0], blocks[1], blocks[0]] * times


def entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    x, y = batch
    return Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))


def all_weights(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    """A regulariser over everything, before and after the forward."""
    before = sum(p.abs().sum() for p in model.blocks[2].parameters())
    found = entropy(model, batch)
    penalty = sum(p.square().sum() for p in model.parameters()) + before
    return Loss(found.total + 0.01 * penalty * found.count, found.count)


def tied_head(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    """The weight of a block as the output layer, once with a gradient and once without."""
    x, y = batch
    h = model.blocks[1](model.blocks[0](x))
    logits = F.linear(h, model.blocks[0][0].weight) + F.linear(h, model.blocks[3][2].weight.detach())
    return Loss(F.cross_entropy(model.out(logits), y, reduction="sum"), len(y))


def by_rank(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    """Only some samples look at a weight."""
    found = entropy(model, batch)
    which = int(batch[0][0].abs().sum() * 1000) % 4
    return Loss(found.total + model.blocks[which][0].weight.square().sum() * found.count, found.count)


def without_a_gradient(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    """A block whose weights need no gradient in their last use."""
    x, y = batch
    h = x
    for block in model.blocks:
        h = F.linear(F.linear(h, block[0].weight.detach()), block[2].weight) + block[0](h)
    return Loss(F.cross_entropy(model.out(h), y, reduction="sum"), len(y))


def recomputed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    """Each block's forward is done again, in a backward of its own."""
    x, y = batch
    h = x.clone().requires_grad_()
    for block in some(model.blocks, x):
        h = h + checkpoint(block, h, use_reentrant=True)
    return Loss(F.cross_entropy(model.out(h), y, reduction="sum"), len(y))


CASES: dict[str, tuple[Choose, Any]] = {
    "all blocks in order": (in_order, entropy),
    "some blocks": (some, entropy),
    "another order": (turned, entropy),
    "several times": (again, entropy),
    "a penalty on all weights": (in_order, all_weights),
    "a tied head in the loss": (in_order, tied_head),
    "a weight that some samples look at": (some, by_rank),
    "used without a gradient": (in_order, without_a_gradient),
    "recomputed in a backward of its own": (in_order, recomputed),
}


def task(case: str) -> Task:
    choose, loss = CASES[case]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Chosen(choose)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(40, WIDTH, generator=generator)
    y = torch.randint(3, (40,), generator=generator)
    held_out = [(torch.ones(WIDTH) * k, torch.tensor(k)) for k in range(3)]
    return Task(model, list(zip(x, y, strict=True)), loss, held_out=held_out)


def blocks_recipe(way: str, shards: int = 5) -> Recipe:
    return recipe_of(
        way,
        steps=3,
        batch={"size": 2 * shards, "shards": shards},
        optimizer={"name": "adamw", "lr": 0.01, "clip_norm": 0.5},
        runtime={"bucket_bytes": 64, "deadline_seconds": 30},
    )


def said_of(cluster: Cluster, way: str, cases: tuple[str, ...]) -> dict[str, Any]:
    """What verification says of each case; nothing where all steps agree."""
    found = {}
    for case in cases:
        report = compare_with_oracle(blocks_recipe(way), task(case), cluster, CPU, 3)
        found[case] = "" if report.ok and report.steps == 3 else " ".join(conclusion_lines(report))
    return found


@pytest.mark.capability("A11", "Z2")
@pytest.mark.parametrize(
    "way", ["replicas=1 shard=2 zero=3 route=native", soak_param("replicas=1 shard=2 zero=3")]
)
def test_blocks_are_used_as_samples_ask(way: str) -> None:
    for found in run_ranks(said_of, 2, way, tuple(CASES)):
        assert found == dict.fromkeys(CASES, "")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("way", "ranks"),
    [
        ("replicas=1 shard=3 zero=3 route=native", 3),
        ("replicas=1 shard=2 zero=3 route=ring", 2),
        ("replicas=1 shard=3 zero=3 route=tree", 3),
        ("replicas=2 shard=2 zero=3 route=native", 4),
    ],
)
def test_blocks_are_used_as_samples_ask_on_every_route(way: str, ranks: int) -> None:
    for found in run_ranks(said_of, ranks, way, tuple(CASES)):
        assert found == dict.fromkeys(CASES, "")


class OwnOrder(GatherCycle):
    """Every rank gathers what it needs when it needs it."""

    def bring(self, number: int) -> None:
        self._blocks[number].gather()

    def _finish(self) -> None:
        self._position = len(self._order)


@pytest.mark.capability("A11", "Z2")
def test_gathers_in_an_order_of_their_own_mix_equal_blocks_up() -> None:
    """The mutation twin: there is no error then, and only the numbers tell."""

    def losses(cluster: Cluster, kind: type[GatherCycle]) -> list[float]:
        recipe = blocks_recipe("replicas=1 shard=2 zero=3 route=native", shards=4)
        with patch.object(zero, "GatherCycle", kind):
            session = build_test_session(cluster, recipe, lambda: task("another order"))
            found = [stats.loss for stats in session.rounds()]
            session.close()
        return found

    right, mixed = run_ranks(each_case, 2, losses, [(GatherCycle,), (OwnOrder,)])[0]
    assert max(abs(a - b) for a, b in zip(right, mixed, strict=True)) > 1e-3


@pytest.mark.capability("A11")
def test_ranks_evaluate_different_numbers_of_micro_batches() -> None:
    """Of three held-out micro-batches one rank has two; nobody gathers for a backward there."""

    def evaluated(cluster: Cluster) -> list[float]:
        session = build_test_session(
            cluster, blocks_recipe("replicas=1 shard=2 zero=3 route=native"), lambda: task("some blocks")
        )
        found = [evaluate(session) for _ in range(2)]
        session.close()
        return [one.loss for one in found if one is not None]

    first, second = run_ranks(evaluated, 2)
    assert first == second and first[0] == first[1]


@pytest.mark.capability("A11")
def test_a_weight_between_two_steps_is_one_plain_error() -> None:
    """It names the parameter; no rank ends by a signal."""

    def looked(cluster: Cluster) -> None:
        session = build_test_session(
            cluster, blocks_recipe("replicas=1 shard=2 zero=3 route=native"), lambda: task("some blocks")
        )
        weight = session.task.model.blocks[1][0].weight
        assert weight.shape == (WIDTH, WIDTH) and weight.grad is None
        weight.square().sum()

    with pytest.raises(RanksFailed) as failed:
        run_ranks(looked, 2)
    assert "'blocks.1.0.weight' is used between steps" in str(failed.value)
    assert TaskError.__name__ in str(failed.value)
