"""A key that is set and cannot act is an error or a warning: every key of a recipe is looked at here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from paceline.errors import RecipeError
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh, RankGroup
from paceline.recipe import Recipe, load_recipe
from paceline.recipe.validation import (
    SESSION_NEEDS,
    default_value,
    get_value,
    known_keys,
    list_needs,
    need_text,
)
from paceline.session.build import build_session
from paceline.session.start_warnings import find_unused_keys
from paceline.tasks import load_task

DIGITS = {"task": "digits", "steps": 1, "options": {"model": "mlp", "hidden": [8]}}


class Case(NamedTuple):
    """A value of a key that is not its default, what lets it act, and what keeps it from that."""

    value: Any
    acts_with: dict[str, Any]
    idle_with: dict[str, Any] = {}  # noqa: RUF012


FP16 = {"precision.compute": "fp16"}
SKIPS = {"health.non_finite": "skip"}
SPIKES = {"health.spike_factor": 3.0}
DILOCO = {"strategy.sync": "diloco:2"}
SERVED = {"strategy.sync": "server-async", "strategy.servers": 1}
EVALUATES = {"evaluate.every_steps": 2, "evaluate.patience": 2}
CASES = {
    "on_divergence": Case("warn", {"hash_every": 2}),
    "optimizer.betas": Case((0.8, 0.9), {"optimizer.name": "adam"}, {"optimizer.name": "sgd"}),
    "optimizer.eps": Case(1e-6, {"optimizer.name": "rmsprop"}, {"optimizer.name": "sgd"}),
    "optimizer.momentum": Case(0.5, {"optimizer.name": "sgd"}),
    "optimizer.nesterov": Case(True, {"optimizer.name": "sgd", "optimizer.momentum": 0.5}),
    "optimizer.alpha": Case(0.5, {"optimizer.name": "rmsprop"}),
    "optimizer.final_lr": Case(0.5, {"optimizer.name": "adabound"}),
    "optimizer.gamma": Case(0.5, {"optimizer.name": "adabound"}),
    "optimizer.weight_decay": Case(0.5, {}, {"optimizer.name": "sgd"}),
    "optimizer.l2": Case(0.5, {"optimizer.name": "sgd"}),
    "optimizer.decay_on": Case("all", {"optimizer.weight_decay": 0.1}),
    "schedule.warmup_from": Case(0.5, {"schedule.warmup_steps": 2}),
    "schedule.final": Case(0.5, {"schedule.decay": "linear"}),
    "schedule.rate": Case(0.5, {"schedule.decay": "exponential"}),
    "schedule.cycle_steps": Case(3, {"schedule.decay": "cosine"}, {"schedule.decay": "linear"}),
    "schedule.cycle_factor": Case(2, {"schedule.decay": "cosine", "schedule.cycle_steps": 3}),
    "schedule.base_batch": Case(8, {"schedule.batch_scaling": "sqrt"}),
    "precision.init_scale": Case(1024.0, FP16, {"precision.compute": "fp32"}),
    "precision.growth_steps": Case(7, FP16, {"precision.compute": "bf16"}),
    "loader.prefetch": Case(5, {"loader.workers": 1}),
    "evaluate.patience": Case(3, {"evaluate.every_steps": 2}),
    "evaluate.metric": Case("accuracy", EVALUATES),
    "evaluate.better": Case("higher", {"evaluate.every_steps": 2, "checkpoint.keep_best": 1}),
    "checkpoint.keep_best": Case(1, {"evaluate.every_steps": 2}),
    "health.non_finite": Case("skip", {}, SERVED),
    "health.spike_factor": Case(3.0, {}, SERVED),
    "health.spike": Case("skip", SPIKES),
    "health.spike_window": Case(8, SPIKES),
    "health.max_skips": Case(2, SKIPS),
    "health.rate_factor": Case(0.25, {"health.non_finite": "lower-rate"}, SKIPS),
    "health.max_lowerings": Case(2, {"health.non_finite": "lower-rate"}, SKIPS),
    "health.max_roll_backs": Case(2, {"health.non_finite": "roll-back"}, SKIPS),
    "health.straggler_factor": Case(2.0, {}, SERVED),
    "outer.lr": Case(0.5, DILOCO, {"strategy.sync": "local:2"}),
    "outer.momentum": Case(0.5, DILOCO),
    "outer.fragments": Case(2, DILOCO, {"strategy.sync": "local:2"}),
    "outer.delay_steps": Case(1, DILOCO, {"strategy.sync": "local:2"}),
    "outer.mixing": Case(0.5, DILOCO),
    "security.certificate": Case("certificate", {**SERVED, "strategy.channel": "grpc"}),
    "debug.replay_arrivals": Case("runs/one", SERVED),
    "runtime.bucket_bytes": Case(1024, {}, SERVED),
    "runtime.bucket_latency": Case(0.05, {}, {"strategy.codec": "int8"}),
    "runtime.link_profile": Case("links.json", {}, {"strategy.route": "ring"}),
}


def recipe(**keys: Any) -> Recipe:
    """A recipe of dotted keys."""
    values: dict[str, Any] = dict(DIGITS)
    for key, value in keys.items():
        table, _, name = key.rpartition(".")
        (values.setdefault(table, {}) if table else values)[name] = value
    return Recipe(**values)


def test_there_is_a_case_for_every_key_that_does_not_always_act() -> None:
    assert {key for key, _ in list_needs(Recipe)} == set(CASES)
    assert set(CASES) | set(SESSION_NEEDS) <= set(known_keys(Recipe))
    assert all(case.value != default_value(Recipe, key) for key, case in CASES.items())


@pytest.mark.parametrize("key", CASES)
def test_a_key_that_cannot_act_is_an_error_that_names_it_and_what_it_needs(key: str) -> None:
    value, acts_with, idle_with = CASES[key]
    assert get_value(recipe(**{key: value}, **acts_with), key) == value
    with pytest.raises(RecipeError, match=rf"{key}: expected only {need_text(Recipe, key)}"):
        recipe(**{key: value}, **idle_with)
    unset = {key: default_value(Recipe, key)}
    assert get_value(recipe(**unset, **idle_with), key) == default_value(Recipe, key)


@pytest.mark.parametrize("key", CASES)
def test_what_is_typed_takes_out_what_can_no_longer_act(key: str, tmp_path: Path) -> None:
    """A file with the key and all that it needs, and an override that takes that away."""
    from paceline.recipe import to_toml

    value, acts_with, idle_with = CASES[key]
    (tmp_path / "a.toml").write_text(to_toml(recipe(**{key: value}, **acts_with)))
    taken = {name: default_value(Recipe, name) for name in acts_with} | idle_with
    typed = [f"{name}={'' if v is None else str(v).lower()}" for name, v in taken.items()]
    if typed:
        assert get_value(load_recipe(tmp_path / "a.toml", typed), key) == default_value(Recipe, key)


# What only the task and the processes can tell

HERE_CASES: dict[str, Any] = {
    "batch.sync_batchnorm": True,
    "evaluate.every_steps": 3,
    "evaluate.batch": 5,
    "evaluate.max_samples": 7,
    "security.tls": "on",
    "tensor": {"layers.0": "column"},
    "strategy.balance": "speed",
    "strategy.codec": "int8",
    "strategy.route": "tree",
    "runtime.bucket_bytes": 1024,
    "runtime.bucket_latency": 0.05,
    "runtime.link_profile": "links.json",
}


def said(key: str, value: Any, held_out: bool = False) -> list[str]:
    """What building a session on one rank says of a key."""
    chosen = recipe(**{key: value, "runtime.device": "cpu"})
    task = load_task("digits", dict(chosen.options), 1, Path.cwd(), Path.cwd())
    task = task if held_out else replace(task, held_out=None)
    told: list[str] = []
    build_session(chosen, task, Cluster.single(), torch.device("cpu"), warn=told.append).close()
    return [text for text in told if text.startswith(f"{key} = ")]


def test_there_is_a_case_for_every_key_of_the_task_and_the_processes() -> None:
    assert set(HERE_CASES) == set(SESSION_NEEDS)


@pytest.mark.parametrize("key", HERE_CASES)
def test_a_key_that_cannot_act_here_is_named_when_the_session_is_built(key: str) -> None:
    (text,) = said(key, HERE_CASES[key])
    assert "has no effect: " in text
    if key.startswith("evaluate"):
        assert said(key, HERE_CASES[key], held_out=True) == []


def two(axis: str) -> Mesh:
    """Two ranks along an axis."""
    alone, both = RankGroup("", (0,), 0), RankGroup("", (0, 1), 0)
    axes = {name: both if name == axis else alone for name in ("replica", "shard", "tensor", "pipeline")}
    shares = axis in ("replica", "shard")
    return Mesh(both, axes, both if shares else alone, alone if axis == "replica" else both)


@pytest.mark.parametrize(
    ("strategy", "axis", "idle"),
    [
        ("replicas=2 codec=int8 route=tree", "replica", []),
        ("replicas=1 shard=2 zero=1 codec=int8 route=tree", "shard", []),
        ("replicas=1 pipeline=2 codec=int8 route=tree", "pipeline", ["strategy.codec", "strategy.route"]),
        ("replicas=1 tensor=2 codec=int8 route=tree", "tensor", ["strategy.codec"]),
        ("replicas=2 sync=local:2", "replica", []),
        ("replicas=1 pipeline=2 sync=local:2", "pipeline", ["strategy.sync"]),
        ("replicas=1 pipeline=2 sync=diloco:2", "pipeline", []),
    ],
)
def test_what_acts_depends_on_who_sends_what(strategy: str, axis: str, idle: list[str]) -> None:
    chosen = Recipe(**DIGITS, strategy=strategy)
    task = load_task("digits", dict(chosen.options), 1, Path.cwd(), Path.cwd())
    assert [text.partition(" = ")[0] for text in find_unused_keys(chosen, task, two(axis))] == idle
