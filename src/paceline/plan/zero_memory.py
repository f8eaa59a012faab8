"""Memory of gradient sums and parameter gathers on one rank, for plain replicas and ZeRO 1 to 3; pure.

The bytes follow the buffers that a run allocates: buckets for gradients that are summed over ranks, sums of
the rank's own parts, and a row for each rank that shares the state. Scatters that run with every micro-batch
are simulated with the reducer of a run, on tensors without memory: a scatter is complete only when its rank
waits for it, and all ranks run alike, so the result is an upper bound. If ranks run different numbers of
micro-batches, a closed form says how many scatters can be unconfirmed (`comm.reduction.ScatterPacer`).

Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5 (what each stage leaves on a rank).
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
from paceline.comm.reduction.scatter_reducer import ScatterOrder, ScatterReducer
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
    """Return the number of partial sums that wait after each shard, in the tree of additions over all shards.

    Args:
        shards: consecutive shards, in the order in which they are run.
    """
    carry = TreeAccumulator(covering_nodes(range(min(shards), max(shards) + 1)) if shards else [])
    num_waiting = []
    for shard in shards:
        carry.push(range(shard, shard + 1), torch.empty(0))
        num_waiting.append(carry.num_sums)
    return num_waiting


def model_state_bytes(num_values: int) -> dict[str, int]:
    """Return the bytes of a model's state: fp16 weights alone, and all state of mixed-precision Adam.

    Adam keeps 2 bytes for the weight, 2 for its gradient, and 4 each for the master weight and two moments;
    in Paceline 4 each for weight, gradient and two moments, which is the same.
    Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 3.1.
    """
    return {"fp16 weights": 2 * num_values, "Adam": (2 + 2 + 3 * FP32_BYTES) * num_values}


def gathered_bytes(blocks: Sequence[int], unblocked_bytes: int, shard: int) -> int:
    """Return the bytes of whole parameters under ZeRO 3, whose blocks are gathered on use.

    Two blocks exist at a time, the present and the previous one, each with the memory that Gloo frees late.

    Args:
        blocks: bytes of each block.
        unblocked_bytes: bytes of parameters in no block, which are gathered once for the whole run.
        shard: number of ranks that gather.
    """
    return int(unblocked_bytes + (2 + 2 * gloo_copies(shard)) * max(blocks, default=0))


def gloo_copies(shard: int) -> float:
    """Return the memory of Gloo's all_gather per byte of its result; two ranks need none."""
    return 0 if shard <= 2 else 1 + 1 / shard


# Micro-batches after which all permanent buffers exist.
_ROUNDS = 2


class ScatterMemory(NamedTuple):
    """The bytes of the scatters of a rank.

    Args:
        stay: bytes that stay from step to step.
        under_way: temporary bytes of scatters in flight, for the first and later micro-batches: pairs (bytes
            of complete gradients, bytes in flight), ascending.
        learning: temporary bytes at the end of the first backward, when all gradients leave together.
        gathered: further bytes that stay, for gathers of parameters after an update.
    """

    stay: int
    under_way: Sequence[Sequence[tuple[int, int]]]
    learning: int
    gathered: int


def scatter_memory(reduction: GradientReduction) -> ScatterMemory:
    """Return the memory of the scatters of a rank, and of gathers after an update over Gloo."""
    group, memory = RankGroup("shard", tuple(range(reduction.recipe.strategy.shard)), 0), Workspace()
    path = _SimulatedScatterPath(reduction, group)
    if not reduction.leaves_often:
        for _ in _receive_buffers(reduction, memory):
            continue
        stay = memory.num_bytes
        for _ in _gather_buffers(reduction, memory):
            continue
        return ScatterMemory(stay, [_once_per_step(reduction)], 0, memory.num_bytes - stay)
    rank = _SimulatedScatterRank(reduction, path, memory)
    under_way = rank.run()
    kept_tensors = [*rank.blocks, *path.received]
    gather_tensors = [*_gather_buffers(reduction, memory)]
    most = max((num_bytes for samples in under_way for _, num_bytes in samples), default=0)
    # A rank with fewer micro-batches confirms scatters later, so simulating equal ranks is no bound.
    if reduction.blocks and not reduction.is_even:
        most = _most_behind_bytes(reduction)
    # Backends, and other chunks of a stage, can keep a scatter longer than the simulation does.
    if not (reduction.blocks and reduction.is_even):
        under_way = [[(0, most)]]
    learning = _first_backward_bytes(reduction) if reduction.blocks else most
    stay, gathered = (
        _storage_bytes(kept_tensors),
        _storage_bytes([*kept_tensors, *gather_tensors]) - _storage_bytes(kept_tensors),
    )
    return ScatterMemory(stay + sum(path.shared_bytes.values()), under_way, learning, gathered)


