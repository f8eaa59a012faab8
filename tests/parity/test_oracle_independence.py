"""The oracle takes nothing from the session that it judges: a part that is broken turns verify red."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch

from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.testing import run_ranks
from paceline.testing.parity import CPU
from paceline.verification import VerificationReport, compare_with_oracle
from tests.parity.correct_tasks import random_data
from tests.parity.test_verification import convnet, make_task


def scaled(function: Callable[..., Any], factor: float) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs) * factor


def breaks() -> dict[str, tuple[Any, str, Any]]:
    """What is broken: the owner, the name, and what is put there."""
    from paceline.comm.reduction import gradient_norm
    from paceline.data import sample_reader, work
    from paceline.models.dropout import KeyedDropout
    from paceline.optim import lr_schedule

    take_key, read = KeyedDropout.take_key, sample_reader.key
    # The package exports a function of the same name as the module.
    build_optimizer = import_module("paceline.optim.build_optimizer")
    decays = build_optimizer.is_decayed
    return {
        "rows of the norm": (gradient_norm, "row_squares", scaled(gradient_norm.row_squares, 1 + 1e-9)),
        "schedule": (
            lr_schedule.LearningRateSchedule,
            "factor",
            scaled(lr_schedule.LearningRateSchedule.factor, 1 + 1e-6),
        ),
        "cosine": (lr_schedule, "cosine", scaled(lr_schedule.cosine, 0.999)),
        "dealing": (
            work,
            "split_evenly",
            lambda n, parts, part: range(
                n * part // parts, max(n * part // parts, n * (part + 1) // parts - (part == 1))
            ),
        ),
        "key of a micro-batch": (work, "key", lambda *words: 17),
        "key of dropout": (KeyedDropout, "take_key", lambda self, key: take_key(self, key + 1)),
        "key of the loader": (sample_reader, "key", lambda *words: read(*words) + 1),
        "which decay": (build_optimizer, "is_decayed", lambda p, on: not decays(p, on)),
        "optimizer": (
            build_optimizer,
            "adamw",
            lambda model, groups, r, fused: torch.optim.AdamW(groups, r.lr, eps=1e-3),
        ),
    }


NAMES = ("rows of the norm", "schedule", "cosine", "dealing", "key of a micro-batch", "key of dropout",
         "key of the loader", "which decay", "optimizer")  # fmt: skip


def check(cluster: Cluster, name: str) -> VerificationReport:
    settings: dict[str, Any] = {"reproducible": True} if name == "rows of the norm" else {}
    settings |= {"optimizer": {"name": "adamw", "lr": 3e-3, "clip_norm": 0.5, "weight_decay": 0.1}}
    recipe: Recipe = convnet(**settings)
    task = random_data() if name == "key of the loader" else make_task(recipe)
    owner, attribute, broken = breaks()[name]
    with patch.object(owner, attribute, broken):
        return compare_with_oracle(recipe, task, cluster, CPU, 3)


@pytest.mark.capability("Z2")
def test_a_part_that_is_broken_at_its_source_is_found() -> None:
    def all_of_them(cluster: Cluster) -> list[str]:
        return [name for name in NAMES if check(cluster, name).ok]

    assert run_ranks(all_of_them, 2)[0] == []
