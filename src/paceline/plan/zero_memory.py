"""Closed forms: bytes that a rank holds from step to step, from what it computes with and updates. Pure.

Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5 (what each stage leaves on a rank).

What gradients take that leave with every micro-batch: the scatters of a run, on tensors without memory.

No scatter is there before its rank waits for it, and all ranks run the same, so what is found is the most.
Where ranks run different numbers of micro-batches they know less of each other, and a closed form says what
may be under way (`paceline.comm.reduction.ScatterPacer`).

How the gradients of a rank come to be sums, in bytes: what its reductions allocate. Pure.

P: bytes of what a rank computes with, U: of what it updates, S: ranks of its shard group. They follow what is
really made: buckets for all gradients that are summed over ranks, sums of the own parts, a row for each of
the ranks that share the state.
Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5 (what each stage leaves on a rank).

What a rank takes to gather parameters of which it holds, or updates, parts. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm.collectives.collective_protocol import ReceiveBuffer
from paceline.comm.handle import Handle
from paceline.comm.net import Net
from paceline.comm.reduction.bucket_buffers import (
    MAX_IN_FLIGHT,
    scatter_buffer_prefix,
    transfer_buffer_name,
)
from paceline.comm.reduction.scatter_reducer import ScatterReducer
from paceline.comm.reduction.scatter_schedule import ScatterPacer, ScatterPaths, max_unconfirmed_buckets
from paceline.comm.reduction.summation_tree import TreeAccumulator, covering_nodes
from paceline.comm.routes.shared_memory import CHUNK_VALUES
from paceline.comm.workspace import Workspace
from paceline.data.work import split_evenly
from paceline.job.mesh import RankGroup
from paceline.parallel.pipeline.strategy_schedule import make_schedule
from paceline.parallel.placement import slot_bytes
from paceline.plan.gradient_buckets import (
    BucketBytes,
    BucketLayout,
    BucketPath,
    GradientReduction,
    gather_buckets,
    meta_tensors,
)
from paceline.plan.simulated_ranks import SimulatedCollective
from paceline.recipe.strategy import Strategy
from paceline.state.slot import TensorSlot

FP32_BYTES = 4


def waiting_partial_sums(shards: Sequence[int]) -> list[int]:
    """How many sums wait for others after each of these shards, in a tree of additions over all.

    Args:
        shards: that follow each other, in the order in which they come.
    """
    carry = TreeAccumulator(covering_nodes(range(min(shards), max(shards) + 1)) if shards else [])
    found = []
    for shard in shards:
        carry.push(range(shard, shard + 1), torch.empty(0))
        found.append(carry.num_sums)
    return found


def model_state_bytes(num_values: int) -> dict[str, int]:
    """Bytes of a model's state anywhere: its weights in fp16, and all that mixed-precision Adam keeps of it.

    That is 2 for the weight that is computed with, 2 for its gradient, and 4 each for the master weight and
    two moments; or 4 each for weight, gradient and two moments, as here.
    Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 3.1.
    """
    return {"fp16 weights": 2 * num_values, "Adam": (2 + 2 + 3 * FP32_BYTES) * num_values}


def gathered_bytes(blocks: Sequence[int], rest: int, shard: int) -> int:
    """Bytes of whole parameters under ZeRO 3, where each block is gathered for its use.

    There are the parameters of a block and of the one before, and what Gloo has not let go of; rows through
    which all blocks come stay (`max(blocks)`). What lies in no block comes before.

    Args:
        blocks: bytes of each.
        rest: of what lies in no block, and is there for a whole run.
        shard: ranks that gather.
    """
    return int(rest + (2 + 2 * gloo_copies(shard)) * max(blocks, default=0))


def gloo_copies(shard: int) -> float:
    """Times the bytes of all that Gloo takes for itself: two ranks send each other rows as they lie."""
    return 0 if shard <= 2 else 1 + 1 / shard


_ROUNDS = 2  # of micro-batches, after which all have found what memory stays


class ScatterMemory(NamedTuple):
    """Bytes.

    Args:
        stay: from step to step.
        under_way: beside them, while micro-batches run: for the first and for later ones, bytes by those of
            the gradients that are complete, ascending.
        learning: the same at the end of the first backward, where all gradients leave at a time.
        gathered: that stay beside them, for parameters that come after an update.
    """

    stay: int
    under_way: Sequence[Sequence[tuple[int, int]]]
    learning: int
    gathered: int


def scatter_memory(of: GradientReduction) -> ScatterMemory:
    """What the scatters of a rank take, if it has any, and the gathers after an update by Gloo."""
    group, memory = RankGroup("shard", tuple(range(of.recipe.strategy.shard)), 0), Workspace()
    path = _SimulatedScatterPath(of, group)
    if not of.leaves_often:
        for _ in _receive_buffers(of, memory):
            continue
        stay = memory.num_bytes
        for _ in _gather_buffers(of, memory):
            continue
        return ScatterMemory(stay, [_once_per_step(of)], 0, memory.num_bytes - stay)
    rank = _SimulatedScatterRank(of, path, memory)
    under_way = rank.run()
    stays = [*rank.blocks, *path.came]
    come = [*_gather_buffers(of, memory)]
    most = max((found for one in under_way for _, found in one), default=0)
    if of.blocks and not of.is_even:
        most = _most_behind_bytes(of)
    if not (of.blocks and of.is_even):  # backends, or other chunks of a stage, keep it longer
        under_way = [[(0, most)]]
    learning = _first_backward_bytes(of) if of.blocks else most
    stay, gathered = _storage_bytes(stays), _storage_bytes([*stays, *come]) - _storage_bytes(stays)
    return ScatterMemory(stay + sum(path.lies.values()), under_way, learning, gathered)


class _SimulatedScatterPath(SimulatedCollective):
    """Scatters of one rank; what they bring is there once somebody waits.

    Attributes:
        lies: bytes that lie in memory that ranks share, by key.
        came: memory that stays, in which others' values come.
    """

    def __init__(self, of: GradientReduction, group: RankGroup) -> None:
        super().__init__(group, Net(1.0))
        self._of, self.lies, self.came = of, dict[str, int](), list[Tensor]()

    def reduce_scatter(self, x: Tensor, key: str, arriving: ReceiveBuffer = None) -> Handle:
        """See `Collective`."""
        if self._of.common:
            self.lies[key] = max(x.nbytes, self.lies.get(key, 0))
        elif self._of.receives == "caller" and arriving is not None and not self._of.blocks:
            self.came.append(arriving())
        return Handle(lambda deadline_seconds, exposed: x[self.group.rank])


class _SimulatedScatterRank:
    """A rank that runs micro-batches, all ranks with it.

    Args:
        of: what it scatters; `path`, `memory`: see `ScatterPaths`.
    """

    def __init__(self, of: GradientReduction, path: _SimulatedScatterPath, memory: Workspace) -> None:
        self._of, self._pace = of, ScatterPacer(of.behind) if of.blocks else None
        self._home = {name: number for number, block in enumerate(of.blocks) for name in block}
        self._rows: dict[ScatterReducer, int] = {}
        self._by_name: dict[str, tuple[ScatterReducer, TensorSlot]] = {}
        ways = ScatterPaths(
            path, SimulatedCollective(path.group, path.net), path.group, path.net, self._pace, memory
        )
        for number, laid in enumerate(of.often):
            tensors = meta_tensors(laid.members, of.item_bytes)
            parts = {one.computes: one.parts for one in laid.members}
            most, name = of.recipe.runtime.bucket_bytes, scatter_buffer_prefix(number)
            one = ScatterReducer(tensors, parts, ways, most, name=name)
            self._rows[one] = max(x.rows[0].nbytes for x in laid.buffers)  # of what a scatter brings
            self._by_name |= {slot.name: (one, slot) for slot in tensors}

    @property
    def blocks(self) -> list[Tensor]:
        """Memory of buckets that stays."""
        return [x for one in self._rows for x in one.blocks.kept]

    def run(self) -> list[list[tuple[int, int]]]:
        """By micro-batch, after each gradient, bytes of those and what is under way in memory that goes."""
        found = []
        for _ in range(min(_ROUNDS, self._of.most_micro_batches) if self._rows else 0):
            done, one = 0, [(0, self._now())]
            for num_bytes in self._ready():
                done += num_bytes
                one.append((done, self._now()))
            found.append(one)
        return found

    def _now(self) -> int:
        found = 0
        for one in self._rows:
            found += one.blocks.temporary_bytes
            found += (
                int(self._of.passing * one.launches.num_bytes) + self._of.allocates_own_row * self._rows[one]
            )
        return found

    def _ready(self) -> Iterator[int]:
        """Bytes of each gradient of a micro-batch once it is handed on; blocks are gathered before theirs."""
        order = _completion_order(
            [name for name in self._of.completes if name in self._by_name], [*self._by_name]
        )
        told, brought = self._tell(), set[int]()
        for name in order:
            block = self._home.get(name)
            if block is not None and block not in brought:
                brought.add(block)
                told = self._hear(told if len(brought) > 1 else self._tell())
            one, slot = self._by_name[name]
            one.ready(slot, None)
            yield slot_bytes(slot, self._of.item_bytes)
        self._hear(self._tell())

    def _tell(self) -> list[float]:
        return [] if self._pace is None else self._pace.launch_counts()

    def _hear(self, told: list[float]) -> list[float]:
        """Of all, which is what this rank has told; returns what it tells then."""
        if self._pace is not None:
            self._pace.update_counts(told, is_idle=False)
        return self._tell()


def _completion_order(completes: list[str], names: list[str]) -> list[str]:
    """As they are handed on: those that are complete at once; then the rest, the last first."""
    times = Counter(completes)
    once = [name for name in completes if times[name] == 1]
    return once + [name for name in reversed(names) if times[name] != 1]


def _receive_buffers(of: GradientReduction, memory: Workspace) -> Iterator[Tensor]:
    """Memory in which others' rows come, where buckets are scattered once a step."""
    for number, one in enumerate(of.scattered_once_per_step):
        (num_rows, width), dtype = one.rows.shape, one.rows.dtype
        for turn in range(min(MAX_IN_FLIGHT, number + 1)):
            yield memory.take(transfer_buffer_name(turn), (num_rows - 1, width), dtype, one.rows.device)


