"""Optimizers, clipping and schedules by the words of a recipe: what one process computes, in every layout."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from paceline import Loss, Task
from paceline.errors import RecipeError, StrategyError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.recipe.registry.optimizer_specs import OPTIMIZER_SPECS
from paceline.sync import update
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session
from paceline.verification import VerificationReport, compare_with_oracle
from paceline.verification.verification_report import conclusion_lines
from tests.marks import soak_param
from tests.recipes import recipe_of

STEPS, SIZE, CLIP = 6, 12, 0.05
SPECS = {spec.word: spec for spec in OPTIMIZER_SPECS}
SECOND_ORDER = ("kfac", "newton_cg")
WHOLE = [word for word, spec in SPECS.items() if not (spec.elementwise or word in SECOND_ORDER)]
IN_PARTS = ("replicas=1 shard=2 zero=1", "replicas=1 shard=2 zero=3", "replicas=1 tensor=2")
WHOLE_TENSORS = ("replicas=2", "replicas=1 pipeline=2", "servers=1 sync=server", "replicas=2 lanes=2")


def task() -> Task:
    torch.manual_seed(4)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 10), nn.Linear(10, 1), nn.Flatten(0)
    ).double()
    x = torch.randn(SIZE * STEPS, 6, dtype=torch.float64)

    def loss(model: nn.Module, batch: Tensor) -> Loss:
        return Loss((model(batch) - batch.square().sum(1)).square().sum(), len(batch))

    held_out = list(torch.randn(10, 6, dtype=torch.float64))
    return Task(model, list(x), loss, held_out=held_out, tensor={"0": "column", "2": "row"})


def recipe(strategy: str = "replicas=1", name: str = "adamw", **settings: Any) -> Recipe:
    spec = SPECS[name]
    decay = {key: 0.1 for key in ("weight_decay", "l2") if key in spec.reads}
    optimizer = {"name": name, "lr": 0.02, "clip_value": CLIP, **dict([*decay.items()][:1])}
    optimizer |= {"switch_update": 3} if "switch_update" in spec.reads else {}
    schedule = {"decay": "one_cycle"} if spec.follows_rate else {}
    values = {"optimizer": optimizer, "schedule": schedule} | settings
    return recipe_of(strategy, steps=STEPS, batch={"size": SIZE, "shards": 4, "shuffle": False}, **values)


def end(cluster: Cluster, chosen: Recipe) -> dict[str, Tensor] | str:
    """Return the parameters at the end, or the refusal."""
    try:
        session = build_test_session(cluster, chosen, task)
    except StrategyError as error:
        return error.what
    list(session.rounds())
    whole = session.snapshot().tensors()
    session.close()
    return {n: t.clone() for n, t in whole.items() if n.startswith("model/")}


def ends(cluster: Cluster, cases: list[tuple[str, str]]) -> dict[tuple[str, str], dict[str, Tensor] | str]:
    return {case: end(cluster, recipe(*case)) for case in cases}


def distance(found: dict[str, Tensor] | str, right: dict[str, Tensor] | str) -> float:
    assert isinstance(found, dict) and isinstance(right, dict), (found, right)
    return max(float((found[name] - value).abs().max()) for name, value in right.items())


@pytest.mark.capability("A11", "J13")
@pytest.mark.parametrize(
    "layouts, parts",
    [(WHOLE_TENSORS[1:2], IN_PARTS[1:2]), soak_param(WHOLE_TENSORS, IN_PARTS)],
    ids=["some", "all"],
)
def test_every_optimizer_ends_where_one_process_ends(
    layouts: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    whole = [(strategy, name) for strategy in layouts for name in (*WHOLE, "sgd", "nadam")]
    in_parts = [(strategy, name) for strategy in parts for name in SPECS if name not in SECOND_ORDER]
    cases = [*whole, *in_parts]
    right = {name: end(Cluster.single(), recipe(name=name)) for name in SPECS}
    for found in run_ranks(ends, 2, cases):
        for strategy, name in cases:
            assert distance(found[strategy, name], right[name]) < 1e-9, (strategy, name)
    moved = [distance(right[name], right["adamw"]) for name in SPECS if name != "adamw"]
    assert min(moved) > 1e-4


def plain_loop(clip_value: float | None) -> dict[str, Tensor]:
    """A loop of PyTorch over whole batches, with PyTorch's own scheduler."""
    made = task()
    optimizer = torch.optim.SGD(made.model.parameters(), lr=0.02, momentum=0.9)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, STEPS, cycle_momentum=False)
    for step in range(STEPS):
        loss = made.loss(made.model, torch.stack(made.data[SIZE * step : SIZE * (step + 1)]))
        optimizer.zero_grad()
        (loss.total / loss.count).backward()
        if clip_value is not None:
            nn.utils.clip_grad_value_(made.model.parameters(), clip_value)
        optimizer.step()
        if step < STEPS - 1:
            cycle.step()
    return {f"model/{name}": p.detach() for name, p in made.model.named_parameters()}