class _SimulatedScatterPath(SimulatedCollective):
    """The reduce_scatters of a simulated rank; each is complete when it is waited for.

    Attributes:
        shared_bytes: bytes in memory that ranks share, by key.
        received: receive buffers that stay.
    """

    def __init__(self, reduction: GradientReduction, group: RankGroup) -> None:
        super().__init__(group, Net(1.0))
        self._reduction, self.shared_bytes, self.received = reduction, dict[str, int](), list[Tensor]()

    def reduce_scatter(self, x: Tensor, key: str, arriving: ReceiveBuffer = None) -> Handle:
        if self._reduction.common:
            self.shared_bytes[key] = max(x.nbytes, self.shared_bytes.get(key, 0))
        elif self._reduction.receives == "caller" and arriving is not None and not self._reduction.blocks:
            self.received.append(arriving())
        return Handle(lambda deadline_seconds, exposed: x[self.group.rank])


class _SimulatedScatterRank:
    """A rank that scatters the gradients of simulated micro-batches; all ranks run alike.

    Args:
        reduction: gradients of the rank.
        path, memory: as in `ScatterPaths`.
    """

    def __init__(self, reduction: GradientReduction, path: _SimulatedScatterPath, memory: Workspace) -> None:
        self._reduction, self._pacer = reduction, ScatterPacer(reduction.behind) if reduction.blocks else None
        self._home = {name: number for number, block in enumerate(reduction.blocks) for name in block}
        self._rows: dict[ScatterReducer, int] = {}
        self._by_name: dict[str, tuple[ScatterReducer, TensorSlot]] = {}
        paths = ScatterPaths(
            path, SimulatedCollective(path.group, path.net), path.group, path.net, self._pacer, memory
        )
        self._order = ScatterOrder(paths, [placement.computes for placement in reduction.held])
        for number, layout in enumerate(reduction.often):
            tensors = meta_tensors(layout.members, reduction.item_bytes)
            parts = {placement.computes: placement.parts for placement in layout.members}
            most, name = reduction.recipe.runtime.bucket_bytes, scatter_buffer_prefix(number)
            reducer = ScatterReducer(tensors, parts, paths, most, name=name, order=self._order)
            # The result of a scatter is one row of its bucket.
            self._rows[reducer] = max(bucket.rows[0].nbytes for bucket in layout.buffers)
            self._by_name |= {slot.name: (reducer, slot) for slot in tensors}

    @property
    def blocks(self) -> list[Tensor]:
        """Return the memory of buckets that stays."""
        return [x for reducer in self._rows for x in reducer.blocks.kept]

    def run(self) -> list[list[tuple[int, int]]]:
        """Return for each micro-batch pairs (bytes of complete gradients, temporary bytes of scatters)."""
        micro_batches = []
        for _ in range(min(_ROUNDS, self._reduction.most_micro_batches) if self._rows else 0):
            done, samples = 0, [(0, self._temporary_bytes())]
            for num_bytes in self._complete_gradients():
                done += num_bytes
                samples.append((done, self._temporary_bytes()))
            micro_batches.append(samples)
        return micro_batches

    def _temporary_bytes(self) -> int:
        total = int(self._reduction.passing * self._order.launches.num_bytes)
        for reducer, row_bytes in self._rows.items():
            total += reducer.blocks.temporary_bytes
            total += self._reduction.allocates_own_row * row_bytes
        return total

    def _complete_gradients(self) -> Iterator[int]:
        """Pass the gradients of a micro-batch to their reducers, and yield the bytes of each.

        A block is gathered before its first gradient, which exchanges the progress of scatters.
        """
        order = _completion_order(
            [name for name in self._reduction.completes if name in self._by_name], [*self._by_name]
        )
        sent, gathered = self._send_progress(), set[int]()
        for name in order:
            block = self._home.get(name)
            if block is not None and block not in gathered:
                gathered.add(block)
                sent = self._receive_progress(sent if len(gathered) > 1 else self._send_progress())
            reducer, slot = self._by_name[name]
            reducer.ready(slot, None)
            yield slot_bytes(slot, self._reduction.item_bytes)
        self._receive_progress(self._send_progress())

    def _send_progress(self) -> list[float]:
        return [] if self._pacer is None else self._pacer.launch_counts()

    def _receive_progress(self, counts: list[float]) -> list[float]:
        """Take the progress of all ranks, which equals that of this one; return what it sends next."""
        if self._pacer is not None:
            self._pacer.update_counts(counts, is_idle=False)
        return self._send_progress()