def _once_per_step(of: GradientReduction) -> list[tuple[int, int]]:
    """These scatters where their path takes memory for itself; see `ScatterMemory.under_way`."""
    buckets = of.scattered_once_per_step if of.receives == "route" else []
    sizes, done, found = [one.flat.nbytes + one.rows[0].nbytes for one in buckets], 0, [(0, 0)]
    for number, bucket in enumerate(buckets):  # none leaves before those before it are complete
        done += sum(slot_bytes(slot, of.item_bytes) for slot in bucket.slots)
        found.append((done, sum(sizes[max(0, number + 1 - MAX_IN_FLIGHT) : number + 1])))
    return found if len(of.reductions) == 1 else [(0, 0), (1, sum(sorted(sizes)[-MAX_IN_FLIGHT:]))]


def _gather_buffers(of: GradientReduction, memory: Workspace) -> Iterator[Tensor]:
    """Memory through which parameters come, by turns."""
    shapes = gather_buckets(of.held, of.item_bytes, of.recipe.runtime.bucket_bytes)
    for number, one in enumerate(shapes):
        flat, name = one.flat, transfer_buffer_name(number % MAX_IN_FLIGHT)
        yield memory.take(name, flat.shape, flat.dtype, flat.device)


def _most_behind_bytes(of: GradientReduction) -> int:
    """Of buckets that may be on their way, one that is being filled in, and what arrives for each."""
    return _first_backward_bytes(of) + sum(_largest_run_bytes(of, laid) for laid in of.often)


