"""Random models, batches and strategies: the hash of one process, every time. `make soak`."""

import random
from typing import Any

import pytest

from paceline.job.cluster import Cluster
from paceline.parallel.state_hash import state_sha256
from paceline.recipe import Recipe, Strategy
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session

NUM_CONFIGURATIONS = 200
PER_TEST = 20


def random_recipe(rng: random.Random) -> dict[str, Any]:
    """A small run: a GPT, an MLP or a ConvNet, its batch, optimizer, precision and memory."""
    shards = rng.randint(1, 12)
    gpt = {
        "layers": rng.randint(1, 3),
        "heads": 2,
        "width": 4 * rng.randint(2, 9),
        "context": rng.randint(3, 40),
    }
    name, options = rng.choice(
        [
            ("byte-gpt", {**gpt, "sample_tokens": 0, "positions": rng.choice(["rotary", "learned"])}),
            ("digits", {"model": "mlp", "hidden": [rng.randint(3, 130) for _ in range(rng.randint(1, 3))]}),
            ("digits", {"model": "convnet", "channels": rng.randint(2, 9)}),
        ]
    )
    optimizer: dict[str, Any] = {"name": rng.choice(["adamw", "sgd", "adam"]), "lr": 0.01}
    if optimizer["name"] == "sgd":
        optimizer["momentum"] = rng.choice([0.0, 0.9])
    if rng.random() < 0.7:
        optimizer["clip_norm"] = rng.choice([0.05, 0.5, 2.0])
    recompute = name == "byte-gpt" and rng.random() < 0.3
    return {
        "task": name,
        "options": {**options, "dropout": rng.choice([0.0, 0.3])},
        "steps": rng.randint(2, 5),
        "seed": rng.randint(0, 1000),
        "batch": {"size": rng.randint(shards, 60), "shards": shards},
        "optimizer": optimizer,
        "precision": {"compute": rng.choice(["fp32", "fp32", "bf16", "fp16"])},
        "memory": {"recompute": "blocks" if recompute else "none"},
        "reproducible": True,
    }


def random_strategy(rng: random.Random, shards: int) -> str:
    """One that these shards allow, on at most 6 processes."""
    replicas = rng.randint(1, min(shards, 6))
    kinds = [f"replicas={replicas}"]
    if replicas > 1:
        kinds += [f"replicas=1 shard={replicas} zero=1", f"replicas={replicas // 2} shard=2 zero=1"]
    if shards // replicas > 1:
        kinds.append(f"replicas={replicas} lanes={rng.randint(2, min(4, shards // replicas))}")
    if replicas <= 3:
        kinds.append(f"replicas={replicas} pipeline=2")
    return rng.choice(kinds)


def final_hash(cluster: Cluster, recipe: Recipe) -> str:
    session = build_test_session(cluster, recipe)
    list(session.rounds())
    session.close()
    return state_sha256(session.snapshot().tensors())


@pytest.mark.soak
@pytest.mark.capability("I10", "A2", "A10")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, NUM_CONFIGURATIONS, PER_TEST))
def test_every_configuration_has_the_hash_of_one_process(first: int) -> None:
    for number in range(first, first + PER_TEST):
        rng = random.Random(number)
        settings = random_recipe(rng)
        text = random_strategy(rng, settings["batch"]["shards"])
        strategy = Strategy.parse(text)
        num_ranks = (strategy.replicas or 1) * strategy.ranks_per_replica
        right = run_ranks(final_hash, 1, Recipe(**settings), deadline=480.0)[0]
        found = run_ranks(final_hash, num_ranks, Recipe(**settings, strategy=strategy), deadline=480.0)
        assert set(found) == {right}, f"configuration {number}: {text}, {settings}"
