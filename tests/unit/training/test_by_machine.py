"""The number format that follows from the machine: decided alike on all ranks, with its reason."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.job.cluster import Cluster
from paceline.job.cpu_count import num_cores
from paceline.recipe import Recipe
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session
from paceline.tuning.hardware_defaults import (
    MatrixProduct,
    PrecisionGain,
    choose_hardware_defaults,
    choose_precision,
    has_bf16,
    largest_product,
    oversubscription_warning,
    slow_precision_warning,
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
