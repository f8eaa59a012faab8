"""Threads and fused kernels that follow from the machine, and what is told of choices that are slow on it."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline.job.cluster import Cluster
from paceline.job.cpu_count import CoreCount, find_cores
from paceline.observe.metrics_schema import find_schema_errors
from paceline.optim import build_optimizer, reason_not_fused
from paceline.recipe import OptimizerRecipe, Recipe
from paceline.session.fit_loop import CompileCost
from paceline.testing.parity import CPU
from paceline.tuning import hardware_defaults
from paceline.tuning.hardware_defaults import (
    MatrixProduct,
    choose_hardware_defaults,
    choose_threads,
    few_threads_warning,
    unfused_optimizer_warning,
)
from tests.unit.training.test_by_machine import LARGE, task_of


@pytest.mark.parametrize(
    "settings, processes, chosen",
    [
        ({}, 1, "threads: 4 (one process on 4 cores)"),
        ({}, 2, "threads: 2 (2 processes share 4 cores)"),
        ({}, 8, "threads: 1 (8 processes share 4 cores)"),
        ({"runtime": {"threads": 3}}, 2, "threads: 3 (set by runtime.threads)"),
        ({"reproducible": True}, 1, "threads: 1 (reproducible = true; more threads would change"),
        ({"strategy": "lanes=2"}, 1, "threads: 1 (the cores are used by lanes)"),
    ],
)
def test_threads_share_the_cores(settings: dict[str, object], processes: int, chosen: str) -> None:
    recipe = Recipe(task="x", steps=1, **settings)
    assert str(choose_threads(recipe, processes, CoreCount(4, "4 cores"))).startswith(chosen)


def test_what_is_chosen_stands_in_the_run_folder_with_its_reason() -> None:
    said: list[str] = []
    notes: dict[str, object] = {}
    recipe = Recipe(task="x", steps=1)
    choose_hardware_defaults(
        recipe, task_of(nn.Linear(4, 4)), Cluster.single(), CPU, warn=said.append, note=notes.__setitem__
    )
    threads = choose_threads(recipe, 1, find_cores())
    assert said[0] == str(threads) and notes["threads"] == threads._asdict()
    record = {"event": "threads", "level": "info", "rank": 0, "time": 0.0, **threads._asdict()}
    assert not find_schema_errors(record)


def test_fewer_threads_than_the_cores_are_slow_by_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured is the wall time of a product: here it follows from the number of threads."""
    numbers: list[int] = []
    clock = [0.0]
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    monkeypatch.setattr(hardware_defaults.time, "perf_counter", lambda: clock[0])

    def take_time(*args: object) -> torch.Tensor:
        clock[0] += 1.0 / (numbers[-1] if numbers else 1)
        return torch.zeros(1, requires_grad=True)

    monkeypatch.setattr(hardware_defaults.F, "linear", take_time)
    monkeypatch.setattr(torch.autograd, "grad", lambda *args: None)
    assert "takes 4.0 times as long as with 4 threads" in few_threads_warning(1, 4, LARGE, CPU)
    assert numbers[-1] == torch.get_num_threads(), "they are put back"
    for asked, product in ((0, LARGE), (4, LARGE), (1, MatrixProduct(4, 4, 4)), (1, None)):
        assert few_threads_warning(asked, 4, product, CPU) == ""


def test_updates_without_a_kernel_are_told_to_be_slow_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[Callable[[], None]] = []

    def times(first: Callable[[], None], second: Callable[[], None]) -> float:
        ways[:] = [first, second]
        return 3.0

    plain = OptimizerRecipe(name="adamw", fused=False)
    assert hardware_defaults._speedup(lambda: None, lambda: None) > 0
    monkeypatch.setattr(hardware_defaults, "_speedup", times)
    assert "65,536 values takes 3.0 times as long as with a fused kernel" in unfused_optimizer_warning(
        plain, 2**16, CPU
    )
    for way in ways:
        way()
    assert unfused_optimizer_warning(plain, 100, CPU) == "", "too few to tell"
    monkeypatch.setattr(hardware_defaults, "_speedup", lambda *ways: 1.1)
    assert unfused_optimizer_warning(plain, 2**16, CPU) == ""


@pytest.mark.parametrize(
    "fields, dtype, allowed, why",
    [
        ({}, torch.float32, True, ""),
        ({"fused": False}, torch.float32, True, "optimizer.fused = false"),
        ({}, torch.float32, False, "reproducible = true"),
        ({"name": "rmsprop"}, torch.float32, True, "PyTorch has no fused kernel of rmsprop"),
        ({}, torch.bfloat16, True, "no fused kernel is correct for 'weight' (bfloat16 on cpu)"),
    ],
)
def test_why_an_update_takes_no_fused_kernel(
    fields: dict[str, object], dtype: torch.dtype, allowed: bool, why: str
) -> None:
    model = nn.Linear(4, 4, dtype=dtype)
    recipe = OptimizerRecipe(**fields)
    found = reason_not_fused(model, recipe, allowed)
    assert found.startswith(why) and bool(found) == bool(why)
    made = build_optimizer(model, recipe, allowed)
    assert bool(made.param_groups[0].get("fused")) == (not found), "what is said is what is built"


def test_what_compiling_has_cost_is_said_in_steps() -> None:
    watch = CompileCost()
    assert [watch.follow(seconds) for seconds in (20.5, 2.0, 0.5, 0.5, 0.5)] == [None] * 5
    assert watch.follow(0.5) == {"seconds": 20.0, "steps": 40}
    assert watch.follow(0.5) is None
