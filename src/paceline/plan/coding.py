"""What coding takes, from sums of small buffers.

A codec works on rows of values, each alone, so what it takes is a line over their number from some size on.
Two sizes give that line. Where it depends on the shapes of tensors, the word of the codec names a form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import cache

import torch
from torch import Tensor

from paceline.comm import Handle, Net
from paceline.comm.collectives import Coded, HeldBytes
from paceline.errors import StrategyError
from paceline.mesh import Group
from paceline.plan.paths import Buffer, Path
from paceline.plan.ranks import SendsNothing
from paceline.recipe import Recipe
from paceline.recipe.specs import imported
from paceline.training.codecs import code

_FEW, _MORE = 1 << 18, 1 << 19  # values; coding goes in stretches of 65,536
_STEPS = 3  # until losses have the memory of the step before the last

_Run = Callable[[Coded, Tensor, str], Handle]


def coding_bytes(recipe: Recipe, paths: Iterable[Path]) -> int:
    """What one rank keeps for coded sums of gradients, or movements; each path has a coder.

    Args:
        recipe: its strategy has its replicas filled in.
        paths: of the rank.
    Raises:
        StrategyError: what its codec takes depends on the shapes of tensors.
    """
    return sum(
        _taken(recipe, _scatter if one.does == "scatter" else _sum, one.group, one.buffers, one.kept)
        for one in paths
    )


def inside_replicas(recipe: Recipe) -> Recipe:
    """By which ranks reduce in a step: replicas that train alone code nothing inside."""
    strategy = recipe.strategy
    alone = strategy.rule.agrees == "replica" and strategy.is_coded
    return recipe.under(strategy.replace(codec="fp32")) if alone else recipe


def _taken(recipe: Recipe, run: _Run, group: Group, buffers: Sequence[Buffer], kept: int) -> int:
    """Bytes of one coder.

    Args:
        run: what it does with a buffer.
        kept: values of all of which it keeps something.
    """
    if group.size == 1 or not buffers:
        return 0
    (spec, argument), *_ = recipe.strategy.links
    if spec.keeps:
        shapes = [(one.num_values, one.matrices) for one in buffers]
        found: int = imported(spec.keeps)(shapes, argument, scatters=run is _scatter)
        return found
    buckets = [one.num_values for one in buffers]
    rest = max(n % group.size for n in buckets)
    in_common, values = _in_common(recipe, run, group, rest), min(max(buckets), _MORE)
    at_a_time = None if recipe.runtime.device == "cuda" else recipe.strategy.path.coded
    orders = [True, False] if at_a_time is None else [at_a_time > 1]
    ways = [_places(recipe, group, buckets, any_order=order) for order in orders]
    of_buffers = kept * _held(recipe, run, group, values).of_buffers / values
    return int(of_buffers + max(sum(map(in_common, places)) for places in ways))


def _in_common(recipe: Recipe, run: _Run, group: Group, rest: int) -> Callable[[int], float]:
    """What coding so many values at a time takes, as a function.

    Args:
        rest: values that are left where a buffer is divided among ranks; if there are any, parts are copied.
    """

    def held(num_values: int) -> float:
        return _held(recipe, run, group, num_values // group.size * group.size + rest).in_common

    def found(num_values: int) -> float:
        if num_values <= _MORE:
            return held(num_values)
        few, more = held(_FEW), held(_MORE)
        return more + (more - few) / (_MORE - _FEW) * (num_values - _MORE)

    return cache(found)


def _places(recipe: Recipe, group: Group, buckets: Sequence[int], *, any_order: bool) -> Sequence[int]:
    """How many values are coded at most in each place of a coder's line."""
    path = SendsNothing(group, Net(), any_order=any_order)
    with closing(code(path, recipe.strategy, recipe.seed)) as coder:
        together = [coder.num_together(torch.empty(n, device="meta")) for n in buckets]
    values, places = [n for n, _ in together], together[0][1]
    if values == buckets and len(buckets) % places == 0:
        return [max(buckets[place::places]) for place in range(places)]
    return [max(values)] * places  # a stretch may take any place, or a bucket another one in each step


def _sum(coder: Coded, x: Tensor, key: str) -> Handle:
    return coder.all_reduce(x, key)


def _scatter(coder: Coded, x: Tensor, key: str) -> Handle:
    size = coder.group.size
    return coder.reduce_scatter(x[: x.numel() // size * size].view(size, -1), key)


def incompressible(num_values: int) -> Tensor:
    """Values [n] whose bits have nothing in common, so that nothing takes more bytes."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(num_values, generator=draw) * torch.rand(num_values, generator=draw).mul(40.0).exp2()


def _held(recipe: Recipe, run: _Run, group: Group, num_values: int) -> HeldBytes:
    """After some steps with a buffer of so many values, which is coded as a whole."""
    net = Net(recipe.runtime.deadline_seconds)
    path = SendsNothing(group, net, any_order=False)
    with closing(code(path, recipe.strategy, recipe.seed)) as coder:
        for net.step in range(_STEPS):
            run(coder, incompressible(num_values), "0").wait()
            if coder.feedback is not None:
                coder.feedback.commit()
        found = coder.held_bytes()
    if found is None:
        raise StrategyError(
            f"what codec={recipe.strategy.codec} keeps in memory has no closed form yet",
            where=f'strategy "{recipe.strategy}"',
            next_step="plan the same layout with another codec, or leave memory.budget out",
        )
    return found