def _completion_order(completes: list[str], names: list[str]) -> list[str]:
    """Return the order of handing on: tensors that are complete once, then tied ones, the last first."""
    times = Counter(completes)
    once = [name for name in completes if times[name] == 1]
    return once + [name for name in reversed(names) if times[name] != 1]


def _receive_buffers(reduction: GradientReduction, memory: Workspace) -> Iterator[Tensor]:
    """Yield the receive buffers of buckets that are scattered once a step."""
    for number, bucket in enumerate(reduction.scattered_once_per_step):
        (num_rows, width), dtype = bucket.rows.shape, bucket.rows.dtype
        for turn in range(min(MAX_IN_FLIGHT, number + 1)):
            yield memory.take(transfer_buffer_name(turn), (num_rows - 1, width), dtype, bucket.rows.device)


def _once_per_step(reduction: GradientReduction) -> list[tuple[int, int]]:
    """Return `ScatterMemory.under_way` of buckets that are scattered once a step."""
    buckets = reduction.scattered_once_per_step if reduction.receives == "route" else []
    sizes, done, samples = [bucket.flat.nbytes + bucket.rows[0].nbytes for bucket in buckets], 0, [(0, 0)]
    # Buckets are launched in this order, whatever order their gradients are complete in.
    for number, bucket in enumerate(buckets):
        done += sum(slot_bytes(slot, reduction.item_bytes) for slot in bucket.slots)
        samples.append((done, sum(sizes[max(0, number + 1 - MAX_IN_FLIGHT) : number + 1])))
    return samples if len(reduction.reductions) == 1 else [(0, 0), (1, sum(sorted(sizes)[-MAX_IN_FLIGHT:]))]


def _gather_buffers(reduction: GradientReduction, memory: Workspace) -> Iterator[Tensor]:
    """Yield the buffers through which parameters are gathered, in turn."""
    shapes = gather_buckets(reduction.held, reduction.item_bytes, reduction.recipe.runtime.bucket_bytes)
    for number, bucket in enumerate(shapes):
        flat, name = bucket.flat, transfer_buffer_name(number % MAX_IN_FLIGHT)
        yield memory.take(name, flat.shape, flat.dtype, flat.device)


def _most_behind_bytes(reduction: GradientReduction) -> int:
    """Return the bytes of all unconfirmed buckets, of one that is filled, and of what they receive."""
    return _first_backward_bytes(reduction) + sum(
        _largest_run_bytes(reduction, layout) for layout in reduction.often
    )


def _first_backward_bytes(reduction: GradientReduction) -> int:
    """Return the bytes of scatters at the end of the first backward, in place of the gradients."""
    arriving = int(
        reduction.passing * sum(_largest_run_bytes(reduction, layout) for layout in reduction.often)
    )
    rows = reduction.allocates_own_row * sum(
        max(bucket.rows[0].nbytes for bucket in layout.buffers) for layout in reduction.often
    )
    return (
        arriving
        + rows
        + sum(max(bucket.flat.nbytes for bucket in layout.buffers) for layout in reduction.often)
    )


