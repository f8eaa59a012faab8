"""ZeRO-3 by blocks over Gloo, as between hosts: how many scatters a rank has under way in backward.

It may not wait for one that another rank launches only after a gather of both. What it holds until it knows
is what `plan memory` counts.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Loss, Task
from paceline.comm.reduction import ScatterPacer, ScatterReducer, unconfirmed_bytes
from paceline.comm.reduction.scatter_schedule import max_unconfirmed_buckets
from paceline.job.cluster import Cluster
from paceline.plan import plan_memory
from paceline.recipe import Recipe
from paceline.session import Components
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from tests.marks import soak_param
from tests.recipes import recipe_of

WIDTH, NUM_BLOCKS, STEPS = 64, 24, 3
WHOLE = 4 * 2 * NUM_BLOCKS * (WIDTH + 1) * WIDTH


def chain() -> Task:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(NUM_BLOCKS)]
    x = [*torch.rand(40, WIDTH)]
    return Task(
        nn.Sequential(*blocks),
        x,
        lambda model, x: Loss(model(x).square().sum(), len(x)),
        blocks=lambda model: [*model],
    )


def chain_recipe(shards: int) -> Recipe:
    return recipe_of(
        "replicas=1 shard=2 zero=3 route=native",
        task="chain",
        steps=STEPS,
        batch={"size": shards, "shards": shards},
        optimizer={"name": "sgd", "lr": 1e-4},
        runtime={"bucket_bytes": 2**13},
    )


@dataclass
class Most:
    """Of one step.

    Args:
        num_sent, sent: scatters under way at a time, and the bytes of their buckets.
        held: bytes of all buckets, with those that are filled in or queue.
    """

    num_sent: int = 0
    sent: int = 0
    held: int = 0


class Watched(ScatterReducer):
    """Notes what there is of buckets whenever a gradient comes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: list[Most] = []

    def begin(self, num_micro_batches: int | None = None) -> None:
        super().begin(num_micro_batches)
        self.steps.append(Most())

    def _buffer_of(self, bucket: Any) -> Any:
        found, most, sent = super()._buffer_of(bucket), self.steps[-1], self.launches._in_flight
        held = sum(x.nbytes for x in self.blocks.memory.values())
        now = len(sent), sum(one.rows.nbytes for one in sent), held
        self.steps[-1] = Most(*map(max, astuple(most), now))
        return found


def watched(cluster: Cluster, shards: int) -> list[Most]:
    made: list[Watched] = []

    def make(*args: Any, **kwargs: Any) -> Watched:
        made.append(Watched(*args, **kwargs))
        return made[-1]

    session = build_test_session(cluster, chain_recipe(shards), chain, Components(scatterer=make))
    list(session.rounds())
    session.close()
    (one,) = made
    return one.steps[-STEPS:]


@pytest.mark.capability("L3")
@pytest.mark.parametrize("shards", [soak_param(4), 5])
def test_scatters_under_way_are_those_that_are_planned(shards: int) -> None:
    """With 5 micro-batches one rank takes part in the last one for the other, and sends zeros as it hears."""
    rank = plan_memory(chain_recipe(shards), chain(), 2, nodes=2).ranks[0]
    planned = rank.moments["backward"].wire
    assert planned < 2 * WHOLE / 5  # of all buckets, and of what would arrive for all of them
    for first, *steps in run_ranks(watched, 2, shards):
        for step in steps:
            assert step.num_sent >= 3  # and backward goes on beside them
            assert step.held + step.sent <= planned  # as much arrives as is sent
        assert first.sent <= planned < first.held <= WHOLE + planned  # others queue where none is known


@pytest.mark.capability("L3")
def test_what_is_behind_is_three_blocks_and_the_rest() -> None:
    assert unconfirmed_bytes([1, 5, 2, 7, 1], 10) == 24
    assert unconfirmed_bytes([4, 5], 0) == 9
    assert (
        max_unconfirmed_buckets([3] * 9, 9) == 4
    )  # nine bytes that begin inside a bucket end inside the fourth
    assert max_unconfirmed_buckets([100, 1, 1, 1, 100], 4) == 5
    assert max_unconfirmed_buckets([9, 9], 100) == max_unconfirmed_buckets([9], 100) == 2


def test_a_scatter_counts_once_all_ranks_have_launched_it() -> None:
    asked: list[int] = []
    pace = ScatterPacer(0)
    here, other = pace.join(asked.append), pace.join(asked.append)
    here.launched_here, other.launched_here = 5, 2
    assert pace.launch_counts() == [5, 2, -5, -2]
    pace.update_counts([7, 2, -3, -2], is_idle=False)
    assert (here.launched_everywhere, other.launched_everywhere, asked) == (3, 2, [])
    pace.update_counts([7, 4, -5, -2], is_idle=True)
    assert (here.launched_everywhere, other.launched_everywhere, asked) == (5, 2, [7, 4])
