"""What coding of buckets of other sizes takes: never planned too small, and hardly too large."""

from __future__ import annotations

from contextlib import closing

import pytest
from torch import float32

from paceline.comm import Net
from paceline.comm.codecs.strategy_codec import build_coded_collective
from paceline.job.mesh import RankGroup
from paceline.plan import not_planned_coding
from paceline.plan.not_planned_coding import Buffer
from paceline.plan.simulated_ranks import SimulatedCollective
from paceline.recipe import Recipe, Strategy

RANKS = RankGroup("replica", (0, 1), 0)
BUCKETS = [
    [264_192, 261_612],  # the smaller one is a single stretch, and each of the other's is shorter
    [1 << 20],
    [3 << 20, 100_000, 2_000_000],
    [90_000, 80_000],
    [70_000],
    [5_000_001, 4_999_999],
]
FEW = [("int8", "native", BUCKETS[0]), ("topk:0.01", "native", BUCKETS[4]), ("sign", "ring", BUCKETS[1])]
ALL = [(codec, route, sizes) for codec in ("int8", "bf16", "sign", "topk:0.01", "fp16", "lossless")
       for route in ("native", "ring") for sizes in BUCKETS]  # fmt: skip


def held(recipe: Recipe, sizes: list[int]) -> int:
    """Bytes of a coder of exactly these buffers."""
    net, any_order = Net(60.0), recipe.strategy.route == "native"
    path = SimulatedCollective(RANKS, net, any_order=any_order)
    with closing(build_coded_collective(path, recipe.strategy, recipe.seed)) as coder:
        for net.step in range(4):
            for number, size in enumerate(sizes):
                coder.all_reduce(not_planned_coding.incompressible(size), f"{number}").wait()
            if coder.feedback is not None:
                coder.feedback.commit()
        found = coder.held_bytes()
    assert found is not None
    return found.of_buffers + found.in_common


@pytest.mark.capability("L3")
@pytest.mark.parametrize(
    ("codec", "route", "sizes"),
    [*FEW, *(pytest.param(*one, marks=pytest.mark.soak) for one in ALL if one not in FEW)],
)
def test_what_coding_takes_is_planned_whatever_the_sizes(codec: str, route: str, sizes: list[int]) -> None:
    recipe = Recipe(task="sum", steps=1, strategy=Strategy.parse(f"replicas=2 codec={codec} route={route}"))
    buffers = [Buffer(size, float32, ()) for size in sizes]
    planned, real = (
        not_planned_coding._taken(recipe, not_planned_coding._sum, RANKS, buffers, sum(sizes)),
        held(recipe, sizes),
    )
    assert real - 2**12 <= planned <= 1.1 * real + 2**16, (planned, real)
