"""What sums of gradients, or of movements, carry between ranks: the buffers of each path. Pure.

What a route of messages takes for itself: its own hops are gone through, on tensors without memory.

What coding takes, from sums of small buffers.

A codec works on rows of values, each alone, so what it takes is a line over their number from some size on.
Two sizes give that line. Where it depends on the shapes of tensors, the word of the codec names a form.

What a rank keeps for that which travels between ranks: to code it, or to send it along a route.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from paceline.comm.codecs.low_rank import MatrixSpan
from paceline.comm.codecs.strategy_codec import build_coded_collective
from paceline.comm.collectives.collective_protocol import CodingCollective, CodingMemory
from paceline.comm.handle import Handle
from paceline.comm.net import Net
from paceline.comm.routes.message_route import MessageRoute, RouteMessenger
from paceline.comm.workspace import Workspace
from paceline.errors import StrategyError
from paceline.job.mesh import RankGroup
from paceline.parallel.placement import TensorPlacement
from paceline.plan.gradient_buckets import plan_reductions
from paceline.plan.simulated_ranks import SimulatedCollective, simulated_context
from paceline.recipe.recipe import Recipe
from paceline.recipe.registry.word_spec import import_object

_TURNS = 2  # buckets that are under way at a time, where gradients leave with every micro-batch


class Buffer(NamedTuple):
    """What travels at a time: how many values of which type, and where matrices lie in them."""

    num_values: int
    dtype: torch.dtype
    matrices: Sequence[MatrixSpan]


class Path(NamedTuple):
    """One collective.

    Args:
        does: with a buffer, whole or as rows of all ranks.
        kept: values of all buffers of which a coder keeps something.
    """

    group: RankGroup
    does: Literal["sum", "scatter", "gather"]
    buffers: Sequence[Buffer]
    kept: int = 0


def paths_of(
    recipe: Recipe,
    held: Mapping[str, TensorPlacement],
    item_bytes: Mapping[str, int],
    processes: int,
    *,
    waits: bool,
) -> Iterator[Path]:
    """Of one rank.

    Gradients are scattered over the ranks that share the state, and what this rank got is summed over all
    others that have the same. Replicas of several ranks that train alone send each other how they have moved:
    that is what a codec codes there, and nothing inside.

    Args:
        recipe: its strategy has its replicas filled in.
        held: by name, what the rank holds; `item_bytes` of one value.
        waits: a rank may wait for any scatter; see `paceline.comm.reduction.ScatterPaths`.
    """
    strategy, mesh = recipe.strategy, simulated_context(recipe, processes, 0).mesh
    over = ["replica", "context"]
    if strategy.rule.agrees == "replica" and strategy.ranks_per_replica > 1:
        moved = plan_reductions(recipe, _movements(held.values()), item_bytes, often=False)
        own = [_buffer(one.flat, one.matrices(None)) for laid in moved for one in laid.buffers]
        yield Path(mesh.replica, "sum", own, _values(own))
        if strategy.is_coded:
            return
        over.remove("replica")
    yield from _of_gradients(recipe, held, item_bytes, mesh.axes["shard"], mesh.over(over), waits=waits)


def _of_gradients(
    recipe: Recipe,
    held: Mapping[str, TensorPlacement],
    item_bytes: Mapping[str, int],
    shard: RankGroup,
    rest: RankGroup,
    *,
    waits: bool,
) -> Iterator[Path]:
    often = recipe.strategy.zero > 1 and recipe.strategy.form.exact
    laid = plan_reductions(recipe, held.values(), item_bytes, often=often)
    buffers = [one for reduction in laid for one in reduction.buffers]
    whole = [_buffer(one.flat, one.matrices(None)) for one in buffers]
    if shard.size == 1:
        yield Path(rest, "sum", whole, _values(whole))
        return
    under_way = _TURNS * max((one.num_values for one in whole), default=0)
    yield Path(shard, "scatter", whole, under_way if often and waits else _values(whole))
    rows = [_buffer(one.rows[0], one.matrices(0)) for one in buffers]
    yield Path(rest, "sum", rows, _values(rows))


def gathered(shard: RankGroup, flats: Iterable[Tensor]) -> Path:
    """Parameters that come together, in buffers [n]."""
    return Path(shard, "gather", [_buffer(flat) for flat in flats])


def _movements(held: Iterable[TensorPlacement]) -> Iterator[TensorPlacement]:
    """What ranks of other replicas sum with a rank that is a part of one: what it updates, whole."""
    for one in held:
        if one.updates is not None:
            yield replace(one, computes=one.updates, parts=(one.updates,), place=0, sums=())


def _buffer(x: Tensor, matrices: Sequence[MatrixSpan] = ()) -> Buffer:
    return Buffer(x.numel(), x.dtype, matrices)


def _values(buffers: Sequence[Buffer]) -> int:
    return sum(one.num_values for one in buffers)


_NOWHERE = torch.device("meta")


class _NoMail(RouteMessenger):
    """Nobody sends anything."""

    def send(self, to: int, x: Tensor) -> None:
        """See `RouteMessenger`."""

    def receive(self, source: int, out: Tensor) -> Tensor:
        """See `RouteMessenger`."""
        return out

    def exchange(self, to: int, x: Tensor, source: int, out: Tensor) -> Tensor:
        """See `RouteMessenger`."""
        return out


def hop_bytes(recipe: Recipe, path: Path, *, common: bool) -> int:
    """What the thread of a path keeps whose values travel as they are, on the rank that keeps most.

    Which of several hops a path takes is measured; the most that any takes is kept then.

    Args:
        recipe: its strategy has its replicas filled in.
        common: all ranks run on one host.
    """
    route = recipe.strategy.path
    if path.group.size == 1 or recipe.is_ordered or (route.in_memory and common):
        return 0
    routes: list[MessageRoute] = [import_object(place)() for place in route.hops]
    return max((kept_bytes(routes, path, rank) for rank in some_ranks(path.group.size)), default=0)


def some_ranks(size: int) -> list[int]:
    """Ranks among which one keeps as much as any: the ends, and the first of each half of a half."""
    return sorted({0, size - 1, *(1 << k for k in range((size - 1).bit_length()))})


def kept_bytes(routes: Iterable[MessageRoute], path: Path, rank: int) -> int:
    """By one thread, which has one memory for all, as large as the largest buffer needs it."""
    largest = {one.dtype: one for one in sorted(path.buffers, key=lambda one: one.num_values)}
    workspace = Workspace()
    mail = _NoMail(Net(), path.group, 0, range(path.group.size), rank, workspace)
    for hops in routes:
        for buffer in largest.values():
            _go(hops, mail, path, buffer)
    return workspace.num_bytes


def _go(hops: MessageRoute, mail: RouteMessenger, path: Path, buffer: Buffer) -> None:
    x = torch.empty(buffer.num_values, dtype=buffer.dtype, device=_NOWHERE)
    if path.does == "sum":
        hops.all_reduce(mail, x)
    else:
        (hops.reduce_scatter if path.does == "scatter" else hops.all_gather)(mail, x.view(mail.size, -1))


_FEW, _MORE = 1 << 18, 1 << 19  # values; coding goes in stretches of 65,536
_STEPS = 3  # until losses have the memory of the step before the last

_Run = Callable[[CodingCollective, Tensor, str], Handle]


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


def _taken(recipe: Recipe, run: _Run, group: RankGroup, buffers: Sequence[Buffer], kept: int) -> int:
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
        found: int = import_object(spec.keeps)(shapes, argument, scatters=run is _scatter)
        return found
    buckets = [one.num_values for one in buffers]
    rest = max(n % group.size for n in buckets)
    in_common, values = _in_common(recipe, run, group, rest), min(max(buckets), _MORE)
    at_a_time = None if recipe.runtime.device == "cuda" else recipe.strategy.path.coded
    orders = [True, False] if at_a_time is None else [at_a_time > 1]
    ways = [_places(recipe, group, buckets, any_order=order) for order in orders]
    of_buffers = kept * _held(recipe, run, group, values).of_buffers / values
    return int(of_buffers + max(sum(map(in_common, places)) for places in ways))


def _in_common(recipe: Recipe, run: _Run, group: RankGroup, rest: int) -> Callable[[int], float]:
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


def _places(recipe: Recipe, group: RankGroup, buckets: Sequence[int], *, any_order: bool) -> Sequence[int]:
    """How many values are coded at most in each place of a coder's line."""
    path = SimulatedCollective(group, Net(), any_order=any_order)
    with closing(build_coded_collective(path, recipe.strategy, recipe.seed)) as coder:
        together = [coder.chunks_in_flight(torch.empty(n, device="meta")) for n in buckets]
    values, places = [n for n, _ in together], together[0][1]
    if values == buckets and len(buckets) % places == 0:
        return [max(buckets[place::places]) for place in range(places)]
    return [max(values)] * places  # a stretch may take any place, or a bucket another one in each step


