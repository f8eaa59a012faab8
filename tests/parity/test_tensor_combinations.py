"""Tensor ranks beside replicas, shards and stages, with what training does besides: held against the oracle.

A few pairs in one warm group of four ranks; every cell, and eight ranks, are long tests.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import Task
from paceline.checkpoint.storage import StorageFolder
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.session import checkpointing, fit
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session, make_task
from paceline.verification import compare_with_oracle
from tests.parity.test_tensor import DATA, GPT, recipe, wrong_with

FOURS = {
    "replicas": "replicas=2 tensor=2",
    "shard, zero=1": "replicas=1 shard=2 zero=1 tensor=2",
    "shard, zero=2": "replicas=1 shard=2 zero=2 tensor=2",
    "shard, zero=3": "replicas=1 shard=2 zero=3 tensor=2",
    "shard, zero=3, native": "replicas=1 shard=2 zero=3 tensor=2 route=native",
    "stages": "replicas=1 tensor=2 pipeline=2",
    "stages, 1f1b": "replicas=1 tensor=2 pipeline=2 schedule=1f1b",
    "stages of replicas": "replicas=2 pipeline=2",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "clip": {},
    "bf16": {"precision": {"compute": "bf16"}},
    "fp16": {"precision": {"compute": "fp16"}},
    "recompute": {"memory": {"recompute": "blocks"}},
    "learned positions": {"options": {**GPT, **DATA, "positions": "learned"}},
    "frozen": {},
    "by position": {"tensor": {"blocks.*": "sequence"}},
}
PAIRS = [
    ("replicas", "by position"),
    ("shard, zero=2", "recompute"),
    ("shard, zero=3", "frozen"),
    ("stages", "bf16"),
    ("stages of replicas", "clip"),
]


def task_of(settings: Recipe, cell: str) -> Task:
    """Frozen: the embedding, which is the output layer too, and the queries of a block."""
    task = make_task(settings)
    if cell == "frozen":
        for name in ("embed.weight", "blocks.1.attention.qkv.weight", "blocks.0.attention_norm.weight"):
            for own, p in task.model.named_parameters():
                if own == name:
                    p.requires_grad_(False)
    return task


def wrong_in(cluster: Cluster, cells: list[tuple[str, str]], steps: int) -> dict[str, str]:
    found = {}
    for layout, cell in cells:
        settings = recipe(FOURS[layout], batch={"size": 15, "shards": 4}, **SETTINGS[cell])
        report = compare_with_oracle(settings, task_of(settings, cell), cluster, CPU, steps)
        found[f"{layout} x {cell}"] = wrong_with(report)
    return found


@pytest.mark.capability("E1", "J11", "Z1", "Z2")
def test_pairs_of_layouts_and_settings_are_those_of_one_process() -> None:
    for found in run_ranks(wrong_in, 4, PAIRS, 2):
        assert not any(found.values()), found


@pytest.mark.soak
@pytest.mark.capability("Z1", "Z2")
@pytest.mark.parametrize("layout", FOURS)
def test_every_cell_is_that_of_one_process(layout: str) -> None:
    cells = [
        (layout, cell)
        for layout, cell in product([layout], SETTINGS)
        if cell != "by position" or "pipeline" not in FOURS[layout]
    ]
    for found in run_ranks(wrong_in, 4, cells, 4):
        assert not any(found.values()), found


@pytest.mark.soak
@pytest.mark.capability("E3", "J11", "N3")
def test_two_by_two_by_two_ends_where_one_process_does(tmp_path: Path) -> None:
    """Twenty steps of AdamW with a clip and a schedule; the checkpoint is read by others."""

    def trained(cluster: Cluster, strategy: str, steps: int, resumes: bool) -> dict[str, torch.Tensor]:
        schedule = {"warmup_steps": 4, "decay": "cosine"}
        settings = recipe(strategy, steps=steps, schedule=schedule, batch={"size": 14, "shards": 4})
        session = build_test_session(cluster, settings)
        folder = tmp_path / ("one" if cluster.world_size == 1 and not resumes else "eight")
        if resumes:
            checkpointing.restore_checkpoint(session, StorageFolder(str(folder / "checkpoints")))
        else:
            fit(session, folder)
        return {name: t.clone() for name, t in session.snapshot().tensors().items()}

    (one,) = run_ranks(trained, 1, "replicas=1", 20, False)
    eight = run_ranks(trained, 8, "replicas=2 tensor=2 pipeline=2", 20, False)[0]
    for then, ranks in (("replicas=1", 1), ("replicas=4", 4), ("replicas=1 tensor=2", 2)):
        for back in run_ranks(trained, ranks, then, 20, True):
            assert all(torch.equal(back[name], value) for name, value in eight.items()), then
    weights = {name: value for name, value in one.items() if name.startswith("model/")}
    assert max(float((eight[name] - value).abs().max()) for name, value in weights.items()) <= 1e-5