def _first_backward_bytes(of: GradientReduction) -> int:
    """As many buckets may be on their way as at any time; they have taken the place of the gradients."""
    arriving = int(of.passing * sum(_largest_run_bytes(of, one) for one in of.often))
    rows = of.allocates_own_row * sum(max(x.rows[0].nbytes for x in one.buffers) for one in of.often)
    return arriving + rows + sum(max(x.flat.nbytes for x in one.buffers) for one in of.often)


def _largest_run_bytes(of: GradientReduction, laid: BucketLayout) -> int:
    """Bytes of as many buckets as may be on their way."""
    sizes = [one.flat.nbytes for one in laid.buffers]
    most = min(max_unconfirmed_buckets(sizes, of.behind), len(sizes))
    return max(sum((sizes + sizes)[first : first + most]) for first in range(len(sizes)))


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Of their memory, which several may lie in."""
    memory = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(memory.values())


@dataclass(frozen=True)
class GradientSumMemory:
    """How a rank's gradients come to be sums, in bytes.

    Args:
        buckets: that stay from step to step.
        own: sums of the own parts, where they are no part of a bucket.
        moved: by byte of a gradient that is complete in the last backward of a step, bytes of what moves it.
        leaves: a gradient is let go of as soon as it was handed on, with every micro-batch.
        at_end: gradients are handed on behind a backward, as nobody waits for them meanwhile.
        waiting: where sums have one order, how many sums of gradients wait for others after each micro-batch.
        stays: between steps, gradients that are neither buckets nor own sums.
        under_way: while micro-batches run, what scatters take that may be under way: for the first and for
            later ones, bytes by those of the gradients that are complete, ascending.
        learns: the first backward of a run lets go of gradients at its end.
        learning: what scatters take then.
    """

    buckets: int = 0
    own: int = 0
    moved: int = 0
    leaves: bool = False
    at_end: bool = False
    waiting: Sequence[int] = ()
    stays: int = 0
    under_way: Sequence[Sequence[tuple[int, int]]] = ()
    learns: bool = False
    learning: int = 0

    def on_the_way(self, micro_batch: int, done: int) -> int:
        """What scatters take in the backward of a micro-batch, with so many bytes of gradients complete."""
        if not self.under_way:
            return 0
        by_done = self.under_way[min(micro_batch, len(self.under_way) - 1)]
        return next((found for least, found in reversed(by_done) if least <= done), 0)


def gradient_sum_memory(of: GradientReduction) -> GradientSumMemory:
    """What the reduction of a rank takes."""
    strategy, sizes = of.recipe.strategy, of.sizes
    if of.recipe.is_ordered:
        return _ordered_sums(of)
    if not of.has_other_ranks:
        return GradientSumMemory(sizes.shared, stays=sizes.computes)
    if of.leaves_often:
        return _scattered_sums(of)
    buckets = _whole_bytes(of.buckets) + sizes.shared
    if strategy.shard == 1:
        return GradientSumMemory(buckets)
    alone = of.sharers == strategy.shard  # else the own row is summed over replicas, in a buffer of its own
    at_once = not (of.common or of.scattered_once_per_step)
    own = _row_bytes(of.buckets) if at_once or (of.common and not alone) else 0
    before, waiting = [[(0, 0)]] * (of.most_micro_batches - 1), [1] * (of.most_micro_batches - 1) + [0]
    found = scatter_memory(of)
    return GradientSumMemory(
        buckets + found.stay + _slice_bytes(of),
        own,
        moved=int(at_once),
        waiting=waiting,
        under_way=[*before, *found.under_way],
    )


def _ordered_sums(of: GradientReduction) -> GradientSumMemory:
    """Where sums have one order; see `gradient_sum_memory`."""
    strategy, sizes, sharers = of.recipe.strategy, of.sizes, of.sharers
    blocks = [split_evenly(of.shards, of.runners, rank) for rank in range(of.runners)]
    found = [waiting_partial_sums(shards) for block in blocks for shards in _shards_by_stage(strategy, block)]
    waiting = max(found, key=lambda one: (max(one), sum(one)))
    if sharers == 1:
        return GradientSumMemory(sizes.shared, at_end=True, waiting=waiting, stays=sizes.computes)
    nodes = max(len(covering_nodes(block)) for block in blocks)
    buckets = nodes * _whole_bytes(of.buckets) + sizes.shared
    moved, own = _ordered_wire_bytes(of, nodes)
    apart = strategy.shard > 1  # else a gradient has its sum, and lets go of it before the next backward
    sums = GradientSumMemory(buckets, moved=moved, leaves=True, waiting=[*waiting[:-1], 0])
    return replace(sums, own=own) if apart else replace(sums, stays=own)


def _ordered_wire_bytes(of: GradientReduction, nodes: int) -> tuple[int, int]:
    """Of sums in one order: how often a gradient is under way, as sent and as it comes; bytes of the sums.

    In memory that ranks share, and where one addition is left, buckets become the sums. One node of one
    replica is sent from where it lies.
    """
    shard = of.recipe.strategy.shard
    if of.common or (of.sharers == 2 and shard == 1 == nodes):
        return 0, 0
    as_it_lies = nodes == 1 and not 1 < shard < of.sharers
    return nodes * (2 - as_it_lies), _row_bytes(of.buckets)


def _shards_by_stage(strategy: Strategy, block: range) -> list[list[int]]:
    """Shards in the order in which backwards of the first chunk of each stage end; of one: as they are."""
    if strategy.pipeline == 1:
        return [[*block]]
    rows = make_schedule(strategy)(strategy.pipeline, len(block)).orders
    halves = {action.place for row in rows for action in row if action.kind == "W"}
    return [[block[a.micro_batch] for a in row if a.chunk == 0 and a.ends(halves)] for row in rows]


def _scattered_sums(of: GradientReduction) -> GradientSumMemory:
    """Where gradients leave with every micro-batch; see `gradient_sum_memory`."""
    met = _whole_bytes(one for one in of.buckets if one.way.meets)
    found = scatter_memory(of)
    buckets = found.stay + met + of.sizes.shared + _slice_bytes(of)
    return GradientSumMemory(
        buckets, _row_bytes(of.buckets), leaves=True, under_way=found.under_way, learning=found.learning
    )


def _slice_bytes(of: GradientReduction) -> int:
    """What a rank adds up at a time in memory that ranks share: one for each path of scatters, and type."""
    if not of.common:
        return 0
    paths = {(_scatter_path(of, one.way), one.way.item_bytes) for one in of.buckets}
    return sum(CHUNK_VALUES * item_bytes for _, item_bytes in paths)


def _scatter_path(of: GradientReduction, way: BucketPath) -> object:
    """What leaves with every micro-batch has its own, by reduction."""
    inside = {"shard", "pipeline", "tensor"}
    return way.number if of.leaves_often and not way.meets else frozenset(way.axes) - inside


def _whole_bytes(buckets: Iterable[BucketBytes]) -> int:
    return sum(one.whole for one in buckets)


def _row_bytes(buckets: Iterable[BucketBytes]) -> int:
    return sum(one.row for one in buckets)


_READ_AT_ONCE_BYTES = 2**24
"""Bytes of parameters that ranks of one host read at a time after an update (ZeRO 1 and 2)."""


class GatherMemory(NamedTuple):
    """Bytes.

    Args:
        stay: through which parameters come.
        while_computing: of parameters, while the rank computes with them (ZeRO 3).
        beginning: of those and what they come through, before it does.
        arriving: what Gloo takes for itself after an update (ZeRO 1 and 2).
    """

    stay: int = 0
    while_computing: int = 0
    beginning: int = 0
    arriving: int = 0


def gather_memory(of: GradientReduction) -> GatherMemory:
    """What one rank takes; parameters that lie once on a host are never gathered."""
    if of.recipe.strategy.shard == 1:
        return GatherMemory()
    if of.keeps:
        return GatherMemory(_shared_part_bytes(of)) if of.common else _gathers_after_update(of)
    return GatherMemory() if of.common else _gathers_on_use(of)


def _shared_part_bytes(of: GradientReduction) -> int:
    """In memory that ranks share, the own parts, which the others read."""
    shapes = gather_buckets(of.held, of.item_bytes, _READ_AT_ONCE_BYTES)
    by_width = sorted(shapes, key=lambda one: one.rows.shape[1])
    return sum({one.rows.dtype: one.rows[0].nbytes for one in by_width}.values())


def _gathers_after_update(of: GradientReduction) -> GatherMemory:
    shapes = gather_buckets(of.held, of.item_bytes, of.recipe.runtime.bucket_bytes)
    sizes = [one.flat.nbytes for one in shapes]
    together = max((sum(sizes[k : k + MAX_IN_FLIGHT]) for k in range(len(sizes))), default=0)
    arriving = gloo_copies(of.recipe.strategy.shard) * together
    return GatherMemory(scatter_memory(of).gathered, arriving=int(arriving))


def _gathers_on_use(of: GradientReduction) -> GatherMemory:
    blocks, rest = of.by_block
    shard = of.recipe.strategy.shard
    computing, beginning = gathered_bytes(blocks, rest, shard), int((2 + gloo_copies(shard)) * rest)
    return GatherMemory(max(blocks, default=0), computing, beginning)
