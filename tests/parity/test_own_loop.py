"""An own loop: where `train` ends, it ends; its folder, checkpoints, schedule and stop are those of a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline.errors import StrategyError, TaskError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.report.run_files import is_run_folder
from paceline.session import OwnLoop
from paceline.session.fit_loop import fitting
from paceline.session.own_loop_steps import refuse_own_loop
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from tests.recipes import recipe_of

STRATEGIES = ("replicas=2", "replicas=1 shard=2 zero=1")
REFUSED = {
    "replicas=1 pipeline=2": "the layout runs forward and backward",
    "replicas=1 shard=2 zero=3": "freed between uses",
    "replicas=2 sync=local:2": "the sync rule runs micro-batches",
}


def loss_of(model: nn.Module, batch: list[Tensor]) -> Loss:
    x, y = batch
    return Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))


def build() -> Task:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(56, 4, generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 2))
    return Task(model, list(zip(x, (x[:, 0] > 0).long(), strict=True)), loss_of)


loop_recipe = partial(
    recipe_of,
    steps=7,
    batch={"size": 16, "shards": 4},
    optimizer={"name": "adamw", "lr": 1e-2, "clip_norm": 1.0},
    precision={"compute": "fp32"},
)


def parameters_of(session: Any) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in session.state.tensors().items() if n.startswith("model/")}


def both(cluster: Cluster, strategy: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Where the rule ends and where the own loop ends, of the same recipe; 56 samples leave a tail of 8."""
    session = build_test_session(cluster, loop_recipe(strategy), build)
    list(session.rounds())
    right = parameters_of(session)
    session = build_test_session(cluster, loop_recipe(strategy), build)
    with fitting(session, None, ()) as found:
        loop = OwnLoop(session, found)
        for batch in loop.batches():
            loop.backward(loss_of(loop.model, batch))
            loop.step()
        loop.end()
        assert found.finish().steps == 7
    return right, parameters_of(session)


def test_it_ends_to_the_bit_where_the_rule_ends() -> None:
    def run(cluster: Cluster) -> dict[str, Any]:
        torch.set_num_threads(1)
        found: dict[str, Any] = {strategy: both(cluster, strategy) for strategy in STRATEGIES}
        for strategy in REFUSED:
            with pytest.raises(StrategyError) as caught:
                refuse_own_loop(build_test_session(cluster, loop_recipe(strategy), build))
            found[strategy] = str(caught.value)
        return found

    for found in run_ranks(run, 2):
        for strategy in STRATEGIES:
            right, own = found[strategy]
            assert all(torch.equal(value, own[name]) for name, value in right.items()), strategy
        for strategy, why in REFUSED.items():
            assert why in found[strategy]


def gan() -> Task:
    torch.manual_seed(0)
    model = nn.ModuleDict({"generator": nn.Linear(2, 2), "critic": nn.Linear(2, 1)})
    data = list(torch.randn(33, 2, generator=torch.Generator().manual_seed(1)) + 2.0)
    return Task(model, data, critic_loss)


def critic_loss(model: Any, x: Tensor) -> Loss:
    real, fake = model["critic"](x), model["critic"](model["generator"](-x).detach())
    return Loss(F.softplus(-real).sum() + F.softplus(fake).sum(), len(x), {"real": real.sum()})


def generator_loss(model: Any, x: Tensor) -> Loss:
    return Loss(F.softplus(-model["critic"](model["generator"](-x))).sum(), len(x))


UPDATES = (("critic", critic_loss), ("critic", critic_loss), ("generator", generator_loss))


def test_several_updates_a_step_are_those_of_a_plain_loop() -> None:
    def run(cluster: Cluster, folder: str) -> dict[str, Tensor]:
        torch.set_num_threads(1)
        optimizer = {"name": "adam", "lr": 1e-2}
        recipe = loop_recipe(batch={"size": 8, "shards": 2, "shuffle": False}, steps=6, optimizer=optimizer)
        session = build_test_session(cluster, recipe, gan)
        with fitting(session, None, ()) as found:
            loop = OwnLoop(session, found)
            for x in loop.batches():
                for part, loss in UPDATES:
                    loop.backward(loss(loop.model, x))
                    loop.step(part)
            loop.end()
            last = found.finish().last
        assert last is not None and {"critic loss", "generator loss"} <= last.metrics.keys()
        return parameters_of(session)

    task = gan()
    model: Any = task.model
    optimizers = {n: torch.optim.Adam(model[n].parameters(), lr=1e-2) for n in ("critic", "generator")}
    for step in range(6):
        x = torch.stack(task.data[8 * (step % 5) : 8 * (step % 5) + 8])  # in step 4 a rank has none
        for part, loss in UPDATES:
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            (loss(model, x).total / len(x)).backward()
            optimizers[part].step()
    for found in run_ranks(run, 2, ""):
        for name, p in model.named_parameters():
            assert torch.allclose(found[f"model/{name}"], p, atol=1e-6), name


def own(recipe: Recipe, **options: Any) -> tuple[OwnLoop, list[float]]:
    rates = []
    with paceline.own_loop(recipe, build, **options) as loop:
        scheduler = loop.schedule(
            lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.1)
        )
        for batch in loop.batches():
            loop.backward(loss_of(loop.model, batch))
            update = loop.step()
            if update is not None:
                rates.append(update.lr)
                scheduler.step()
    return loop, rates


def test_it_has_a_folder_goes_on_and_keeps_the_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole, rates = own(loop_recipe())
    assert rates == pytest.approx([1e-2] * 2 + [1e-3] * 3 + [1e-4] * 2)
    first, before = own(loop_recipe(steps=3))
    folder = first.result.run_dir
    assert folder is not None and is_run_folder(folder) and first.result.checkpoint is not None
    second, after = own(loop_recipe(), resume=folder)
    assert before + after == pytest.approx(rates) and second.result.steps == 7
    assert (folder / "report.html").exists() and (folder / "metrics.jsonl").exists()
    pairs = zip(whole.model.parameters(), second.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_what_a_loop_forgets_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with paceline.own_loop(loop_recipe(), build) as loop:
        with pytest.raises(TaskError, match="step\\(\\) was called without backward"):
            loop.step()
        for batch in loop.batches():
            with pytest.raises(TaskError, match="but it has several micro-batches"):
                loop.backward(loss_of(loop.model, batch))
                loop.step("0")
            break
    with (
        pytest.raises(TaskError, match="the loop took the next batch"),
        paceline.own_loop(loop_recipe(), build) as loop,
    ):
        for _ in loop.batches():
            pass
