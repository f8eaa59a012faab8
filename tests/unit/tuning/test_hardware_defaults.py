"""The number format that follows from the machine: decided alike on all ranks, with its reason."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.job.cluster import Cluster
from paceline.job.cpu_count import CoreCount, find_cores, num_cores
from paceline.observe.metrics_schema import find_schema_errors
from paceline.optim import build_optimizer, reason_not_fused
from paceline.recipe import OptimizerRecipe, Recipe
from paceline.session.fit_loop import CompileCost
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session
from paceline.tuning import hardware_defaults
from paceline.tuning.hardware_defaults import (
    MatrixProduct,
    PrecisionGain,
    ThreadChoice,
    choose_hardware_defaults,
    choose_precision,
    choose_threads,
    few_threads_warning,
    has_bf16,
    largest_product,
    oversubscription_warning,
    reduce_slow_threads,
    slow_precision_warning,
    unfused_optimizer_warning,
)

LARGE = MatrixProduct(512, 512, 512)


def task_of(*layers: nn.Module, tokens: int = 0) -> Task:
    def loss(model: nn.Module, batch: torch.Tensor) -> Loss:
        return Loss(model(batch).square().sum(), len(batch))

    width = next((layer.in_features for layer in layers if isinstance(layer, nn.Linear)), 4)
    return Task(nn.Sequential(*layers), torch.randn(8, width), loss, num_tokens_per_sample=tokens)


@pytest.mark.capability("K2")
@pytest.mark.parametrize(
    "found, compute, reason",
    [
        (
            [PrecisionGain("a", 3.0), PrecisionGain("a", 2.5)],
            "bf16",
            "2.5 times as fast as fp32 for a matrix product of a on rank 1",
        ),
        (
            [PrecisionGain("a", 3.0), PrecisionGain("a", 1.1)],
            "fp32",
            "bf16 is only 1.1 times as fast as fp32 for a matrix product of a on rank 1",
        ),
        (
            [PrecisionGain("a", 3.0), PrecisionGain("a", why_not="the processor has none")],
            "fp32",
            "has none on rank 1",
        ),
        ([PrecisionGain("a", why_not="too small")] * 2, "fp32", "too small"),
        ([PrecisionGain("a", 0.3)], "fp32", "only 0.3 times as fast as fp32"),
        (
            [PrecisionGain("", why_not="the model has no products"), PrecisionGain("a", 0.2)],
            "fp32",
            "on rank 1",
        ),
    ],
)
def test_all_ranks_have_to_gain(found: list[PrecisionGain], compute: str, reason: str) -> None:
    choice = choose_precision(found)
    assert choice.compute == compute and reason in choice.reason


def test_the_largest_product_of_a_micro_batch() -> None:
    recipe = Recipe(task="x", steps=1, batch={"size": 12, "shards": 5})
    made = task_of(nn.Embedding(1000, 64), nn.Linear(64, 32), nn.Conv2d(8, 16, 5), tokens=10)
    assert largest_product(recipe, made) == (30, 8 * 5 * 5, 16)
    assert largest_product(recipe, task_of(nn.BatchNorm1d(4))) is None
    assert MatrixProduct(16, 64, 64).is_small and not LARGE.is_small


@pytest.mark.parametrize(
    "text, known",
    [
        ("flags\t\t: fpu avx512f avx512_bf16 avx512_vnni", True),
        ("flags\t\t: fpu avx2 amx_bf16", True),
        ("flags\t\t: fpu avx2 avx512f", False),
        ("Features\t: fp asimd bf16", True),
        ("model name : nobody says", True),
    ],
)
def test_the_processor_says_whether_it_has_bf16(tmp_path: Path, text: str, known: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{text}\n")
    assert has_bf16(CPU, tmp_path / "cpuinfo") is known
    assert has_bf16(CPU, tmp_path / "none")


def test_a_reproducible_run_leaves_nothing_to_what_is_measured() -> None:
    recipe = Recipe(task="x", steps=1, reproducible=True)
    chosen = choose_hardware_defaults(recipe, task_of(nn.Linear(4096, 4096)), Cluster.single(), CPU)
    assert chosen.precision.compute == "fp32"


_ELSEWHERE = """
import json, sys, torch
from paceline.tuning import hardware_defaults
torch.set_num_threads(1)
product, cpu = hardware_defaults.MatrixProduct(512, 512, 512), torch.device("cpu")
gain = hardware_defaults.measure_gain(product, cpu, "bf16")
hardware_defaults.has_bf16 = lambda device: True
slow = hardware_defaults.slow_precision_warning("bf16", product, cpu)
print(json.dumps([gain, slow]))
"""


@pytest.mark.soak
def test_on_a_processor_without_bf16_the_choice_is_fp32_and_bf16_is_told_to_be_slow() -> None:
    """The real kernels of such a processor: oneDNN is held to the instructions of AVX2."""
    environment = {"ONEDNN_MAX_CPU_ISA": "AVX2", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", _ELSEWHERE], env=environment, capture_output=True, text=True, check=True
    )
    gain, slow = json.loads(done.stdout.splitlines()[-1])
    assert choose_precision([PrecisionGain("512 x 512 x 512", gain)]).compute == "fp32"
    assert 'precision.compute = "bf16" is slow here' in slow and "times as long as in fp32" in slow


def test_threads_beyond_the_cores_are_told() -> None:
    assert oversubscription_warning(0, 4, 2) == "" and oversubscription_warning(1, 2, 2) == ""
    assert "is 4.0 times the 2 cores of this host" in oversubscription_warning(4, 2, 2)
    said: list[str] = []
    recipe = Recipe(task="x", steps=1, runtime={"threads": 8 * num_cores()})
    choose_hardware_defaults(recipe, task_of(nn.Linear(4, 4)), Cluster.single(), CPU, warn=said.append)
    assert "is 8.0 times the" in said[0]
    assert said[1].startswith("precision: fp32 (matrix products are too small")
    assert slow_precision_warning("bf16", MatrixProduct(4, 4, 4), CPU) == ""


def on_two_ranks(cluster: Cluster) -> tuple[str, list[str], list[str]]:
    """The models of the ranks differ, as after a mistake of the user: the answer is still one."""
    width = (8, 1024)[cluster.global_rank]
    said: list[str] = []
    noted: list[str] = []
    recipe = Recipe(task="x", steps=1, batch={"size": 1024, "shards": 2})
    chosen = choose_hardware_defaults(
        recipe,
        task_of(nn.Linear(width, width)),
        cluster,
        CPU,
        warn=said.append,
        note=lambda name, record: noted.append(f"{name} {record.get('compute', record.get('number'))}"),
    )
    return chosen.precision.compute, said, noted


def test_ranks_agree() -> None:
    ranks = run_ranks(on_two_ranks, 2)
    assert {rank[0] for rank in ranks} == {"fp32"} and ranks[0][1] == ranks[1][1]
    threads, precision = ranks[0][1]
    assert threads.startswith("threads: ") and "on rank" in precision
    assert ranks[0][2] == [f"threads {max(1, num_cores() // 2)}", "precision fp32"]


def test_a_session_has_the_answer_and_an_explicit_choice_stays(tmp_path: Path) -> None:
    recipe = Recipe(task="digits", steps=1, options={"model": "mlp", "hidden": [8]})
    assert recipe.precision.compute == "auto"
    session = build_test_session(Cluster.single(), recipe)
    assert session.recipe.precision.compute == "fp32"
    assert [name for name, _ in session.events.take()] == ["threads", "precision", "optimizer"]
    asked = recipe.replace(precision=replace_compute(recipe, "fp16"))
    assert build_test_session(Cluster.single(), asked).recipe.precision.compute == "fp16"


def replace_compute(recipe: Recipe, compute: str) -> object:
    return recipe.precision.replace(compute=compute)


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


@pytest.mark.parametrize(("seconds_by_threads", "chosen"), [({1: 1.0, 2: 12.0}, 1), ({1: 1.0, 2: 0.6}, 2)])
def test_threads_that_wait_for_each_other_are_not_taken(
    seconds_by_threads: dict[int, float], chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is simulated: how busy the cores of this host are is not under control."""
    clock = [0.0]

    def make_runner(product: MatrixProduct, device: torch.device) -> Callable[..., None]:
        def run(*_: object) -> None:
            clock[0] += seconds_by_threads[torch.get_num_threads()]

        return run

    monkeypatch.setattr(hardware_defaults, "_product_runner", make_runner)
    monkeypatch.setattr(hardware_defaults.time, "perf_counter", lambda: clock[0])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        choice = reduce_slow_threads(ThreadChoice(2, "one process on 2 cores"), LARGE, CPU)
        assert choice.number == torch.get_num_threads() == chosen
        assert ("12.0 times as long" in choice.reason) == (chosen == 1)
        small = ThreadChoice(2, "")
        assert reduce_slow_threads(small, MatrixProduct(4, 4, 4), CPU) is small
    finally:
        torch.set_num_threads(before)