def _largest_run_bytes(reduction: GradientReduction, layout: BucketLayout) -> int:
    """Return the most bytes of consecutive buckets that can be unconfirmed."""
    sizes = [bucket.flat.nbytes for bucket in layout.buffers]
    most = min(max_unconfirmed_buckets(sizes, reduction.behind), len(sizes))
    return max(sum((sizes + sizes)[first : first + most]) for first in range(len(sizes)))


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of tensors, each counted once."""
    memory = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(memory.values())


@dataclass(frozen=True)
class GradientSumMemory:
    """The bytes of gradients and their sums on a rank.

    Args:
        buckets: bytes of buckets, which stay from step to step.
        own: bytes of the sums of the rank's own parts, if they are not in a bucket.
        moved: temporary bytes of the reduction per byte of a gradient, in the last backward of a step.
        leaves: gradients are freed with every micro-batch, as soon as they are handed on.
        at_end: gradients are handed on only after a backward.
        waiting: partial sums that wait after each micro-batch, for sums in one order.
        stays: bytes of gradients between steps that are neither buckets nor own sums.
        under_way: as `ScatterMemory.under_way`.
        learns: the first backward of a run frees gradients only at its end.
        learning: as `ScatterMemory.learning`.
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
        """Return the temporary bytes of scatters with `done` bytes of gradients complete."""
        if not self.under_way:
            return 0
        by_done = self.under_way[min(micro_batch, len(self.under_way) - 1)]
        return next((num_bytes for least, num_bytes in reversed(by_done) if least <= done), 0)


def gradient_sum_memory(reduction: GradientReduction) -> GradientSumMemory:
    """Return the memory of the gradient reduction of a rank."""
    strategy, sizes = reduction.recipe.strategy, reduction.sizes
    if reduction.recipe.is_ordered:
        return _ordered_sums(reduction)
    if not reduction.has_other_ranks:
        return GradientSumMemory(sizes.shared, stays=sizes.computes)
    if reduction.leaves_often:
        return _scattered_sums(reduction)
    buckets = _whole_bytes(reduction.buckets) + sizes.shared
    if strategy.shard == 1:
        return GradientSumMemory(buckets)
    # With further replicas, the own row is summed over them in a buffer of its own.
    alone = reduction.sharers == strategy.shard
    at_once = not (reduction.common or reduction.scattered_once_per_step)
    own_row_bytes = _row_bytes(reduction.buckets) if at_once or (reduction.common and not alone) else 0
    before, waiting = (
        [[(0, 0)]] * (reduction.most_micro_batches - 1),
        [1] * (reduction.most_micro_batches - 1) + [0],
    )
    scatters = scatter_memory(reduction)
    return GradientSumMemory(
        buckets + scatters.stay + _slice_bytes(reduction),
        own_row_bytes,
        moved=int(at_once),
        waiting=waiting,
        under_way=[*before, *scatters.under_way],
    )


def _ordered_sums(reduction: GradientReduction) -> GradientSumMemory:
    """Return the memory of sums in one order (`reproducible`)."""
    strategy, sizes, sharers = reduction.recipe.strategy, reduction.sizes, reduction.sharers
    blocks = [split_evenly(reduction.shards, reduction.runners, rank) for rank in range(reduction.runners)]
    waiting_by_rank = [
        waiting_partial_sums(shards) for block in blocks for shards in _shards_by_stage(strategy, block)
    ]
    waiting = max(waiting_by_rank, key=lambda counts: (max(counts), sum(counts)))
    if sharers == 1:
        return GradientSumMemory(sizes.shared, at_end=True, waiting=waiting, stays=sizes.computes)
    nodes = max(len(covering_nodes(block)) for block in blocks)
    buckets = nodes * _whole_bytes(reduction.buckets) + sizes.shared
    num_copies, row_bytes = _ordered_wire_bytes(reduction, nodes)
    # Without shards the sum becomes the gradient itself, and is released before the next backward.
    apart = strategy.shard > 1
    sums = GradientSumMemory(buckets, moved=num_copies, leaves=True, waiting=[*waiting[:-1], 0])
    return replace(sums, own=row_bytes) if apart else replace(sums, stays=row_bytes)


def _ordered_wire_bytes(reduction: GradientReduction, nodes: int) -> tuple[int, int]:
    """Return copies of a gradient in flight, as sent and as received, and bytes of the sums.

    Buckets become the sums where ranks share memory, or where only one addition remains. A single node of the
    tree is sent without a copy.
    """
    shard = reduction.recipe.strategy.shard
    if reduction.common or (reduction.sharers == 2 and shard == 1 == nodes):
        return 0, 0
    as_it_lies = nodes == 1 and not 1 < shard < reduction.sharers
    return nodes * (2 - as_it_lies), _row_bytes(reduction.buckets)


def _shards_by_stage(strategy: Strategy, block: range) -> list[list[int]]:
    """Return for each stage the shards in the order in which their backwards end in its first chunk."""
    if strategy.pipeline == 1:
        return [[*block]]
    rows = make_schedule(strategy)(strategy.pipeline, len(block)).orders
    halves = {action.place for row in rows for action in row if action.kind == "W"}
    return [[block[a.micro_batch] for a in row if a.chunk == 0 and a.ends(halves)] for row in rows]


