"""Keys that have no effect, or contradict others: every need of every key of a recipe has a case here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from paceline.errors import RecipeError
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh, RankGroup
from paceline.recipe import Recipe, Strategy, load_recipe, support
from paceline.recipe.validation import FieldNeed, NeedScope, default_value, get_value, list_needs
from paceline.session.build import build_session
from paceline.session.start_warnings import find_unused_keys
from paceline.tasks import load_task

DIGITS = {"task": "digits", "steps": 1, "options": {"model": "mlp", "hidden": [8]}}


class Case(NamedTuple):
    """A value of a key that is not its default, keys with which it has an effect, and keys with which not."""

    value: Any
    acts_with: dict[str, Any]
    idle_with: dict[str, Any] = {}  # noqa: RUF012


def needs_of(*scopes: NeedScope, is_conflict: bool = False) -> dict[str, list[FieldNeed]]:
    """The needs of some scopes by key."""
    found: dict[str, list[FieldNeed]] = {}
    for key, need in list_needs(Recipe):
        if need.scope in scopes and need.is_conflict == is_conflict:
            found.setdefault(key, []).append(need)
    return found


FP16 = {"precision.compute": "fp16"}
SKIPS = {"health.non_finite": "skip"}
SPIKES = {"health.spike_factor": 3.0}
DILOCO = {"strategy.sync": "diloco:2"}
FEDERATED = {"strategy.sync": "federated:2"}
NETWORK = {**FEDERATED, "strategy.channel": "grpc", "federated.clients": "network"}
MASKS = {**FEDERATED, "federated.secure": "masks"}
PRIVATE = {**FEDERATED, "federated.weights": "equal"}
NOISY = {**PRIVATE, "private.noise": 1.0}
SAMPLES = {"private.noise": 1.0, "private.unit": "sample"}
FED_ADAM = {**FEDERATED, "outer.name": "adam"}
SERVED = {"strategy.sync": "server-async", "strategy.servers": 1}
EVALUATES = {"evaluate.every_steps": 2, "evaluate.patience": 2}
ONE_CYCLE = {"schedule.decay": "one_cycle"}
PLATEAU = {"schedule.decay": "plateau", "evaluate.every_steps": 2}
RL: tuple[dict[str, Any], dict[str, Any]] = {"rl.total_steps": 8192, "steps": None}, {"steps": 1}
RL_DQN = {**RL[0], "rl.algorithm": "dqn"}
PRUNES = {"sparsity.target": 0.5, "sparsity.last": 9, "steps": 10}
CASES = {
    **{
        f"rl.{key}": Case(value, *RL)
        for key, value in {
            "env": "CartPole-v1",
            "envs": 64,
            "shards": 4,
            "steps": 128,
            "check": False,
            "age": 2,
            "normalize": ("rewards",),
            "algorithm": "dqn",
            "ppo.epochs": 3,
            "ppo.minibatches": 8,
            "ppo.clip": 0.1,
            "ppo.gamma": 0.9,
            "ppo.gae": 0.9,
            "ppo.entropy": 0.1,
            "ppo.value": 0.1,
        }.items()
    },
    **{
        f"rl.dqn.{key}": Case(value, RL_DQN, RL[0])
        for key, value in {
            "batch": 32,
            "updates": 8,
            "capacity": 4096,
            "start": 500,
            "gamma": 0.9,
            "n_step": 2,
            "target_every": 4,
            "epsilon": 0.1,
            "epsilon_fraction": 0.5,
            "priority": 0.5,
        }.items()
    },
    "rl.dqn.beta": Case(0.5, {**RL_DQN, "rl.dqn.priority": 0.6}, RL_DQN),
    "on_divergence": Case("warn", {"hash_every": 2}),
    "optimizer.betas": Case((0.8, 0.9), {"optimizer.name": "adam"}, {"optimizer.name": "sgd"}),
    "optimizer.eps": Case(1e-6, {"optimizer.name": "rmsprop"}, {"optimizer.name": "sgd"}),
    "optimizer.momentum": Case(0.5, {"optimizer.name": "sgd"}),
    "optimizer.nesterov": Case(True, {"optimizer.name": "sgd", "optimizer.momentum": 0.5}),
    "optimizer.alpha": Case(0.5, {"optimizer.name": "rmsprop"}),
    "optimizer.final_lr": Case(0.5, {"optimizer.name": "adabound"}),
    "optimizer.gamma": Case(0.5, {"optimizer.name": "adabound"}),
    "optimizer.weight_decay": Case(0.5, {}, {"optimizer.name": "adam"}),
    "optimizer.rho": Case(0.5, {"optimizer.name": "adadelta"}),
    "optimizer.momentum_decay": Case(0.5, {"optimizer.name": "nadam"}),
    "optimizer.lambd": Case(0.5, {"optimizer.name": "asgd"}),
    "optimizer.etas": Case((0.4, 1.5), {"optimizer.name": "rprop"}),
    "optimizer.step_sizes": Case((1e-4, 5.0), {"optimizer.name": "rprop"}),
    "optimizer.beta2_decay": Case(-0.5, {"optimizer.name": "adafactor"}),
    "optimizer.d": Case(2.0, {"optimizer.name": "adafactor"}),
    "optimizer.adjust_lr_fn": Case("original", {"optimizer.name": "muon"}),
    "optimizer.adamw_on": Case(("head.*",), {"optimizer.name": "muon"}),
    "optimizer.trust_coefficient": Case(0.01, {"optimizer.name": "lars"}),
    "optimizer.exclude": Case(("embeddings",), {"optimizer.name": "lamb"}),
    "optimizer.switch_update": Case(5, {"optimizer.name": "adam_to_sgd"}),
    "optimizer.damping": Case(0.1, {"optimizer.name": "kfac"}),
    "optimizer.factor_decay": Case(0.5, {"optimizer.name": "kfac"}),
    "optimizer.factor_interval": Case(2, {"optimizer.name": "kfac"}),
    "optimizer.inverse_interval": Case(5, {"optimizer.name": "kfac"}),
    "optimizer.kl_clip": Case(0.1, {"optimizer.name": "kfac"}),
    "optimizer.max_cg_steps": Case(5, {"optimizer.name": "newton_cg"}),
    "optimizer.l2": Case(0.5, {"optimizer.name": "sgd"}),
    "optimizer.decay_on": Case("all", {"optimizer.weight_decay": 0.1}),
    "sparsity.first": Case(2, PRUNES),
    "sparsity.last": Case(9, {"sparsity.target": 0.5, "steps": 10}),
    "sparsity.every": Case(3, PRUNES),
    "sparsity.exclude": Case(("embeddings",), PRUNES),
    "schedule.warmup_from": Case(0.5, {"schedule.warmup_steps": 2}),
    "schedule.final": Case(0.5, {"schedule.decay": "linear"}),
    "schedule.warmup_steps": Case(3, {}, {"schedule.decay": "one_cycle"}),
    "schedule.pct_start": Case(0.5, ONE_CYCLE),
    "schedule.div_factor": Case(5.0, ONE_CYCLE),
    "schedule.final_div_factor": Case(5.0, ONE_CYCLE),
    "schedule.anneal_strategy": Case("linear", ONE_CYCLE),
    "schedule.metric": Case("accuracy", PLATEAU),
    "schedule.better": Case("higher", PLATEAU),
    "schedule.factor": Case(0.5, PLATEAU),
    "schedule.patience": Case(2, PLATEAU),
    "schedule.threshold": Case(0.1, PLATEAU),
    "schedule.threshold_mode": Case("abs", PLATEAU),
    "schedule.cooldown": Case(2, PLATEAU),
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
    "batch.size": Case(64, {}, FEDERATED),
    "batch.shards": Case(2, {}, FEDERATED),
    "batch.accumulation": Case(2, {}, FEDERATED),
    "batch.drop_last": Case(True, {}, FEDERATED),
    **{
        f"private.{key}": Case(value, {**PRIVATE, "private.noise": 1.0}, PRIVATE)
        for key, value in {"clip_norm": 0.5, "delta": 1e-6, "budget": 8.0}.items()
    },
    "private.unit": Case("sample", {"private.noise": 1.0}),
    "federated.clients": Case(50, FEDERATED),
    "federated.partition": Case("dirichlet:0.3", FEDERATED),
    "federated.cohort": Case(0.2, FEDERATED),
    "federated.batch": Case(5, FEDERATED),
    "federated.local_steps": Case(20, FEDERATED),
    "federated.full": Case(True, FEDERATED),
    "federated.weights": Case("equal", FEDERATED),
    "federated.proximal": Case(0.1, FEDERATED),
    "federated.clip_norm": Case(1.0, FEDERATED),
    "federated.held_out": Case(0.2, FEDERATED),
    "federated.vectorize": Case(5, FEDERATED),
    "federated.secure": Case("masks", FEDERATED),
    "federated.threshold": Case(0.8, MASKS, {**FEDERATED, "federated.secure": "ring"}),
    "federated.neighbours": Case(4, MASKS, {**FEDERATED, "federated.secure": "ring"}),
    "federated.ring": Case(32, MASKS, FEDERATED),
    "federated.fraction_bits": Case(16, MASKS, FEDERATED),
    "federated.largest": Case(2.0, MASKS, FEDERATED),
    "debug.entropy_seed": Case(1, MASKS, FEDERATED),
    "federated.at_least": Case(3, NETWORK),
    "federated.listen": Case("127.0.0.1:29600", NETWORK),
    "federated.deadline_seconds": Case(3.0, NETWORK),
    "federated.buffer": Case(5, NETWORK),
    "federated.age": Case(2, {**NETWORK, "federated.buffer": 5}),
    "log.wire": Case(True, NETWORK),
    "outer.name": Case("yogi", FEDERATED),
    "outer.betas": Case((0.8, 0.9), FED_ADAM),
    "outer.eps": Case(0.1, FED_ADAM),
    "outer.lr": Case(0.5, DILOCO, {"strategy.sync": "local:2"}),
    "outer.momentum": Case(0.5, DILOCO),
    "outer.fragments": Case(2, DILOCO, {"strategy.sync": "local:2"}),
    "outer.delay_steps": Case(1, DILOCO, {"strategy.sync": "local:2"}),
    "outer.mixing": Case(0.5, DILOCO),
    "security.certificate": Case("certificate", {**SERVED, "strategy.channel": "grpc"}),
    "elastic.max_restarts": Case(1, {}, {"elastic.mode": "off"}),
    "elastic.min_processes": Case(2, {}, {"elastic.mode": "off"}),
    "elastic.redundancy": Case("buddy", {"strategy.shard": 2, "strategy.zero": 1}),
    "debug.replay_arrivals": Case("runs/one", SERVED),
    "runtime.bucket_bytes": Case(1024, {}, SERVED),
    "runtime.bucket_latency": Case(0.05, {}, {"strategy.codec": "int8"}),
    "runtime.link_profile": Case("links.json", {}, {"strategy.route": "ring"}),
}


def recipe(**keys: Any) -> Recipe:
    """A recipe of dotted keys."""
    values: dict[str, Any] = dict(DIGITS)
    for key, value in keys.items():
        *tables, name = key.split(".")
        inner = values
        for table in tables:
            inner = inner.setdefault(table, {})
        inner[name] = value
    return Recipe(**values)


def test_there_is_a_case_for_every_key_that_may_have_no_effect() -> None:
    assert set(needs_of("table", "recipe")) == set(CASES) | {"steps", "epochs"}  # see the test of rl below
    assert set(needs_of("table", "recipe", is_conflict=True)) == {key for key, *_ in CONFLICTS}
    assert set(needs_of("strategy")) == set(STRATEGY_CASES)
    assert set(needs_of("session")) == set(SESSION_CASES)
    assert len(list_needs(Recipe)) == len(
        [need for _, need in list_needs(Recipe) if need.only or need.reason]
    )
    assert all(case.value != default_value(Recipe, key) for key, case in CASES.items())


@pytest.mark.parametrize("key", CASES)
def test_a_key_without_effect_is_an_error_that_names_it_and_what_it_needs(key: str) -> None:
    value, acts_with, idle_with = CASES[key]
    assert get_value(recipe(**{key: value}, **acts_with), key) == value
    needed = "|".join(need.only for need in needs_of("table", "recipe")[key])
    with pytest.raises(RecipeError, match=f"{key}: expected only ({needed})"):
        recipe(**{key: value}, **idle_with)
    unset = {key: default_value(Recipe, key)}
    assert get_value(recipe(**unset, **idle_with), key) == default_value(Recipe, key)


@pytest.mark.parametrize("key", CASES)
def test_what_is_typed_takes_out_what_can_no_longer_act(key: str, tmp_path: Path) -> None:
    """A file with the key and all that it needs, and an override that takes that away."""
    from paceline.recipe import to_toml

    value, acts_with, idle_with = CASES[key]
    (tmp_path / "a.toml").write_text(to_toml(recipe(**{key: value}, **acts_with)))
    # A run has a length in any case.
    taken = {name: default_value(Recipe, name) for name in acts_with if name != "steps"} | idle_with
    typed = [f"{name}={'' if v is None else str(v).lower()}" for name, v in taken.items()]
    if typed:
        assert get_value(load_recipe(tmp_path / "a.toml", typed), key) == default_value(Recipe, key)


# Contradictions: the key, what contradicts, and the key that the error asks to change

CONFLICTS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("batch.shards", {"batch.shards": 64}, "batch.shards: expected at most batch.size = 32, found 64"),
    (
        "batch.accumulation",
        {"batch.accumulation": 64},
        "batch.accumulation: expected at most batch.size = 32",
    ),
    ("batch.accumulation", {"batch.accumulation": 2, "batch.shards": 2}, "expected one of both"),
    ("batch.sync_batchnorm", {"batch.sync_batchnorm": True, "reproducible": True}, "with this reproducible"),
    (
        "optimizer.switch_update",
        {"optimizer.name": "adam_to_sgd"},
        "expected a number of updates, or schedule",
    ),
    (
        "batch.sync_batchnorm",
        {"batch.sync_batchnorm": True, "batch.accumulation": 2},
        "with this batch.accumu",
    ),
    ("batch.sync_batchnorm", {"batch.sync_batchnorm": True, "strategy": "tensor=2"}, "with this strategy"),
    (
        "batch.sync_batchnorm",
        {"batch.sync_batchnorm": True, "strategy.balance": "speed"},
        "with this strategy",
    ),
    ("batch.sync_batchnorm", {"batch.sync_batchnorm": True, "memory.recompute": "blocks"}, "this memory.rec"),
    (
        "batch.sync_batchnorm",
        {"batch.sync_batchnorm": True, "runtime.compile": True},
        "with this runtime.comp",
    ),
    (
        "optimizer.nesterov",
        {"optimizer.name": "sgd", "optimizer.nesterov": True},
        "optimizer.nesterov: expected mom",
    ),
    ("optimizer.l2", {"optimizer.name": "sgd", "optimizer.l2": 0.1, "optimizer.weight_decay": 0.1}, "one of"),
    (
        "optimizer.clip_value",
        {"optimizer.clip_value": 1.0, "optimizer.clip_norm": 1.0},
        "expected one of both",
    ),
    ("schedule", {"optimizer.name": "rprop", "schedule.decay": "linear"}, "schedule: expected no schedule"),
    ("health", {"optimizer.name": "rprop", "health.non_finite": "lower-rate"}, "health: expected another"),
    ("schedule.decay", {"schedule.decay": "plateau"}, "evaluate.every_steps: expected evaluate.every_steps"),
    ("schedule.decay", {"schedule.decay": "exponential"}, "schedule.rate: expected above 0"),
    ("schedule.batch_scaling", {"schedule.batch_scaling": "sqrt"}, "schedule.base_batch: expected with"),
    ("memory.recompute", {"memory.recompute": "segments", "runtime.compile": True}, 'expected "blocks"'),
    ("sparsity.target", {**PRUNES, "strategy": "tensor=2"}, "expected replicas, or shard with zero"),
    ("sparsity.target", {**PRUNES, "strategy": "codec=int8"}, "sync=every-step and codec=fp32, found"),
    ("sparsity.target", {**PRUNES, "average.decay": 0.9}, "expected no average.decay, found 0.9"),
    ("sparsity.target", {**PRUNES, "sparsity.target": 1.0}, "a finite number > 0 and < 1, found 1.0"),
    ("sparsity.last", {"sparsity.target": 0.5}, "a number of updates with sparsity.target = 0.5"),
    ("sparsity.last", {**PRUNES, "sparsity.first": 9}, "more than sparsity.first = 9, found 9"),
    ("sparsity.last", {**PRUNES, "steps": 8}, "at most steps = 8, found 9"),
    ("precision.compute", {**FP16, **FEDERATED}, "would have to find a loss scale of its own"),
    ("task", {"task": "rl"}, "rl.total_steps: expected rl.total_steps with task"),
    ("rl.dqn.capacity", {**RL_DQN, "rl.dqn.capacity": 2047}, "rl.envs * rl.steps = 2048 rows, found 2047"),
    ("rl.dqn.start", {**RL_DQN, "rl.dqn.start": 6144}, "found 6144: there would be no update"),
    ("rl.shards", {**RL[0], "rl.shards": 5}, "expected a divisor of envs = 32, found 5"),
    ("rl.shards", {**RL[0], "rl.shards": 16, "reproducible": True}, "at least 4 environments in a group"),
    (
        "rl.total_steps",
        {"rl.total_steps": 2047, "steps": None},
        "at least one iteration of envs * steps = 2048",
    ),
    ("rl.algorithm", {**RL_DQN, "strategy": "servers=1 sync=actors"}, 'expected "ppo" with sync=actors'),
    ("strategy.sync", {"strategy": "servers=1 sync=actors"}, "there are none"),
    ("rl.total_steps", {**RL[0], "strategy": "sync=local:2"}, "expected sync=every-step without servers"),
    ("rl.total_steps", {**RL[0], "loader.workers": 1}, "loader.workers: expected no loader processes"),
    (
        "rl.total_steps",
        {**RL[0], "runtime.compile": True},
        'expected compute = "fp32" without runtime.compile',
    ),
    ("rl.ppo.minibatches", {**RL[0], "rl.ppo.minibatches": 5}, "rl.envs * rl.steps = 2048, found 5"),
    (
        "private.noise",
        {"private.noise": 1.0},
        'expected sync=federated:E with unit = "client"',
    ),
    ("private.noise", {**NOISY, "federated.weights": "samples"}, 'expected federated.weights = "equal"'),
    (
        "private.noise",
        {**NOISY, "federated.clip_norm": 1.0},
        "expected no federated.clip_norm, federated.b",
    ),
    ("private.noise", {**NOISY, "reproducible": True}, "expected no reproducible, no roll-back"),
    ("private.noise", {**SAMPLES, "strategy": "pipeline=2"}, "sync=every-step on replicas of whole models"),
    ("private.noise", {**SAMPLES, **FP16}, 'expected precision.compute = "fp32" or "bf16"'),
    ("private.noise", {**SAMPLES, "optimizer.name": "kfac"}, "an optimizer that reads nothing but gradients"),
    (
        "federated.cohort",
        {**FEDERATED, "federated.cohort": 0.001},
        "0.001 of clients = 100, which rounds to 0",
    ),
    (
        "federated.cohort",
        {**FEDERATED, "federated.cohort": 101},
        "at most federated.clients = 100, found 101",
    ),
    (
        "federated.clients",
        {**FEDERATED, "federated.clients": "network"},
        "expected channel=grpc with clients",
    ),
    (
        "federated.clients",
        {**FEDERATED, "strategy.channel": "grpc"},
        "expected no channel=grpc with simulated clients",
    ),
    (
        "federated.clients",
        {**NETWORK, "schedule.decay": "plateau", "evaluate.every_steps": 2},
        'expected another schedule.decay than "plateau"',
    ),
    ("federated.secure", {**MASKS, "strategy.codec": "topk:0.1"}, "each client keeps other values"),
    ("federated.secure", {**MASKS, "strategy.codec": "int8"}, "a scale or a basis of each client"),
    ("federated.secure", {**MASKS, "strategy.codec": "lossless"}, "compressed bytes have no sum"),
    ("federated.secure", {**NETWORK, "federated.secure": "ring"}, 'expected secure = "masks" or "none"'),
    (
        "federated.secure",
        {**NETWORK, "federated.secure": "masks", "federated.buffer": 3},
        "updates of several rounds have no masks in common",
    ),
    (
        "federated.cohort",
        {**NETWORK, "federated.cohort": 0.5},
        "nobody knows how many will connect",
    ),
    (
        "reproducible",
        {"reproducible": True, "batch.accumulation": 2},
        "batch.accumulation: expected batch.shards",
    ),
    (
        "reproducible",
        {"reproducible": True, "strategy": "codec=int8"},
        "expected sync=every-step and codec=fp32",
    ),
    (
        "reproducible",
        {"reproducible": True, "strategy": "sync=local:2"},
        "expected sync=every-step and codec",
    ),
    ("reproducible", {"reproducible": True, "strategy": "route=ring"}, "expected another route"),
    ("reproducible", {"reproducible": True, "strategy": "balance=speed"}, "expected balance=even"),
    ("reproducible", {"reproducible": True, "strategy": "pipeline=2 rechunk=1,2"}, "expected no rechunk"),
    ("reproducible", {"reproducible": True, "strategy": "tensor=2"}, "expected tensor=1 with reproducible"),
    ("reproducible", {"reproducible": True, "runtime.threads": 2}, "runtime: expected runtime.threads = 1"),
    (
        "reproducible",
        {"reproducible": True, "runtime.compile": True},
        "runtime: expected runtime.compile = false",
    ),
    ("strategy.lanes", {"strategy.lanes": 2, "runtime.threads": 2}, "a lane is one thread"),
    ("strategy.lanes", {"strategy.lanes": 2, "runtime.compile": True}, "a lane runs a copy of the model"),
    (
        "strategy.sync",
        {"strategy": "servers=1 sync=every-step@straggler,backup:1"},
        "expected health.straggler",
    ),
    (
        "strategy.sync",
        {"strategy": "servers=1 sync=every-step@9,server", "loader.workers": 1},
        "loader.workers: expected 0 with a switch to a server",
    ),
)


@pytest.mark.capability("Q6")
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("cohort", 0, "expected a number of clients >= 1, a fraction of them as 0.1"),
        ("cohort", True, "expected a number of clients >= 1"),
        ("cohort", "poisson:1.5", "expected a number of clients >= 1"),
        ("partition", "dirichlet:0", 'expected "iid", "labels:L"'),
        ("partition", "labels:1.5", 'found "labels:1.5"'),
        ("partition", "dirchlet:0.3", 'expected "iid"'),
        ("partition", "iid:3", 'expected "iid"'),
        ("deadline_seconds", 3.0, "simulated clients take turns on a rank, so none is late"),
        ("buffer", 3, "simulated clients take turns, so none runs ahead"),
        ("clients", "net", 'a number of clients >= 1, or "network", found "net"'),
    ],
)
def test_what_is_no_cohort_or_partition_is_an_error_that_says_what_is(
    key: str, value: Any, message: str
) -> None:
    with pytest.raises(RecipeError) as raised:
        recipe(**FEDERATED, **{f"federated.{key}": value})
    assert message in str(raised.value) and raised.value.next_step


def test_the_outer_optimizer_has_the_defaults_of_its_rule() -> None:
    def rate_and_momentum(**keys: Any) -> tuple[float, float]:
        outer = recipe(**keys).outer
        return outer.lr, outer.momentum

    assert rate_and_momentum(**DILOCO) == (0.7, 0.9) and rate_and_momentum(**FEDERATED) == (1.0, 0.0)
    assert rate_and_momentum(**FED_ADAM) == (0.01, 0.0)
    assert rate_and_momentum(**FEDERATED, **{"outer.momentum": 0.9}) == (1.0, 0.9)
    again = recipe(**FEDERATED, **{"outer.momentum": 0.9}).replace(strategy=Strategy.parse("sync=diloco:2"))
    assert (again.outer.lr, again.outer.momentum) == (0.7, 0.9)


@pytest.mark.capability("T1")
def test_the_length_and_the_batch_of_a_run_follow_from_its_environments(tmp_path: Path) -> None:
    """Left out or as they follow; a longer run of the same file has more updates."""
    from paceline.recipe import to_toml

    whole = recipe(**RL[0])
    assert (whole.steps, whole.batch.size, whole.precision.compute) == (160, 512, "fp32")
    (tmp_path / "run.toml").write_text(to_toml(whole))
    assert load_recipe(tmp_path / "run.toml") == whole
    longer = load_recipe(tmp_path / "run.toml", ["rl.total_steps=16384", "rl.ppo.minibatches=8"])
    assert (longer.steps, longer.batch.size) == (640, 256)
    for keys in ({"steps": 159}, {"epochs": 2.0}, {"batch.size": 32}):
        with pytest.raises(RecipeError, match=f"{next(iter(keys))}: expected no"):
            recipe(**RL[0] | keys)


@pytest.mark.parametrize(("key", "keys", "message"), CONFLICTS)
def test_a_contradiction_is_an_error_that_names_the_key_to_change(
    key: str, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError) as raised:
        recipe(**keys)
    assert message in str(raised.value), key


def test_lanes_of_a_reproducible_run_are_reported_once() -> None:
    with pytest.raises(RecipeError, match="inside an operation") as raised:
        recipe(reproducible=True, **{"strategy.lanes": 2, "runtime.threads": 2})
    assert "a lane is one thread" not in str(raised.value)


# What only `support` refuses: a strategy without effect has to be parsed to name the nearest

STRATEGY_CASES = {
    "strategy.shard": ("shard=2", "shard=2 zero=1"),
    "strategy.zero": ("zero=2", "shard=2 zero=2"),
    "strategy.schedule": ("schedule=1f1b", "pipeline=2 schedule=1f1b"),
    "strategy.stages": ("stages=time", "pipeline=2 stages=time"),
    "strategy.partition": (
        "servers=1 sync=server partition=max-size:9",
        "servers=2 sync=server partition=max-size:9",
    ),
    "strategy.balance": ("sync=local:2 balance=speed", "balance=speed"),
    "strategy.codec": ("route=shared-memory codec=int8", "route=ring codec=int8"),
    "strategy.route": ("sync=gossip:2 route=ring", "route=ring"),
    "strategy.storage": ("shard=2 zero=2 storage=central", "shard=2 zero=3 storage=central"),
    "strategy.channel": ("channel=grpc", "sync=gossip:2 channel=grpc"),
}


@pytest.mark.parametrize("key", STRATEGY_CASES)
def test_a_term_without_effect_is_a_reason_of_support(key: str) -> None:
    (need,) = needs_of("strategy")[key]
    idle, acting = (Strategy.parse(text) for text in STRATEGY_CASES[key])
    assert str(need.reason) in support(idle, processes=4, shards=8).reason
    assert support(acting, processes=4, shards=8).ok, support(acting, processes=4, shards=8).reason


# What only the task and the processes decide

SESSION_CASES: dict[str, Any] = {
    "batch.sync_batchnorm": True,
    "evaluate.every_steps": 3,
    "evaluate.batch": 5,
    "evaluate.max_samples": 7,
    "security.tls": "on",
    "tensor": {"layers.0": "column"},
    "strategy.balance": "speed",
    "strategy.codec": "int8",
    "strategy.route": "tree",
    "strategy.sync": "local:2",
    "runtime.bucket_bytes": 1024,
    "runtime.bucket_latency": 0.05,
    "runtime.link_profile": "links.json",
}


def warnings_about(key: str, value: Any, held_out: bool = False) -> list[str]:
    """The warnings about a key when a session is built on one rank."""
    chosen = recipe(**{key: value, "runtime.device": "cpu"})
    task = load_task("digits", dict(chosen.options), 1, Path.cwd(), Path.cwd())
    task = task if held_out else replace(task, held_out=None)
    messages: list[str] = []
    build_session(chosen, task, Cluster.single(), torch.device("cpu"), warn=messages.append).close()
    return [text for text in messages if text.startswith(f"warning: {key} = ")]


@pytest.mark.parametrize("key", SESSION_CASES)
def test_a_key_without_effect_is_named_when_the_session_is_built(key: str) -> None:
    (text,) = warnings_about(key, SESSION_CASES[key])
    assert "has no effect: " in text
    if key.startswith("evaluate"):
        assert warnings_about(key, SESSION_CASES[key], held_out=True) == []


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
