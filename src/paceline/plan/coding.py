"""What coding takes, from sums of small buffers.

A codec works on rows of values, each alone, so what it takes is a line over their number from some size on.
Two sizes give that line. Where it depends on the shapes of tensors, the word of the codec names a form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm import Handle, Net
from paceline.comm.codecs.low_rank import Matrix
from paceline.comm.collectives import Coded, HeldBytes
from paceline.comm.line import PLACES
from paceline.comm.reduction.part_buffer import PartBuffer, bytes_in_turn, plan_buckets
from paceline.errors import StrategyError
from paceline.layout.placement import Held
from paceline.mesh import Group
from paceline.plan.ranks import SendsNothing, setting_of
from paceline.recipe import Recipe
from paceline.recipe.specs import imported
from paceline.slot import Slot
from paceline.training.codecs import code

_FEW, _MORE = 1 << 18, 1 << 19  # values; coding goes in stretches of 65,536
_STEPS = 3  # until losses have the memory of the step before the last
_TURNS = 2  # buckets that are under way at a time, where gradients leave with every micro-batch

_TYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}

_Run = Callable[[Coded, Tensor, str], Handle]


class _Buffer(NamedTuple):
    """What is coded at a time: how many values, and where matrices lie in them."""

    num_values: int
    matrices: Sequence[Matrix]


def coding_bytes(
    recipe: Recipe, held: Mapping[str, Held], item_bytes: Mapping[str, int], processes: int, *, waits: bool
) -> int:
    """What one rank keeps for coded sums of gradients, or movements; nothing where nothing is coded.

    Gradients are scattered over the ranks that share the state, and what this rank got is summed over all
    others that have the same: each path has a coder.

    Args:
        recipe: its strategy has its replicas filled in.
        held: by name, what the rank holds; `item_bytes` of one value.
        waits: a rank may wait for any scatter; see `paceline.comm.reduction.Ways`.
    Raises:
        StrategyError: what its codec takes depends on the shapes of tensors.
    """
    strategy = recipe.strategy
    if not strategy.is_coded:
        return 0
    mesh = setting_of(recipe, processes, 0).mesh
    shard, rest = mesh.axes["shard"], mesh.over(("replica", "context"))
    often = strategy.zero > 1 and strategy.form.exact
    buffers = _buffers(recipe, [*held.values()], item_bytes, often=often)
    whole = [_Buffer(one.flat.numel(), one.matrices(None)) for one in buffers]
    if shard.size == 1:
        return _taken(recipe, _sum, rest, whole, _values(whole))
    scattered = _TURNS * max(one.num_values for one in whole) if often and waits else _values(whole)
    rows = [_Buffer(one.rows.shape[1], one.matrices(0)) for one in buffers]
    return _taken(recipe, _scatter, shard, whole, scattered) + _taken(recipe, _sum, rest, rows, _values(rows))


def _values(buffers: Sequence[_Buffer]) -> int:
    return sum(one.num_values for one in buffers)


def _buffers(
    recipe: Recipe, held: Sequence[Held], item_bytes: Mapping[str, int], *, often: bool
) -> list[PartBuffer]:
    """Of all buckets, in the order of their launch; they have no memory."""
    most, together = recipe.runtime.bucket_bytes, dict[object, list[Held]]()
    for one in held:
        alike = one.sums, one.holders, tuple(sorted(one.computes.axes)), one.chunk if often else 0
        together.setdefault(alike, []).append(one)
    found = []
    for members in together.values():
        tensors = {one.computes: _like(one.computes, item_bytes) for one in members}
        parts = {one.computes: one.parts for one in members}
        turn = bytes_in_turn(tensors.values(), most) if often else most
        for slots in plan_buckets(tensors, turn):
            found.append(PartBuffer(slots, tensors, parts, _without_memory))
    return found


def _like(slot: Slot, item_bytes: Mapping[str, int]) -> Tensor:
    return torch.empty(slot.sizes, dtype=_TYPES[item_bytes[slot.name]], device="meta")


def _without_memory(num_values: int, like: Tensor) -> Tensor:
    return like.new_empty(num_values)


def _taken(recipe: Recipe, run: _Run, group: Group, buffers: Sequence[_Buffer], kept: int) -> int:
    """Bytes of one coder.

    Args:
        run: what it does with a buffer.
        kept: values of all of which it keeps something.
    """
    if group.size == 1 or not buffers:
        return 0
    (spec, argument), *_ = recipe.strategy.links
    if spec.keeps:
        found: int = imported(spec.keeps)(buffers, argument, scatters=run is _scatter)
        return found
    turns = _largest_by_turn([one.num_values for one in buffers])
    largest = max(turns)
    few, more = (
        _held(recipe, run, group, [min(largest, most) * size // largest for size in turns])
        for most in (_FEW, _MORE)
    )
    each = (more.in_common - few.in_common) / (_MORE - _FEW) if largest > _MORE else 0
    values = sum(min(largest, _MORE) * size // largest for size in turns)
    return int(kept * more.of_buffers / values + more.in_common + each * (largest - _MORE))


def _largest_by_turn(buckets: Sequence[int]) -> list[int]:
    """The largest of those that take each place of a coder's line, whose places are taken by turns."""
    if len(buckets) % PLACES:
        return [max(buckets)]  # with every step a bucket takes another place
    return [max(buckets[place::PLACES]) for place in range(PLACES)]


def _sum(coder: Coded, x: Tensor, key: str) -> Handle:
    return coder.all_reduce(x, key)


def _scatter(coder: Coded, x: Tensor, key: str) -> Handle:
    size = coder.group.size
    return coder.reduce_scatter(x[: x.numel() // size * size].view(size, -1), key)


def incompressible(num_values: int) -> Tensor:
    """Values [n] whose bits have nothing in common, so that nothing takes more bytes."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(num_values, generator=draw) * torch.rand(num_values, generator=draw).mul(40.0).exp2()


def _held(recipe: Recipe, run: _Run, group: Group, sizes: Sequence[int]) -> HeldBytes:
    """After some steps with a buffer of each of these numbers of values."""
    net = Net(recipe.runtime.deadline_seconds)
    made = code(SendsNothing(group, net), recipe.strategy, recipe.seed)
    try:
        for net.step in range(_STEPS):
            for number, size in enumerate(sizes):
                run(made, incompressible(size), f"{number}").wait()
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