@pytest.mark.parametrize("clip_value", [None, CLIP])
def test_values_are_clipped_as_in_a_plain_loop(clip_value: float | None) -> None:
    sgd = {"name": "sgd", "lr": 0.02, "momentum": 0.9, "clip_value": clip_value}
    found = end(Cluster.single(), recipe(optimizer=sgd))
    assert distance(found, plain_loop(clip_value)) < 1e-12
    assert distance(found, plain_loop(None if clip_value else CLIP)) > 1e-3


def test_clipping_in_fp16_sees_gradients_without_their_scale() -> None:
    sgd = {"name": "sgd", "lr": 0.02, "clip_value": 1e-3}
    chosen = recipe(optimizer=sgd, precision={"compute": "fp16", "init_scale": 1024.0})
    made = task()
    session = build_test_session(
        Cluster.single(), chosen, lambda: Task(made.model.float(), floats(), made.loss)
    )
    stats = next(iter(session.rounds()))
    largest = [float(p.grad.abs().max()) for p in session.state.model.parameters() if p.grad is not None]
    assert stats.applied and stats.grad_norm > 0.1 and max(largest) == pytest.approx(1e-3)
    session.close()


def floats() -> list[Tensor]:
    return [x.float() for x in task().data]


PLATEAU = {"decay": "plateau", "patience": 0, "threshold": 10.0, "threshold_mode": "abs", "factor": 0.5}


def verify(cluster: Cluster, chosen: Recipe) -> VerificationReport:
    return compare_with_oracle(chosen, task(), cluster, CPU, 5)


def verify_all(cluster: Cluster) -> list[VerificationReport]:
    at_plateau = recipe("replicas=2", schedule=PLATEAU, evaluate={"every_steps": 2})
    return [
        verify(cluster, at_plateau),
        verify(cluster, at_plateau.replace(reproducible=True)),
        *(verify(cluster, recipe("replicas=2", name)) for name in (*WHOLE, "nadam", "rprop")),
        *(verify(cluster, recipe("replicas=1 shard=2 zero=1", name)) for name in WHOLE),
        verify(cluster, recipe("replicas=1 shard=2 zero=2", "adagrad")),
    ]


def verify_broken(cluster: Cluster) -> list[VerificationReport]:
    def late(value: float) -> update.UpdatePart:
        return update.clip_to(None)

    with patch.object(update, "clip_values_to", late):
        no_clip = verify(cluster, recipe("replicas=2"))
    with patch("paceline.optim.reduce_on_plateau.ReduceOnPlateau.observe", lambda *args: False):
        no_plateau = verify(cluster, recipe("replicas=2", schedule=PLATEAU, evaluate={"every_steps": 2}))
    return [no_clip, no_plateau]


@pytest.mark.capability("Z2")
def test_the_oracle_knows_every_optimizer_clip_and_schedule() -> None:
    for reports in run_ranks(verify_all, 2):
        for report in reports:
            assert report.ok and report.steps == 5, conclusion_lines(report)


def test_a_clip_or_a_plateau_that_is_left_out_is_red() -> None:
    """The mutation twin."""
    for no_clip, no_plateau in run_ranks(verify_broken, 2):
        assert no_clip.diagnosis is not None and no_clip.diagnosis.cause == "wrong clip value"
        assert no_plateau.diagnosis is not None and no_plateau.diagnosis.cause == "wrong learning rate"
        assert no_plateau.steps == 5  # the second evaluation is the first without an improvement


def test_a_plateau_needs_evaluations_and_its_metric() -> None:
    chosen = recipe(schedule=PLATEAU | {"metric": "f1"}, evaluate={"every_steps": 2})
    with pytest.raises(RecipeError, match="no metric 'f1'") as caught:
        build_test_session(Cluster.single(), chosen, task)
    assert caught.value.where == "schedule.metric"
    without = partial(Task, task().model, task().data, task().loss)
    with pytest.raises(RecipeError, match="the task has no held-out data"):
        build_test_session(Cluster.single(), chosen, without)
