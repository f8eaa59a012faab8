"""Sums under `dgc` are those of Deep Gradient Compression, written out for all ranks in one process."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from paceline.comm import NativeCollective, Net
from paceline.comm.codecs.codec_kernels import load_kernels
from paceline.comm.codecs.strategy_codec import build_coded_collective
from paceline.comm.codecs.top_k import select_largest
from paceline.comm.collectives import pad_to_rows
from paceline.comm.workspace import Workspace
from paceline.data import collate_samples
from paceline.errors import StrategyError
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh, duplicate_group
from paceline.recipe import Recipe, Strategy, support
from paceline.session import start_warnings
from paceline.session.build import build_session
from paceline.session.task_contract import refuse_repeated_momentum_or_clip
from paceline.task import Loss, Task
from paceline.testing.parity import build_test_session, make_task, trajectory_of
from paceline.testing.rank_processes import run_ranks

WORLD, STEPS, N, KEPT, MOMENTUM = 3, 7, 301, 20, 0.9


def values(step: int, rank: int) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(100 * step + rank))


def top(x: Tensor) -> Tensor:
    """Of each row the largest values; the rest zero."""
    out = torch.zeros_like(x)
    for row, found in zip(x, out, strict=True):
        places = torch.empty(KEPT, dtype=torch.int64)
        select_largest(row, KEPT, places, Workspace())
        found[places] = row[places]
    return out


def written_out(momentum: float) -> list[Tensor]:
    """Lin et al. 2018, Algorithm 4, without clipping, and error feedback where parts are summed."""
    width = -(-N // WORLD)
    u = [torch.zeros(WORLD, width) for _ in range(WORLD)]
    v = [torch.zeros(WORLD, width) for _ in range(WORLD)]
    owned, sums = torch.zeros(WORLD, width), []
    for step in range(STEPS):
        total = torch.zeros(WORLD, width)
        for rank in range(WORLD):
            u[rank] = momentum * u[rank] + pad_to_rows(values(step, rank), WORLD)
            v[rank] = v[rank] + u[rank]
            sent = top(v[rank])
            v[rank], u[rank] = v[rank] - sent, u[rank].masked_fill(sent != 0, 0.0)
            total = total + sent
        total = total + owned
        found = top(total)
        owned = total - found
        sums.append(found.view(-1)[:N])
    return sums


@pytest.mark.capability("H3", "H5")
def test_sums_are_those_of_the_paper_through_aborts_and_a_resume() -> None:
    def run(cluster: Cluster) -> tuple[list[Tensor], list[str]]:
        group = duplicate_group(Mesh.build(cluster, {"replica": WORLD}).replica, "coded")
        net, found = Net(60.0), []
        path: Any = build_coded_collective(
            NativeCollective(net, group), Strategy(codec=f"dgc:{KEPT}:{MOMENTUM}"), seed=5
        )
        sides: list[str] = []
        for step in range(STEPS):
            net.step = step
            if step in (2, 3):  # a step that is not applied
                path.all_reduce(values(90 + step, group.rank), "0").wait()
                path.abort()
            if step == 4:  # another object goes on from what a checkpoint has
                kept = {side: flat.clone() for side, flat in path.feedback.residuals("0", N).items()}
                sides = [*kept]
                path.close()
                path = build_coded_collective(
                    NativeCollective(net, group), Strategy(codec=f"dgc:{KEPT}:{MOMENTUM}"), seed=5
                )
                path.feedback.set_residuals("0", kept)
            found.append(path.all_reduce(values(step, group.rank), "0").wait().clone())
            path.feedback.commit()
        path.close()
        return found, sides

    right, without = written_out(MOMENTUM), written_out(0.0)
    for found, sides in run_ranks(run, WORLD):
        assert sides == ["sent", "velocity", "owned"]
        for mine, wanted in zip(found, right, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(right[3], without[3], atol=1e-2)  # the twin: plain top-k is another sum


@pytest.mark.parametrize(
    "text, why",
    [
        ("replicas=2 sync=local:2 codec=dgc:0.01", "once"),
        ("replicas=1 shard=2 zero=1 codec=dgc:0.01", "once"),
        ("servers=1 sync=server-async codec=dgc:0.01", "once"),
        ("replicas=2 codec=dgc:0.01+int4", "in a chain"),
    ],
)
def test_where_gradients_would_get_it_twice_or_not_at_all_it_is_refused(text: str, why: str) -> None:
    answer = support(Strategy.parse(text), processes=2, shards=4)
    assert not answer.ok and why in answer.reason


@pytest.mark.parametrize("optimizer", [{"name": "adamw"}, {"name": "sgd", "momentum": 0.9}])
@pytest.mark.parametrize("codec", ["dgc:0.01", "auto:int8,dgc:0.01"])
def test_an_optimizer_with_momentum_beside_it_is_an_error(optimizer: dict[str, Any], codec: str) -> None:
    task = Task(torch.nn.Linear(2, 1), [0], lambda model, batch: Loss(torch.zeros(()), 1))
    recipe = Recipe(task="sum", steps=1, optimizer=optimizer, strategy=Strategy(replicas=2, codec=codec))
    with pytest.raises(StrategyError, match="the optimizer would apply it again"):
        refuse_repeated_momentum_or_clip(recipe, task)
    refuse_repeated_momentum_or_clip(recipe.replace(optimizer={"name": "sgd"}), task)
    refuse_repeated_momentum_or_clip(recipe.replace(strategy=Strategy(replicas=2, codec="topk:0.01")), task)


CLIP = 0.05
"""Of the norm of the whole gradient; the ranks' own are clipped in every step, not equally much."""


