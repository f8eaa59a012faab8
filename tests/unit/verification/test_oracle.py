"""What the oracle has written apart is what the session has, value by value; nothing is taken from there."""

import ast
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import paceline.verification
from paceline.comm.reduction.gradient_norm import row_squares
from paceline.data import KeyedOrder, LockstepWork
from paceline.optim import ReduceOnPlateau, build_optimizer, build_schedule
from paceline.recipe import OptimizerRecipe, ScheduleRecipe
from paceline.recipe.registry.optimizer_specs import OPTIMIZER_SPECS
from paceline.task import Loss, Task
from paceline.verification.oracle import (
    PlainMicroBatches,
    generators_seeded,
    ordered_norm,
    plain_norm,
    read_micro_batch,
)
from paceline.verification.plain_optimizer import PlainSchedule, plain_optimizer

OTHER_OPTIONS = {
    "betas": (0.7, 0.8),
    "eps": 1e-5,
    "momentum": 0.6,
    "nesterov": True,
    "alpha": 0.7,
    "rho": 0.6,
    "momentum_decay": 0.02,
    "lambd": 0.03,
    "etas": (0.3, 1.4),
    "step_sizes": (1e-3, 2.0),
    "beta2_decay": -0.6,
    "d": 1.5,
}
SCHEDULES = [
    {"decay": decay} | shape | warmup | scaling
    for decay, shape in (
        ("constant", {}),
        ("cosine", {}),
        ("cosine", {"final": 0.1}),
        ("cosine", {"cycle_steps": 7}),
        ("cosine", {"cycle_steps": 5, "cycle_factor": 2, "final": 0.3}),
        ("linear", {"final": 0.07}),
        ("exponential", {"rate": 0.013}),
        ("one_cycle", {"div_factor": 7.0, "final_div_factor": 30.0}),
        ("one_cycle", {"pct_start": 0.45, "anneal_strategy": "linear"}),
    )
    for warmup in ({}, {"warmup_steps": 9}, {"warmup_steps": 6, "warmup_from": 0.3})
    for scaling in (
        {},
        {"batch_scaling": "linear", "base_batch": 12},
        {"batch_scaling": "sqrt", "base_batch": 96},
    )
    if not (scaling and "warmup_from" in warmup) and not (warmup and decay == "one_cycle")
]


@pytest.mark.parametrize("settings", SCHEDULES, ids=str)
def test_two_schedules_that_were_written_apart_have_equal_bits(settings: dict[str, object]) -> None:
    recipe = ScheduleRecipe(**settings)
    ours, plain = build_schedule(recipe, 50, 48), PlainSchedule(recipe, 50, 48)
    assert [ours.factor(t) for t in range(130)] == [plain.factor(t) for t in range(130)]


@pytest.mark.parametrize("better", ["lower", "higher"])
@pytest.mark.parametrize("mode", ["rel", "abs"])
def test_two_plateaus_that_were_written_apart_have_equal_bits(better: str, mode: str) -> None:
    options = {"better": better, "threshold_mode": mode, "threshold": 0.02, "factor": 0.7, "final": 0.05}
    rng = random.Random(1)
    values = [rng.choice([rng.uniform(-1, 2), 1.0, float("nan")]) for _ in range(60)]
    for extra in ({"patience": 2}, {"patience": 0, "cooldown": 2}):
        recipe = ScheduleRecipe(decay="plateau", **options, **extra)
        ours, plain = ReduceOnPlateau(recipe), PlainSchedule(recipe, 50, 48)
        seen = [(ours.observe(i, value), ours.multiplier)[1] for i, value in enumerate(values)]
        assert seen == [plain.multiplier(values[: i + 1]) for i in range(len(values))]
        assert len(set(seen)) > 4


def test_two_norms_that_were_written_apart_have_equal_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 7), (3,), (), (4, 3, 2, 2), (33, 129), (1,), (0, 4)]
    tensors = [torch.randn(s, generator=generator) for s in shapes]
    tensors += [torch.randn(4, 6, 3, 3, generator=generator).contiguous(memory_format=torch.channels_last)]
    tensors += [torch.randn(6, 5, generator=generator).T, torch.randn(3, 2, dtype=torch.complex64)]
    ours = float(torch.cat([row_squares(t) for t in tensors if t.numel()]).sum().sqrt())
    assert ordered_norm(tensors) == ours
    assert plain_norm(tensors) == pytest.approx(ours, rel=1e-14)


