"""A pipeline whose stages find messages in memory has the bits of one whose messages a backend carries.

So has one that lies on two hosts, where memory is for stages of one host only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from paceline.comm.routes import host_links
from paceline.job.cluster import Cluster
from paceline.parallel.pipeline import HostMemoryTransport, MultiHostTransport, NetTransport, PipelineRunner
from paceline.recipe import Recipe, Strategy
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session

SCHEDULES = ("schedule=gpipe", "schedule=1f1b", "schedule=zero-bubble", "sync=pipedream")
INTERLEAVED = "schedule=interleaved:2"


def digits(words: str, stages: int) -> Recipe:
    settings: dict[str, Any] = {
        "task": "digits",
        "options": {"model": "mlp", "hidden": [24, 20, 16, 12, 16, 20, 24], "dropout": 0.1},
        "steps": 4,
        "batch": {"size": 23, "shards": 4},
        "optimizer": {"name": "adamw", "lr": 2e-3},
        "strategy": Strategy.parse(f"replicas=1 pipeline={stages} {words}"),
    }
    return Recipe(**settings)


def num_maps() -> int:
    """Of messages."""
    return Path("/proc/self/maps").read_text().count("paceline-messages")


def ends(cluster: Cluster, words: str) -> tuple[str, list[Tensor], int]:
    """What carries messages, the state of this rank after a few steps, and whether memory was mapped."""
    session = build_test_session(cluster, digits(words, cluster.world_size))
    assert isinstance(session.runner, PipelineRunner)
    list(session.rounds())
    wire, maps = type(session.runner._wire).__name__, num_maps()
    tensors = [t.clone() for _, t in sorted(session.state.tensors().items())]
    session.close()
    assert num_maps() == 0
    return wire, tensors, maps


def other_than(right: tuple[str, list[Tensor], int], found: tuple[str, list[Tensor], int], wire: type) -> str:
    """What is wrong with an end; empty: nothing."""
    if not all(map(torch.equal, right[1], found[1])):
        return "other bits"
    name, is_mapped = wire.__name__, wire is not NetTransport
    return "" if (found[0], found[2] > 0) == (name, is_mapped) else f"{found[0]}, {found[2]} maps"


def both(cluster: Cluster, schedules: tuple[str, ...]) -> list[str]:
    """What is wrong, by schedule; also where stages are on hosts of their own, and where four are on two."""
    found, right = [], {words: ends(cluster, f"{words} route=native") for words in schedules}
    for words in schedules:
        found += [other_than(right[words], right[words], NetTransport)]
        found += [other_than(right[words], ends(cluster, words), HostMemoryTransport)]
    halves = max(1, cluster.world_size // 2)
    for here, wire in ((1, NetTransport), *((n, MultiHostTransport) for n in {halves} - {1})):
        with patch.object(host_links, "host_id", lambda n=here: f"host {cluster.global_rank // n}"):
            found += [other_than(right[words], ends(cluster, words), wire) for words in schedules[:here]]
    return found


@pytest.mark.capability("D1", "D2", "D4", "D5", "D6")
@pytest.mark.parametrize("stages", [2, 4])
def test_stages_of_one_host_have_the_bits_that_a_backend_gives(stages: int) -> None:
    schedules = (*SCHEDULES, INTERLEAVED) if stages == 2 else ("schedule=1f1b", "sync=pipedream")
    for wrong in run_ranks(both, stages, schedules):
        assert not any(wrong)