def _scattered_sums(reduction: GradientReduction) -> GradientSumMemory:
    """Return the memory of gradients that leave with every micro-batch (ZeRO 2 and 3)."""
    presummed_bytes = _whole_bytes(bucket for bucket in reduction.buckets if bucket.way.meets)
    scatters = scatter_memory(reduction)
    buckets = scatters.stay + presummed_bytes + reduction.sizes.shared + _slice_bytes(reduction)
    return GradientSumMemory(
        buckets,
        _row_bytes(reduction.buckets),
        leaves=True,
        under_way=scatters.under_way,
        learning=scatters.learning,
    )


def _slice_bytes(reduction: GradientReduction) -> int:
    """Return the bytes of slices that are added at a time in shared memory, one per path and dtype."""
    if not reduction.common:
        return 0
    paths = {(_scatter_path(reduction, bucket.way), bucket.way.item_bytes) for bucket in reduction.buckets}
    return sum(CHUNK_VALUES * item_bytes for _, item_bytes in paths)


def _scatter_path(reduction: GradientReduction, path: BucketPath) -> object:
    """Return an identifier of the path; each path that reduces after every micro-batch has its own."""
    inside = {"shard", "pipeline", "tensor"}
    return path.number if reduction.leaves_often and not path.meets else frozenset(path.axes) - inside


def _whole_bytes(buckets: Iterable[BucketBytes]) -> int:
    return sum(bucket.whole for bucket in buckets)


def _row_bytes(buckets: Iterable[BucketBytes]) -> int:
    return sum(bucket.row for bucket in buckets)


_READ_AT_ONCE_BYTES = 2**24
"""Bytes of parameters that ranks of one host read together after an update (ZeRO 1 and 2)."""


class GatherMemory(NamedTuple):
    """The bytes of parameter gathers on a rank.

    Args:
        stay: bytes of buffers, which stay from step to step.
        while_computing: bytes of gathered parameters while the rank computes (ZeRO 3).
        beginning: bytes of parameters outside blocks and their gather, before the first step (ZeRO 3).
        arriving: bytes that Gloo allocates in gathers after an update (ZeRO 1 and 2).
    """

    stay: int = 0
    while_computing: int = 0
    beginning: int = 0
    arriving: int = 0


def gather_memory(reduction: GradientReduction) -> GatherMemory:
    """Return the memory of gathers on a rank; parameters that a host shares are never gathered."""
    if reduction.recipe.strategy.shard == 1:
        return GatherMemory()
    if reduction.keeps:
        return (
            GatherMemory(_shared_part_bytes(reduction))
            if reduction.common
            else _gathers_after_update(reduction)
        )
    return GatherMemory() if reduction.common else _gathers_on_use(reduction)


def _shared_part_bytes(reduction: GradientReduction) -> int:
    """Return the bytes of the rank's own parts in shared memory, which other ranks read."""
    shapes = gather_buckets(reduction.held, reduction.item_bytes, _READ_AT_ONCE_BYTES)
    by_width = sorted(shapes, key=lambda bucket: bucket.rows.shape[1])
    return sum({bucket.rows.dtype: bucket.rows[0].nbytes for bucket in by_width}.values())


def _gathers_after_update(reduction: GradientReduction) -> GatherMemory:
    shapes = gather_buckets(reduction.held, reduction.item_bytes, reduction.recipe.runtime.bucket_bytes)
    sizes = [bucket.flat.nbytes for bucket in shapes]
    together = max((sum(sizes[k : k + MAX_IN_FLIGHT]) for k in range(len(sizes))), default=0)
    arriving = gloo_copies(reduction.recipe.strategy.shard) * together
    return GatherMemory(scatter_memory(reduction).gathered, arriving=int(arriving))


def _gathers_on_use(reduction: GradientReduction) -> GatherMemory:
    blocks, rest_bytes = reduction.by_block
    shard = reduction.recipe.strategy.shard
    computing, beginning = (
        gathered_bytes(blocks, rest_bytes, shard),
        int((2 + gloo_copies(shard)) * rest_bytes),
    )
    return GatherMemory(max(blocks, default=0), computing, beginning)