def clipped_job(clip: str) -> Recipe:
    """Everything travels, so nothing is left for later, and velocities begin anew in every step."""
    return Recipe(
        task="digits",
        options={"model": "mlp", "hidden": [12]},
        steps=3,
        batch={"size": 12, "shards": 4},
        optimizer={"name": "sgd", "lr": 0.5},
        precision={"compute": "fp32"},
        strategy=Strategy(replicas=2, codec=f"dgc:1.0:0.9{clip}"),
    )


def clipped_by_hand(limit: float) -> dict[str, Tensor]:
    """SGD over two halves of each batch, each of which is clipped before they are added."""
    recipe = clipped_job("")
    session = build_test_session(Cluster.single(), recipe.replace(strategy=Strategy(replicas=1)))
    task, model = session.task, session.runner.sharded_model.model
    for step in range(recipe.steps):
        taken, total = session.work.micro_batches(step), [torch.zeros_like(p) for p in model.parameters()]
        for half in (taken[:2], taken[2:]):
            model.zero_grad()
            for one in half:
                samples = [task.data[int(k)] for k in one.indices]
                task.loss(model, collate_samples(task, samples, torch.device("cpu"))).total.backward()
            grads = [p.grad / recipe.batch.size for p in model.parameters() if p.grad is not None]
            norm = float(torch.stack([g.norm() for g in grads]).norm())
            total = [t + g * min(1.0, limit / norm) for t, g in zip(total, grads, strict=True)]
        with torch.no_grad():
            for p, t in zip(model.parameters(), total, strict=True):
                p -= recipe.optimizer.lr * t
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.capability("H3")
def test_each_rank_clips_its_gradient_to_its_part_of_the_norm() -> None:
    def run(cluster: Cluster) -> tuple[dict[str, Tensor], list[str]]:
        recipe, said = clipped_job(f":{CLIP}"), list[str]()
        lacks = "no C compiler (cc) was found" if cluster.global_rank else load_kernels() or "why"
        with patch.object(start_warnings, "find_kernels", lambda: lacks):
            session = build_session(recipe, make_task(recipe), cluster, torch.device("cpu"), warn=said.append)
        losses = [stats.loss for stats in session.rounds()]
        return trajectory_of(losses, session).parameters, [text for text in said if "kernels" in text]

    right = clipped_by_hand(CLIP / 2**0.5)
    for found, said in run_ranks(run, 2):
        (line,) = said  # once, on every rank, whoever lacks them
        assert "dgc:1.0:0.9:0.05 has no compiled kernels on ranks" in line and "4 to 8 times" in line
        for name, value in right.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    for wrong in (CLIP, 1e9):  # the twins: the whole norm on each rank, and no clip
        assert any(
            not torch.allclose(value, right[name], rtol=1e-3, atol=1e-5)
            for name, value in clipped_by_hand(wrong).items()
        )


def test_a_clip_beside_another_and_with_uneven_shares_is_refused() -> None:
    task = Task(torch.nn.Linear(2, 1), [0], lambda model, batch: Loss(torch.zeros(()), 1))
    twice, once = (Strategy(replicas=2, codec=codec) for codec in ("dgc:0.01:0.9:1", "dgc:0.01:0.9"))
    for key in ("clip_norm", "clip_value"):
        recipe = Recipe(task="sum", steps=1, optimizer={"name": "sgd", key: 1.0}, strategy=twice)
        with pytest.raises(StrategyError, match=f"{key} would clip their sum again"):
            refuse_repeated_momentum_or_clip(recipe, task)
        refuse_repeated_momentum_or_clip(recipe.replace(strategy=once), task)
    answer = support(Strategy(replicas=2, codec="dgc:0.01:0.9:1", balance="speed"), processes=2, shards=4)
    assert not answer.ok and "an equal share of the batch" in answer.reason
