"""Tensor shards of halves: what they compute is what one process does, but for how a cut layer is rounded."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.task import Task
from paceline.testing import run_ranks
from paceline.testing.parity import Trajectory, build_test_session, make_task, whole_trajectory
from tests.parity.test_fp16_local_sgd import SAME, SGD
from tests.parity.test_local_sgd_sharded_replicas import digits

pytestmark = [pytest.mark.timeout(600), pytest.mark.capability("K1", "K2")]


class InTwo(nn.Linear):
    """A linear layer as two tensor ranks compute it: each rounds its product, and their sum is rounded."""

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Linear`."""
        k = self.in_features // 2
        y = F.linear(x[..., :k], self.weight[:, :k]) + F.linear(x[..., k:], self.weight[:, k:])
        return y + self.bias.to(y.dtype)


def of_seed(seed: int, strategy: str, compute: str) -> Recipe:
    return digits(strategy, seed=seed, precision={"compute": compute}, optimizer=SGD)


def ends(cluster: Cluster, recipes: Sequence[Recipe], in_two: bool) -> list[Trajectory]:
    found = []
    for recipe in recipes:

        def task(recipe: Recipe = recipe) -> Task:
            made = make_task(recipe)
            if in_two:
                made.model.layers[3].__class__ = InTwo
            return made

        session = build_test_session(cluster, recipe, task)
        found.append(whole_trajectory([stats.loss for stats in session.rounds()], session))
        session.close()
    return found


@pytest.mark.parametrize("compute", ["fp16", "bf16"])
@pytest.mark.parametrize("sync", ["every-step", "local:4"])
def test_tensor_shards_of_halves_are_off_by_how_one_layer_is_rounded(compute: str, sync: str) -> None:
    """A layer that is cut by inputs adds products that are halves; a whole one rounds once.

    Runs lie up to 8e-3 apart by that, over three seeds, where halves and floats do by as much. Whole replicas
    that round as two tensor ranks do end where these end. Parts of other axes are halves of the same sums.
    """
    seeds = range(3)
    plain = [of_seed(seed, f"replicas=2 sync={sync}", compute) for seed in seeds]
    right, rounded = (run_ranks(ends, 2, plain, in_two)[0] for in_two in (False, True))
    cut = [of_seed(seed, f"replicas=2 tensor=2 sync={sync}", compute) for seed in seeds]
    others = [
        of_seed(0, f"replicas=2 {own} sync={sync}", compute) for own in ("pipeline=2", "shard=2 zero=3")
    ]
    found = run_ranks(ends, 4, [*cut, *others], False)[0]
    assert all(found[seed].distance(rounded[seed]) <= SAME for seed in seeds)
    assert max(found[seed].distance(right[seed]) for seed in seeds) > 10 * SAME
    assert all(end.distance(right[0]) <= SAME for end in found[3:])


def test_a_layer_that_is_cut_gives_halves_where_a_whole_one_does() -> None:
    """The bias of one that is cut by inputs is added after the sum."""

    def kinds(cluster: Cluster) -> list[torch.dtype]:
        recipe = of_seed(0, "replicas=1 tensor=2", "fp16").replace(steps=1)
        session, found = build_test_session(cluster, recipe), list[torch.dtype]()
        for k in (0, 3, 6):
            layer = session.runner.sharded_model.model.layers[k]
            layer.register_forward_hook(lambda module, given, y: found.append(y.dtype))
        list(session.rounds())
        return found[:3]

    assert run_ranks(kinds, 2) == [[torch.float16] * 3] * 2
