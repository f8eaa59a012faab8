"""Verification finds planted mistakes, names them, raises no false alarm, and shares nothing it judges."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch

from paceline.comm.reduction import gradient_norm
from paceline.data import sample_reader, work
from paceline.job.cluster import Cluster
from paceline.models.dropout import KeyedDropout
from paceline.optim import lr_schedule
from paceline.recipe import Recipe
from paceline.session import build_session
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, make_task
from paceline.testing.planted_faults import PLANTED_FAULTS
from paceline.verification import StrategyVerifier, VerificationReport, build_oracle, compare_with_oracle
from paceline.verification.verification_report import certificate, conclusion_lines
from tests.marks import soak_param
from tests.parity.correct_tasks import random_data


def convnet(**changes: object) -> Recipe:
    """BatchNorm and dropout, unequal shares, a clip and a schedule: every mistake can show."""
    settings: dict[str, object] = {
        "task": "digits",
        "options": {"model": "convnet", "dropout": 0.2},
        "steps": 40,
        "batch": {"size": 27, "shards": 4},
        "optimizer": {"name": "adamw", "lr": 3e-3, "clip_norm": 0.5},
        "schedule": {"decay": "cosine"},
    }
    return Recipe(**(settings | changes))


def check(cluster: Cluster, recipe: Recipe, steps: int, fault: str | None = None) -> VerificationReport:
    components = PLANTED_FAULTS[fault].components(cluster.world_size) if fault is not None else None
    return compare_with_oracle(recipe, make_task(recipe), cluster, CPU, steps, components=components)


@pytest.mark.capability("Z2")
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_every_planted_fault_is_found_within_three_steps_and_named(world: int) -> None:
    def all_faults(cluster: Cluster) -> dict[str, VerificationReport]:
        faults = [
            fault for fault, planted in PLANTED_FAULTS.items() if not (planted.of_clients or planted.of_norms)
        ]
        return {fault: check(cluster, convnet(), 4, fault) for fault in faults}

    reports = run_ranks(all_faults, world, deadline=400)[0]
    missed = [fault for fault, report in reports.items() if report.ok or report.failure.step > 2]
    assert not missed
    named = [f for f, report in reports.items() if report.diagnosis.cause in PLANTED_FAULTS[f].causes]
    assert len(named) >= 16, {f: r.diagnosis.cause for f, r in reports.items() if f not in named}
    assert len(PLANTED_FAULTS) >= 20


@pytest.mark.capability("Z2")
@pytest.mark.parametrize("seeds", [range(1), soak_param(range(1, 4))], ids=["one seed", "three more"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"options": {"model": "mlp", "dropout": 0.1}},
        {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}},
        {"precision": {"compute": "bf16"}},
        {"batch": {"size": 27, "shards": 4, "reduction": "sum"}, "optimizer": {"name": "sgd", "lr": 1e-3}},
    ],
    ids=["convnet", "mlp", "sgd", "bf16", "sum"],
)
def test_no_false_alarm(changes: dict[str, object], seeds: range) -> None:
    """Four seeds each in `make soak`: with the five configurations, twenty clean runs."""

    def of_seeds(cluster: Cluster) -> list[VerificationReport]:
        return [check(cluster, convnet(seed=seed, **changes), 4) for seed in seeds]

    for report in run_ranks(of_seeds, 2, deadline=400)[0]:
        assert report.ok, conclusion_lines(report)
        assert report.steps == 4


def test_every_rank_gets_the_same_report() -> None:
    reports = run_ranks(check, 3, convnet(), 3, "bucket-not-reduced")
    assert len({repr(certificate(report)) for report in reports}) == 1


def test_a_different_start_is_found_before_the_first_step() -> None:
    def start_apart(cluster: Cluster) -> VerificationReport:
        recipe, task = convnet(), make_task(convnet())

        oracle = build_oracle(recipe, make_task(recipe), CPU)
        session = build_session(recipe, task, cluster, CPU)
        with torch.no_grad():
            if cluster.global_rank == 1:
                next(iter(session.runner.sharded_model.computes.values()))[0] += 1.0
        return StrategyVerifier(session, oracle).run(2)

    report = run_ranks(start_apart, 2)[0]
    assert report.failure.quantity == "initial value" and report.failure.errors[0] == 0.0
    assert report.failure.errors[1] == pytest.approx(1.0)
    assert report.diagnosis.cause == "different start"


def test_the_certificate_says_what_was_compared() -> None:
    report = check(Cluster.single(), convnet(), 2)
    found = certificate(report)
    assert found["ok"] and found["steps"] == 2 and found["failure"] is None
    quantities = {row["quantity"] for row in found["tensors"]}
    assert quantities == {"initial value", "loss", "gradient", "update", "final gradient", "state"}
    assert any("running_mean" in row["tensor"] for row in found["tensors"])
    assert conclusion_lines(report)[0].startswith("verified: 2 steps")


@pytest.mark.capability("K1")
def test_fp16_steps_that_overflow_are_skipped_alike_and_verified() -> None:
    recipe = convnet(precision={"compute": "fp16", "init_scale": 2.0**40})
    report = run_ranks(check, 2, recipe, 3)[0]
    assert report.ok, conclusion_lines(report)


def scaled(function: Callable[..., Any], factor: float) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs) * factor


def breaks() -> dict[str, tuple[Any, str, Any]]:
    """What is broken: the owner, the name, and what is put there."""
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


def check_broken(cluster: Cluster, name: str) -> VerificationReport:
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
        return [name for name in NAMES if check_broken(cluster, name).ok]

    assert run_ranks(all_of_them, 2)[0] == []
