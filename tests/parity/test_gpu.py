"""On one NVIDIA GPU a run is what the oracle computes there, is resumed, observed, and generates text."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.serving.engine import GenerationRequest
from paceline.serving.sampling import SamplingOptions
from paceline.serving.slot_forward import CachedForward, build_engine
from paceline.testing.parity import make_task
from paceline.verification import compare_with_oracle
from tests.commands import run
from tests.request_mixes import VOCAB, small_gpt
from tests.texts import SMALL_TEXT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
OPTIONS = {"text": SMALL_TEXT, "context": 64, "layers": 2, "heads": 2, "width": 32, "held_out_tokens": 4096}
OPTIONS |= {"train_tokens": 200_000, "dropout": 0.1}
RECIPE = f"""
task = "byte-gpt"
steps = 8
[options]
text = "{SMALL_TEXT}"
context = 64
layers = 2
heads = 2
width = 32
dropout = 0.1
held_out_tokens = 4096
train_tokens = 200000
[batch]
size = 8
shards = 4
[optimizer]
lr = 1e-3
clip_norm = 1.0
[checkpoint]
every_steps = 4
[runtime]
device = "cuda"
[log]
sample_seconds = 0.2
"""


def gpt(**changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "task": "byte-gpt",
        "options": OPTIONS,
        "steps": 12,
        "batch": {"size": 8, "shards": 4},
        "optimizer": {"name": "adamw", "lr": 1e-3, "clip_norm": 1.0},
        "runtime": {"device": "cuda"},
    }
    return Recipe(**(settings | changes))


@pytest.mark.capability("Z2", "K1", "K2")
@pytest.mark.parametrize(
    "changes",
    [
        {"precision": {"compute": "fp32"}},
        {"precision": {"compute": "bf16"}},
        {"precision": {"compute": "fp16"}},
        {"precision": {"compute": "fp32"}, "memory": {"recompute": "blocks"}},
    ],
    ids=["fp32", "bf16", "fp16", "recompute"],
)
def test_steps_on_a_gpu_are_those_of_the_oracle(changes: dict[str, Any]) -> None:
    recipe = gpt(**changes)
    device = torch.device("cuda", 0)
    report = compare_with_oracle(recipe, make_task(recipe), Cluster.single(), device, 6)
    assert report.ok and report.steps == 6, report.diagnosis


def rows_of(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.mark.capability("N1")
def test_a_run_on_a_gpu_is_resumed_to_the_same_bits(tmp_path: Path) -> None:
    """Also: the rank reports the memory of its GPU, and the sampler its counters."""
    (tmp_path / "gpu.toml").write_text(RECIPE)
    assert run(tmp_path, "train", "gpu.toml", "--name", "whole", anew=True).returncode == 0
    (whole,) = tmp_path.glob("runs/*-whole")
    assert run(tmp_path, "train", "gpu.toml", "--name", "half", "--set", "steps=4", anew=True).returncode == 0
    (half,) = tmp_path.glob("runs/*-half")
    assert run(tmp_path, "train", "--resume", half, "--set", "steps=8", anew=True).returncode == 0
    losses = [
        {row["step"]: row["loss"] for row in rows_of(folder) if row.get("event") == "step"}
        for folder in (whole, half)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 8
    rows = [row for row in rows_of(whole, "system.jsonl") if row["event"] == "system"]
    assert rows and all(row["gpu_memory_bytes"]["0"] > 0 for row in rows), rows[:1]


@pytest.mark.capability("W4")
@pytest.mark.parametrize("attention", ["masked", "by_slot"])
def test_a_text_on_a_gpu_is_the_same_beside_others(attention: Any) -> None:
    """Of 24 requests through four slots, each has the tokens that it has alone."""
    build = partial(build_engine, small_gpt().cuda(), context=64, slots=4, chunk=8, attention=attention)
    requests = [
        GenerationRequest(tuple((5 * i + k) % VOCAB for k in range(1 + i)), 20, SamplingOptions(seed=i))
        for i in range(24)
    ]
    engine = build()
    assert isinstance(engine.forward, CachedForward)
    together = [engine.submit(request) for request in requests]
    engine.run()
    for request, beside in zip(requests, together, strict=True):
        alone = build()
        ticket = alone.submit(request)
        alone.run()
        assert ticket.tokens == beside.tokens
