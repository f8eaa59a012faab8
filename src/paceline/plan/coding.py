"""What coding takes, from sums of small buffers.

A codec works on rows of values, each alone, so what it takes is a line over their number from some size on.
Two sizes give that line.
"""

from __future__ import annotations

import torch

from paceline.comm.collectives import HeldBytes
from paceline.errors import StrategyError
from paceline.layout.sizes import Sizes
from paceline.mesh import Mesh
from paceline.plan.forms import FP32_BYTES
from paceline.plan.ranks import SendsNothing, setting_of
from paceline.recipe import Recipe
from paceline.training.codecs import code

_FEW, _MORE = 1 << 18, 1 << 19  # values; coding goes in stretches of 65,536
_STEPS = 3  # until losses have the memory of the step before the last


def coding_bytes(recipe: Recipe, sizes: Sizes, processes: int) -> int:
    """What one rank keeps for coded sums over replicas; nothing where nothing is coded.

    Args:
        recipe: its strategy has its replicas filled in.
        sizes: of what is summed.
    Raises:
        StrategyError: what its codec takes depends on the shapes of tensors.
    """
    mesh = setting_of(recipe, processes, 0).mesh
    if not recipe.strategy.is_coded or mesh.replica.size == 1:
        return 0
    few, more = (_held(recipe, mesh, num_values) for num_values in (_FEW, _MORE))
    largest = min(sizes.largest + recipe.runtime.bucket_bytes, sizes.computes) // FP32_BYTES
    each = (more.in_common - few.in_common) / (_MORE - _FEW)
    in_common = more.in_common + each * (largest - _MORE)
    return int(sizes.computes // FP32_BYTES * more.of_buffers / _MORE + max(0.0, in_common))


def incompressible(num_values: int) -> torch.Tensor:
    """Values [n] whose bits have nothing in common, so that nothing takes more bytes."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(num_values, generator=draw) * torch.rand(num_values, generator=draw).mul(40.0).exp2()


def _held(recipe: Recipe, mesh: Mesh, num_values: int) -> HeldBytes:
    """After some steps with one buffer of so many values."""
    net = setting_of(recipe, mesh.world.size, 0).net
    made = code(SendsNothing(mesh.replica, net), recipe.strategy, recipe.seed)
    try:
        for net.step in range(_STEPS):
            made.all_reduce(incompressible(num_values), "a buffer").wait()
            if made.feedback is not None:
                made.feedback.commit()
        found = made.held_bytes()
    finally:
        made.close()
    if found is None:
        raise StrategyError(
            f"what codec={recipe.strategy.codec} keeps in memory has no closed form yet",
            where=f'strategy "{recipe.strategy}"',
            next_step="plan the same layout with another codec, or leave memory.budget out",
        )
    return found
