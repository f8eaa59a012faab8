"""Layers cut over ranks: each holds its own and no others, and computes what the whole model computes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import Loss, Task
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.session import evaluate
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session

WIDTHS = (6, 9, 8, 11, 7, 10, 8, 3)  # seven layers, no two with as many numbers
SAMPLES = 12


class Found(NamedTuple):
    """What one rank has, and where it has come to after one step of SGD with a rate of 1.

    Args:
        held: numbers of each parameter that lies here.
        optimized: numbers that the optimizer of this rank updates.
        outputs: of three samples, before the step.
        moved: by parameter, how far it went: the gradient.
    """

    held: dict[str, int]
    optimized: int
    outputs: list[float]
    loss: float
    moved: dict[str, Tensor]


def build() -> Task:
    torch.manual_seed(3)
    links = [part for a, b in pairwise(WIDTHS) for part in (nn.Linear(a, b), nn.Tanh())]
    samples = [(torch.randn(6), torch.randint(3, ())) for _ in range(SAMPLES)]
    held_out = {str(k): samples[k : k + 1] for k in range(3)}
    return Task(nn.Sequential(*links[:-1]), samples, loss, held_out=held_out)


def loss(model: nn.Module, batch: Any) -> Loss:
    x, y = batch
    out = model(x)
    outputs = {f"out {k}": out[:, k].sum() for k in range(3)}
    return Loss(F.cross_entropy(out, y, reduction="sum"), len(y), outputs)


def recipe(strategy: str) -> Recipe:
    return Recipe(
        task="layers",
        steps=1,
        batch={"size": SAMPLES, "shards": 4, "shuffle": False},
        optimizer={"name": "sgd", "lr": 1.0},
        strategy=Strategy.parse(strategy),
    )


def outputs(found: dict[str, float]) -> list[float]:
    return [found[f"{sample}.out {k}"] for sample in range(3) for k in range(3)]


def one_step(cluster: Cluster, strategy: str) -> Found:
    session = build_test_session(cluster, recipe(strategy), build)
    held = {n: p.numel() for n, p in session.runner.sharded_model.model.named_parameters() if not p.is_meta}
    groups = session.state.optimizer.param_groups
    before = {name: t.clone() for name, t in session.snapshot().tensors().items()}
    evaluation = evaluate(session)
    assert evaluation is not None
    (stats,) = session.rounds()
    after = session.snapshot().tensors()
    moved = {name.removeprefix("model/"): t - after[name] for name, t in before.items() if "model/" in name}
    optimized = sum(p.numel() for group in groups for p in group["params"])
    session.close()
    return Found(held, optimized, outputs(dict(evaluation.metrics)), stats.loss, moved)


@pytest.mark.capability("C1", "D1")
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_a_rank_holds_its_layers_alone_and_all_is_as_in_one_process(num_stages: int) -> None:
    task = build()
    x, y = (torch.stack(column) for column in zip(*task.data, strict=True))
    right = F.cross_entropy(task.model(x), y)
    right.backward()
    ranks = run_ranks(one_step, num_stages, f"replicas=1 pipeline={num_stages}")
    sizes = {name: p.numel() for name, p in task.model.named_parameters()}
    names = [name for rank in ranks for name in rank.held]
    assert names == [*sizes], "each layer once, in order"
    for rank in ranks:
        assert 0 < sum(rank.held.values()) < sum(sizes.values()) and rank.optimized == sum(rank.held.values())
        assert rank.loss == pytest.approx(right.item(), abs=1e-6)
        assert rank.outputs == pytest.approx(task.model(x[:3]).detach().flatten().tolist(), abs=1e-6)
    for name, p in task.model.named_parameters():
        assert p.grad is not None
        assert float((ranks[0].moved[name] - p.grad).abs().max()) <= 1e-6, name
