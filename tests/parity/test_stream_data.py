"""Streams and samplers train what one process trains on them, verify on any layout, and go on exactly."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import WeightedRandomSampler

from paceline.data.stream import StreamPositions
from paceline.errors import DataError
from paceline.job.cluster import Cluster
from paceline.task import Task
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session
from paceline.verification.verify_on_rank import compare_with_oracle
from tests.recipes import recipe_of
from tests.unit.data.test_task_data import Stream, loss

STEPS = 7
LAYOUTS = ("replicas=2", "replicas=1 shard=2 zero=3", "replicas=1 pipeline=2", "replicas=2 sync=local:2")


class Own(Stream):
    """Cannot be read in parts."""

    shard: Any = None


class Elsewhere(Stream):
    """Another stream on every rank, and the same whenever it is read."""

    def __init__(self) -> None:
        super().__init__(range(int.from_bytes(os.urandom(4)), 2**40))


def build_of(data: Callable[[], Any], **more: Any) -> Callable[[], Task]:
    def build() -> Task:
        torch.manual_seed(0)
        return Task(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)), data(), loss, **more)

    return build


def sampled() -> Task:
    rows = list(torch.randn(20, 2, generator=torch.Generator().manual_seed(1)))
    weighted = WeightedRandomSampler([1.0, 3.0] * 10, 14)
    return build_of(lambda: rows, sampler=weighted)()


BUILDS = {"whole": build_of(Own), "in parts": build_of(Stream), "sampled": sampled}


stream_recipe = partial(
    recipe_of,
    steps=STEPS,
    batch={"size": 6, "shards": 2},
    optimizer={"name": "sgd", "lr": 1e-4},
    precision={"compute": "fp32"},
)


def ends(session: Any) -> dict[str, Tensor]:
    list(session.rounds())
    model = session.complete()
    session.close()
    return {name: value.clone() for name, value in model.state_dict().items()}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def trained(cluster: Cluster, name: str, strategy: str) -> dict[str, Tensor]:
    return ends(build_test_session(cluster, stream_recipe(strategy), BUILDS[name]))


def gone_on(cluster: Cluster, name: str) -> dict[str, Tensor]:
    """Stopped after three steps, and on from there in a session that has read nothing yet."""
    first = build_test_session(cluster, stream_recipe(), BUILDS[name])
    for stats in first.rounds():
        if stats.step == 2:
            break
    second = build_test_session(cluster, stream_recipe(), BUILDS[name])
    second.restore_shared(first.snapshot())
    return ends(second)


def on_two(cluster: Cluster) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in BUILDS:
        found[name] = [trained(cluster, name, layout) for layout in LAYOUTS[:3]], gone_on(cluster, name)
        for layout in LAYOUTS[:2]:
            report = compare_with_oracle(stream_recipe(layout), BUILDS[name](), cluster, CPU, steps=4)
            assert report.ok, (name, layout, report)
    trained(cluster, "in parts", LAYOUTS[3])
    with pytest.raises(DataError, match="rank 1 reads other samples than rank 0"):
        build_test_session(cluster, stream_recipe(), build_of(Elsewhere))
    return found


def next_of_own(cluster: Cluster) -> dict[str, Tensor]:
    """The mistake: every rank takes the next samples of its own copy, wherever those stand."""
    read: list[Any] = []

    def careless(self: StreamPositions, index: int) -> Any:
        read.append(None)
        return self._cursor(0).step((len(read) - 1) // self.size)[(len(read) - 1) % self.size]

    right = StreamPositions.__getitem__
    setattr(StreamPositions, "__getitem__", careless)  # noqa: B010 the mistake
    try:
        return trained(cluster, "whole", "replicas=2")
    finally:
        setattr(StreamPositions, "__getitem__", right)  # noqa: B010


@pytest.mark.capability("M1")
def test_streams_and_samplers_are_the_same_run_on_two_ranks_and_after_a_stop() -> None:
    alone = {name: trained(Cluster.single(), name, "replicas=all") for name in BUILDS}
    assert distance(alone["whole"], alone["in parts"]) > 1e-6, "parts have another order"
    for found in run_ranks(on_two, 2):
        for name, (layouts, resumed) in found.items():
            for end in layouts:
                assert distance(alone[name], end) < 1e-6, name
            assert distance(layouts[0], resumed) == 0.0, name
    for name in BUILDS:
        assert distance(alone[name], gone_on(Cluster.single(), name)) == 0.0
    assert distance(alone["whole"], run_ranks(next_of_own, 2)[0]) > 1e-6, "else this test sees nothing"