@pytest.mark.parametrize("key", ["weight_decay", "l2"])
@pytest.mark.parametrize("name", sorted({spec.word for spec in OPTIMIZER_SPECS} - {"muon"}))
@pytest.mark.parametrize("decay_on", ["matrices", "all"])
def test_two_optimizers_that_were_written_apart_are_alike(name: str, decay_on: str, key: str) -> None:
    spec = {spec.word: spec for spec in OPTIMIZER_SPECS}[name]
    extra = {key: 0.1, "decay_on": decay_on} if key in spec.reads else {}
    for option, value in OTHER_OPTIONS.items():
        extra |= {option: value} if option in spec.reads else {}
    recipe = OptimizerRecipe(name=name, lr=0.03, **extra)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    ours = build_optimizer(model, recipe, fused_allowed=True)
    plain = plain_optimizer(model, recipe, fused_allowed=True)
    assert isinstance(ours, type(plain))
    assert ours.state_dict()["param_groups"] == plain.state_dict()["param_groups"]


@pytest.mark.parametrize("size", [27, 3, 8])
def test_shards_that_were_dealt_apart_are_alike(size: int) -> None:
    order = KeyedOrder(70, size, 5)
    for step in range(order.steps_per_epoch + 2):
        ours, plain = (
            LockstepWork(order, min(4, size), 5).micro_batches(step),
            PlainMicroBatches(order, min(4, size), 5).micro_batches(step),
        )
        assert [(u.step, u.shard, u.indices.tolist(), u.key) for u in ours] == [
            (u.step, u.shard, u.indices.tolist(), u.key) for u in plain
        ]


def test_reading_leaves_every_generator_as_it_was() -> None:
    data = [float(i) for i in range(8)]
    task = Task(
        nn.Linear(1, 1), data, lambda m, b: Loss(m(b).sum(), 1), collate=lambda s: [*s, random.random()]
    )
    micro_batch = PlainMicroBatches(KeyedOrder(8, 4, 0), 2, 0).micro_batches(0)[0]
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert read_micro_batch(task, micro_batch) == read_micro_batch(task, micro_batch)
    assert random.getstate() == before[0] and np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    with generators_seeded(3):
        first = random.random(), np.random.rand(), float(torch.rand(()))
    with generators_seeded(3):
        assert first == (random.random(), np.random.rand(), float(torch.rand(())))


PLAIN = ("oracle", "plain_optimizer")
SHARED = {
    "BatchOrder",
    "BufferRule",
    "MicroBatch",
    "to_device",
    "key",
    "KeyedDropout",
    "Loss",
    "Task",
    "WholeBatch",
    "gather_scope",
    "moving_average_decay",
    "OptimizerRecipe",
    "ScheduleRecipe",
    "SparsityRecipe",
    # Containers of state, in which the masks of the oracle lie.
    "ExtraState",
    "TensorPiece",
    "TensorSlot",
}


def test_the_oracle_imports_only_what_defines_a_run() -> None:
    """No reducer, norm, schedule, update step, layout or loader: names of the definition only."""
    folder = Path(paceline.verification.__file__).parent
    for name in PLAIN:
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text("utf-8"))):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            if module.startswith("paceline.") and not module.startswith("paceline.verification"):
                assert {alias.name for alias in node.names} <= SHARED, (name, module)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_two_bytes_are_trained(dtype: torch.dtype) -> None:
    """Fused SGD of torch 2.13 leaves them as they are on the processor, so it is not taken there."""
    model = nn.Linear(6, 8).to(dtype)
    before = model.weight.detach().clone()
    recipe = OptimizerRecipe(name="sgd", lr=0.1, momentum=0.9)
    for build in (lambda: build_optimizer(model, recipe, True), lambda: plain_optimizer(model, recipe, True)):
        with torch.no_grad():
            model.weight.copy_(before)
        model.weight.grad, model.bias.grad = torch.ones_like(model.weight), torch.ones_like(model.bias)
        build().step()
        assert torch.allclose(model.weight, before - 0.1, atol=0.01)