def _sum(coder: CodingCollective, x: Tensor, key: str) -> Handle:
    return coder.all_reduce(x, key)


def _scatter(coder: CodingCollective, x: Tensor, key: str) -> Handle:
    size = coder.group.size
    return coder.reduce_scatter(x[: x.numel() // size * size].view(size, -1), key)


def incompressible(num_values: int) -> Tensor:
    """Values [n] whose bits have nothing in common, so that nothing takes more bytes."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(num_values, generator=draw) * torch.rand(num_values, generator=draw).mul(40.0).exp2()


def _held(recipe: Recipe, run: _Run, group: RankGroup, num_values: int) -> CodingMemory:
    """After some steps with a buffer of so many values, which is coded as a whole."""
    net = Net(recipe.runtime.deadline_seconds)
    path = SimulatedCollective(group, net, any_order=False)
    with closing(build_coded_collective(path, recipe.strategy, recipe.seed)) as coder:
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


def travelling_bytes(
    recipe: Recipe,
    held: Mapping[str, TensorPlacement],
    item_bytes: Mapping[str, int],
    processes: int,
    *,
    common: bool,
) -> int:
    """Bytes beside buckets and sums. Of parameters that are gathered `gathers` says it, of servers the rule.

    Args:
        recipe: its strategy has its replicas filled in.
        held: by name, what the rank holds; `item_bytes` of one value.
        common: all ranks run on one host.
    """
    strategy = recipe.strategy
    if not strategy.rule.sums:
        return 0
    paths = [*paths_of(recipe, held, item_bytes, processes, waits=common or strategy.zero < 3)]
    if strategy.is_coded:
        return coding_bytes(recipe, paths)
    return sum(hop_bytes(recipe, one, common=common) for one in paths)
