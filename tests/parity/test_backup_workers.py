"""What comes too late under backup workers is left half done, and counted."""

from __future__ import annotations

import select
from typing import Any

import pytest
from torch import nn

from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session

STEPS, SAMPLES, MICRO_BATCHES = 12, 24, 4
SECONDS = 60.0  # until something has to have come


def digits() -> Recipe:
    return Recipe(
        task="digits",
        options={"model": "mlp", "hidden": [16]},
        steps=STEPS,
        batch={"size": SAMPLES, "shards": 2 * MICRO_BATCHES},
        optimizer={"name": "sgd", "lr": 0.1},
        strategy=Strategy.parse("servers=1 sync=backup:1"),
    )


def with_one_that_waits(cluster: Cluster) -> dict[str, Any]:
    """The last worker begins a part, and goes on once the server has said something."""
    session, forwards, heard = build_test_session(cluster, digits()), [0], list[bool]()

    def wait(module: nn.Module, inputs: Any) -> None:
        forwards[0] += 1
        if cluster.global_rank == 2:
            (peer,) = session.rule.channel._peers.values()
            heard.append(bool(select.select([peer.socket], [], [], SECONDS)[0]))

    session.runner.sharded_model.model.register_forward_pre_hook(wait)
    samples = sum(stats.num_samples for stats in session.rounds())
    record = {**session.rule.ledger.record(), "step": session.state.step, "samples": samples}
    session.close()
    return {**record, "forwards": forwards[0], "heard": all(heard)}


@pytest.mark.capability("I7", clause="late work is left between two micro-batches")
def test_whoever_comes_too_late_is_told_and_leaves_the_rest() -> None:
    server, first, last = run_ranks(with_one_that_waits, 3)
    assert last["heard"] and last["forwards"] == server["dropped"]  # one micro-batch of each part
    assert first["forwards"] == STEPS * MICRO_BATCHES
    assert server["applied"] == STEPS and server["taken"] == server["applied"] + server["dropped"]
    for rank in (server, first, last):
        assert rank["step"] == STEPS and rank["samples"] == STEPS * SAMPLES
