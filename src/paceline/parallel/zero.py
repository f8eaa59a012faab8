"""ZeRO: shard optimizer state (1), gradients (2) and parameters (3) over the ranks of the shard axis.

ZeRO 1 and 2 compute with whole tensors. Each rank updates its parts, and after the update the parts of the
other ranks are gathered (`GatherAfterUpdate`, `SharedReadAfterUpdate`). The placement decides whether
gradients are freed; `GradientHooks` and the reduction free them.

ZeRO 3 keeps only the parts in memory. Before a block's forward its parameters are gathered, and after it
their memory is freed; before its backward they are gathered again, and freed when the last of their
gradients is complete and the next block computes. While a block computes, the next gather is in flight.
Parameters outside of all blocks are gathered for a whole `run`. A gathered parameter has the bits of the
whole one. Only the memory of a parameter is freed, never its object or shape, so autograd finds in backward
what it saved in forward.
Gathers run in one order on every rank, whatever order it uses the blocks in (`GatherCycle`). A parameter that
is used outside its block, as by a loss, stays until the end of the micro-batch.

Sources: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, sections 5.1 and 5.3; Zhao et al. 2023, PyTorch
FSDP, arXiv:2304.11277, section 3.2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.comm.collectives.collective_protocol import Collective
from paceline.comm.handle import Handle, wait_ignoring_errors
from paceline.comm.net import Net, group_device
from paceline.comm.reduction.bucket_buffers import (
    MAX_IN_FLIGHT,
    PartBuffer,
    PartsBySlot,
    bucket_bytes_of,
    plan_buckets,
    transfer_buffer_name,
)
from paceline.comm.reduction.scatter_schedule import ScatterPacer, unconfirmed_bytes
from paceline.comm.routes.shared_memory import SharedMemoryCollective
from paceline.comm.workspace import Workspace
from paceline.errors import TaskError
from paceline.job.mesh import RankGroup
from paceline.parallel.host_shared_parameters import share_sharded_parameters
from paceline.parallel.placement import ShardTransform
from paceline.parallel.recompute import recomputed_blocks
from paceline.parallel.sharded_model import ModelPartition, ShardedModel, outermost_dims, refuse_compile
from paceline.parallel.unsharded_guard import freed_parameter_class
from paceline.state.slot import TensorSlot

if TYPE_CHECKING:
    from paceline.parallel.session_context import SessionContext, TaskMaterial

# Ranks synchronize for each of these reads, and a buffer of this size stays allocated.
_READ_BYTES = 2**24


class GatherAfterUpdate:
    """All-gather of updated parameters after an optimizer step; calls are collective over the shard group.

    Args:
        sharded_model: its updated parts are views of what they are parts of.
        collective: over the shard group; must be exact.
        bucket_bytes: bytes of parameters that are gathered together; see `bucket_bytes_of`.
        memory: workspace of the gathers in flight, two buckets at a time; others may use it between calls.
    Wire: (S-1)/S n bytes, in one all_gather for each bucket. A call allocates nothing, except inside the
        backend.
    """

    def __init__(
        self, sharded_model: ShardedModel, collective: Collective, bucket_bytes: int, memory: Workspace
    ) -> None:
        self._collective, self._memory = collective, memory
        self._tensors, self._device = sharded_model.computes, sharded_model.device
        self._shapes = _bucket_shapes(sharded_model, bucket_bytes_of(self._tensors.values(), bucket_bytes))
        # Allocated now: memory must not grow while a thread of the backend reads it.
        for number in range(len(self._shapes)):
            self._rows(number)

    def __call__(self) -> None:
        """Send this rank's parts and read those of all other ranks."""
        in_flight: deque[tuple[PartBuffer, Handle]] = deque()
        for number, shape in enumerate(self._shapes):
            # At most two buckets in flight, because only two have memory.
            if len(in_flight) == MAX_IN_FLIGHT:
                self._read(*in_flight.popleft())
            in_flight.append((shape, self._start(number)))
        for pending in in_flight:
            self._read(*pending)

    def _start(self, number: int) -> Handle:
        rank, shape, rows = self._collective.group.rank, self._shapes[number], self._rows(number)
        shape.write_row(rank, self._tensors, rows[rank])
        # Two keys in turn, since two buckets in flight must not share a buffer of the collective.
        key = f"parameters.{rows.dtype}.{number % MAX_IN_FLIGHT}"
        return self._collective.all_gather(rows[rank], key, rows)

    def _rows(self, number: int) -> Tensor:
        """Return the memory of a bucket, which every second bucket shares."""
        rows = self._shapes[number].rows
        return self._memory.take(
            transfer_buffer_name(number % MAX_IN_FLIGHT), rows.shape, rows.dtype, self._device
        )

    def _read(self, shape: PartBuffer, handle: Handle) -> None:
        for row, values in enumerate(handle.wait()):
            # This rank's parts are views of the whole tensors, so they are up to date.
            if row != self._collective.group.rank:
                shape.read_row(row, values, self._tensors)


class SharedReadAfterUpdate:
    """Read of updated parameters from shared memory after an optimizer step, for the ranks of one host.

    Args:
        sharded_model: see `GatherAfterUpdate`.
        memory: shared by the ranks of the shard group.
    Wire: nothing; the ledger counts an all_gather for each 16 MiB or rest. A call allocates nothing.
    """

    def __init__(self, sharded_model: ShardedModel, memory: SharedMemoryCollective) -> None:
        self._memory, self._tensors = memory, sharded_model.computes
        self._shapes = _bucket_shapes(sharded_model, bucket_bytes_of(self._tensors.values(), _READ_BYTES))
        # One shared buffer for each dtype, as wide as the widest bucket, so a call allocates nothing.
        widest = _widest_by_dtype(self._shapes)
        self._row_by_dtype = {
            dtype: memory.buffer(*_row_size(shape), _buffer_key(dtype)) for dtype, shape in widest.items()
        }

    def __call__(self) -> None:
        """Write this rank's parts to shared memory and read those of the other ranks."""
        group = self._memory.group
        for shape in self._shapes:
            dtype, width = shape.rows.dtype, shape.rows.shape[1]
            local_row = self._row_by_dtype[dtype][:width]
            shape.write_row(group.rank, self._tensors, local_row)
            calls = [("all_gather", group, local_row.nbytes)]
            self._memory.combine([_buffer_key(dtype)], calls, partial(self._read, shape, width)).wait()

    def _read(self, shape: PartBuffer, width: int, rows_by_key: Sequence[Sequence[Tensor]]) -> None:
        for row, values in enumerate(rows_by_key[0]):
            if row != self._memory.group.rank:
                shape.read_row(row, values[:width], self._tensors)


def _bucket_shapes(sharded_model: ShardedModel, bucket_bytes: int) -> list[PartBuffer]:
    """Return where parts are in each bucket, without allocating the buckets."""
    return [
        PartBuffer(slots, sharded_model.computes, sharded_model.parts, _meta_row)
        for slots in plan_buckets(sharded_model.computes, bucket_bytes)
    ]


def _widest_by_dtype(shapes: Iterable[PartBuffer]) -> dict[torch.dtype, PartBuffer]:
    by_width = sorted(shapes, key=lambda shape: shape.rows.shape[1])
    # Later entries replace earlier ones, so the widest of each dtype remains.
    return {shape.rows.dtype: shape for shape in by_width}


def _buffer_key(dtype: torch.dtype) -> str:
    return f"parameters.{dtype}"


def _row_size(shape: PartBuffer) -> tuple[int, Tensor]:
    """Return the number of values of a row, and an empty tensor of its dtype."""
    return shape.rows.shape[1], torch.empty(0, dtype=shape.rows.dtype)


def _meta_row(num_values: int, like: Tensor) -> Tensor:
    return like.new_empty(num_values, device="meta")


class GatheredBlock:
    """Parameters of one block of a model, which are gathered and freed together.

    Args:
        tensors: parameters in their whole shape, with or without memory.
        updates: this rank's parts.
        parts: parts of every rank of the shard group.
        collective: over the shard group; must be exact.
        name: prefix of buffer names.
        freed_class: class of a parameter that has no memory.
        memory: where gathers arrive, if at most one of them is in flight; None: each allocates its own
            memory.
    """

    def __init__(
        self,
        tensors: Mapping[TensorSlot, nn.Parameter],
        updates: Mapping[TensorSlot, nn.Parameter],
        parts: PartsBySlot,
        collective: Collective,
        name: str,
        freed_class: type[nn.Parameter],
        memory: Workspace | None = None,
    ) -> None:
        self.tensors, self._updates, self._parts = tensors, updates, parts
        self._collective, self._name, self._memory = collective, name, memory
        # Without a limit: one bucket for neighbouring parameters of one dtype.
        self._groups: Sequence[Sequence[TensorSlot]] = plan_buckets(tensors, 2**62)
        self._freed_class, self._kinds = freed_class, {slot: type(p) for slot, p in tensors.items()}
        self.is_gathered, self.stays = True, False
        self._arriving: list[tuple[PartBuffer, Handle]] = []
        # None: no backward of this block has begun.
        self._missing_gradients: set[TensorSlot] | None = None
        for p in tensors.values():
            if p.untyped_storage().size():
                # A storage of its own, so that it can be freed alone.
                p.data = torch.empty_like(p).copy_(p.detach())

    def _rows(self, number: int, num_values: int, like: Tensor) -> Tensor:
        """Return memory for a gather, by rank; its contents beyond the parts are undefined."""
        if self._memory is None:
            return like.new_empty(num_values)
        return self._memory.take(f"gathered.{number}", (num_values,), like.dtype, like.device)

    @property
    def num_bytes(self) -> int:
        """Bytes of its whole parameters."""
        return sum(p.numel() * p.element_size() for p in self.tensors.values())

    def start(self) -> None:
        """Start the gather unless it is in flight; collective."""
        if self._arriving:
            return
        rank = self._collective.group.rank
        with torch.no_grad():
            for number, slots in enumerate(self._groups):
                buffer = PartBuffer(slots, self.tensors, self._parts, partial(self._rows, number))
                buffer.write_row(rank, self._updates)
                handle = self._collective.all_gather(buffer.rows[rank], f"{self._name}.{number}", buffer.rows)
                self._arriving.append((buffer, handle))

    def gather(self) -> None:
        """Allocate the parameters and gather their values; collective, unless they are gathered already."""
        if self.is_gathered:
            return
        self.start()
        with torch.no_grad():
            for buffer, handle in self._arriving:
                handle.wait()
                for slot in buffer.slots:
                    p = self.tensors[slot]
                    # Before `p.data` is read: with the class of freed parameters, that would start another
                    # gather.
                    p.__class__ = self._kinds[slot]
                    # Resizing the storage keeps the tensor that autograd has saved.
                    p.untyped_storage().resize_(p.numel() * p.element_size())
                    buffer.read(slot, p.data)
        self._arriving, self.is_gathered = [], True

    def join(self) -> None:
        """Take part in a gather whose result this rank does not need; collective."""
        self.start()
        for _, handle in self._arriving:
            handle.wait()
        self._arriving = []

    def release(self) -> None:
        """Free the memory of the parameters and drop a gather in flight."""
        # The backend may still write into the memory of a gather, so it cannot be dropped before it ends.
        wait_ignoring_errors(handle for _, handle in self._arriving)
        if self.is_gathered:
            for p in self.tensors.values():
                p.untyped_storage().resize_(0)
                # Any use outside of the block's hooks then gathers the block instead of reading freed memory.
                p.__class__ = self._freed_class
        self._arriving, self._missing_gradients = [], None
        self.is_gathered = self.stays = False

    def expect_gradients(self) -> None:
        """Wait for the gradients of a backward that begins.

        When all of them are complete, the parameters are rarely needed again.
        """
        self._missing_gradients = set(self.tensors)

    def mark_gradient_ready(self, slot: TensorSlot, _p: Any) -> None:
        """Mark the gradient of a parameter as complete."""
        if self._missing_gradients is not None:
            self._missing_gradients.discard(slot)

    @property
    def can_be_released(self) -> bool:
        """Whether the parameters may be freed once another block computes: all gradients are complete."""
        return self.is_gathered and self._missing_gradients == set() and not self.stays


class GatherCycle:
    """Sequence of gathers of one run or evaluation, equal on all ranks.

    Before each cycle the ranks agree whether any of them needs one. With that, and next to each gather for
    backwards, they exchange how many scatters of gradients each has launched.

    Args:
        blocks: in the order in which most micro-batches use them.
        group: ranks that gather.
        net: carries the agreement and the counts.
        pace: counts of the scatters of gradients; None if there are no blocks.
    """

    def __init__(
        self, blocks: Sequence[GatheredBlock], group: RankGroup, net: Net, pace: ScatterPacer | None
    ) -> None:
        self._blocks, self._group, self._net, self._pace = blocks, group, net, pace
        self._order: list[int] = []
        self._position = 0
        self._count_exchange: Handle | None = None
        self._trains = self._is_idle = False

    def begin(self, *, both_directions: bool) -> None:
        """Begin a run, with gathers in both directions, or an evaluation, with forward gathers only."""
        forward_order = [*range(len(self._blocks))]
        self._order = forward_order + forward_order[::-1] if both_directions else forward_order
        self.stop()
        self._trains, self._is_idle = both_directions, False

    def stop(self) -> None:
        """Stop: nothing more is gathered."""
        wait_ignoring_errors([self._count_exchange])
        self._position, self._count_exchange = len(self._order), None

    def next(self) -> None:
        """Begin a micro-batch; collective."""
        self._finish()
        self._open(is_needed=True)

    def end(self) -> None:
        """Take part in further cycles until no rank needs one."""
        self._finish()
        # From now on this rank only takes part: it launches zeros where others have scattered gradients.
        self._is_idle = self._trains
        while self._open(is_needed=False):
            self._finish()
        self.stop()

    def bring(self, number: int) -> None:
        """Gather a block and start the gather of the next one."""
        # Freed before the gather below allocates, which bounds the memory of a run.
        for index, block in enumerate(self._blocks):
            if index != number and block.can_be_released:
                block.release()
        if self._blocks[number].is_gathered:
            return
        if number not in self._order[self._position :]:
            # The cycle has passed this block: complete it, since the other ranks count on every gather.
            self._finish()
            self._open(is_needed=True)
        # Other ranks may use the blocks that this rank skips, and they need its parts of them.
        while self._order[self._position] != number:
            self._join()
        self._start()
        self._blocks[number].gather()
        self._pass()
        # Prefetch: the next gather runs while this block computes.
        if self._position < len(self._order) and not self._blocks[self._order[self._position]].is_gathered:
            self._start()

    def _join(self) -> None:
        self._start()
        self._blocks[self._order[self._position]].join()
        self._pass()

    def _start(self) -> None:
        """Start the next gather and the exchange of counts, unless they are in flight."""
        self._blocks[self._order[self._position]].start()
        # Only backward launches scatters, and its gathers are the second half of a cycle.
        if self._pace is not None and self._count_exchange is None and self._position >= len(self._blocks):
            self._count_exchange = self._start_count_exchange(self._pace)

    def _pass(self) -> None:
        """Advance to the next gather and read the counts that were exchanged next to this one."""
        exchange, self._count_exchange = self._count_exchange, None
        self._position += 1
        if exchange is not None and self._pace is not None:
            self._pace.update_counts(exchange.wait().tolist(), is_idle=self._is_idle)

    def _start_count_exchange(self, pace: ScatterPacer) -> Handle:
        counts = torch.tensor(pace.launch_counts(), dtype=torch.float64, device=group_device(self._group))
        return self._net.all_reduce(counts, self._group, "max")

    def _finish(self) -> None:
        """Take part in the rest of the cycle."""
        while self._position < len(self._order):
            self._join()

    def _open(self, *, is_needed: bool) -> bool:
        """Agree on another cycle and return whether any rank needs one."""
        # The flag and the counts travel in one all_reduce; float64 holds the counts exactly.
        counts = [float(is_needed), *(self._pace.launch_counts() if self._pace is not None else ())]
        tensor = torch.tensor(counts, dtype=torch.float64, device=group_device(self._group))
        is_needed_anywhere, *max_counts = self._net.all_reduce(tensor, self._group, "max").wait().tolist()
        self._position = 0 if is_needed_anywhere else len(self._order)
        if self._pace is not None:
            self._pace.update_counts(max_counts, is_idle=self._is_idle)
        return bool(is_needed_anywhere)


class ParameterGatherer:
    """Parameter lifecycle of ZeRO 3: gathers and frees one rank's parameters around their use.

    Ranks may have different numbers of micro-batches and use blocks in different orders; see `GatherCycle`.

    Args:
        computes: parameters in their whole shape; their memory is freed here.
        updates: this rank's parts.
        parts: parts of every rank of the shard group.
        blocks: modules that are gathered by themselves, in the order in which most micro-batches use them;
            without any, everything is gathered for a whole run.
        collective: over the shard group; must be exact.
        net: carries the agreement.
    Wire: for every micro-batch, two gathers of (S-1)/S n bytes (one in evaluation), and all_reduces of 8
        bytes plus 16 for each reduction: one, and in training one more for each block. The same again
        whenever a micro-batch uses the blocks in another order.
    """

    gathers = True

    def __init__(
        self,
        computes: Mapping[TensorSlot, nn.Parameter],
        updates: Mapping[TensorSlot, nn.Parameter],
        parts: PartsBySlot,
        blocks: Sequence[nn.Module],
        collective: Collective,
        net: Net,
    ) -> None:
        self._blocks: list[GatheredBlock] = []
        self._block_of_parameter: dict[int, tuple[str, int]] = {}
        freed_class = freed_parameter_class(self._gather_outside_block)
        remaining, memory = dict(computes), Workspace()
        for block in blocks:
            parameters_inside = set(block.parameters())
            block_parameters = {slot: p for slot, p in remaining.items() if p in parameters_inside}
            if block_parameters:
                # A parameter in two blocks belongs to the first; used in the second, it counts as used
                # outside.
                remaining = {slot: p for slot, p in remaining.items() if slot not in block_parameters}
                name = f"block {len(self._blocks)}"
                self._add(
                    block,
                    GatheredBlock(block_parameters, updates, parts, collective, name, freed_class, memory),
                )
        # What no block contains is used at unknown times, so it stays gathered for a whole run.
        self._rest = (
            GatheredBlock(remaining, updates, parts, collective, "rest", freed_class) if remaining else None
        )
        self._block_of_parameter |= {id(p): (slot.name, len(self._blocks)) for slot, p in remaining.items()}
        self.pace = self._make_pace() if self._blocks else None
        self._cycle = GatherCycle(self._blocks, collective.group, net, self.pace)
        self.drop()

    def _make_pace(self) -> ScatterPacer:
        rest_bytes = 0 if self._rest is None else self._rest.num_bytes
        return ScatterPacer(unconfirmed_bytes([block.num_bytes for block in self._blocks], rest_bytes))

    def _add(self, module: nn.Module, block: GatheredBlock) -> None:
        """Register hooks that gather and free a block as its module computes."""
        number = len(self._blocks)
        self._blocks.append(block)
        module.register_forward_pre_hook(lambda *_: self._bring(number))
        module.register_forward_hook(lambda *_: self._after_forward(number))
        module.register_full_backward_pre_hook(lambda *_: self._on_backward_start(number))
        for slot, p in block.tensors.items():
            self._block_of_parameter[id(p)] = slot.name, number
            p.register_post_accumulate_grad_hook(partial(block.mark_gradient_ready, slot))

    def begin(self) -> None:
        if self._rest is not None:
            self._rest.gather()
        self._cycle.begin(both_directions=torch.is_grad_enabled())
        self._is_running = True

    def next(self) -> None:
        if self._blocks:
            self._cycle.next()
            # Also the blocks that stayed gathered because they were used outside of their module.
            for block in self._blocks:
                block.release()

    def end(self) -> None:
        if self._blocks:
            self._cycle.end()
        self.drop()

    def drop(self) -> None:
        for block in (*self._blocks, *([self._rest] if self._rest is not None else [])):
            block.release()
        self._cycle.stop()
        self._is_running = False

    def _after_forward(self, number: int) -> None:
        """Free a block after its forward.

        A forward that is recomputed inside a backward is followed by the block's backward, so it keeps the
        block.
        """
        block = self._blocks[number]
        if not (_is_in_backward() or block.stays):
            block.release()

    def _on_backward_start(self, number: int) -> None:
        """Gather a block for its backward."""
        self._bring(number)
        self._blocks[number].expect_gradients()

    def _gather_outside_block(self, p: nn.Parameter) -> None:
        """Gather the block of a freed parameter that is used outside of it."""
        name, number = self._block_of_parameter[id(p)]
        self._require_running(name)
        self._bring(number)
        self._blocks[number].stays = True

    def _bring(self, number: int) -> None:
        self._require_running(next(iter(self._blocks[number].tensors)).name)
        self._cycle.bring(number)

    def _require_running(self, name: str) -> None:
        """Require that ranks are inside a run, where gathers can meet.

        Raises:
            TaskError: this is between two runs.
        """
        if not self._is_running:
            raise TaskError(
                f"'{name}' is used between steps, when a rank holds only its part of it (zero=3)",
                next_step="use it in the loss, read whole tensors from session.snapshot() on every rank,"
                " write them in `with session.weights() as model:`, or choose zero=2",
            )


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def shard_optimizer_state(
    context: SessionContext, material: TaskMaterial, *, frees_gradients: bool = False
) -> ModelPartition:
    """Return the partition of zero=1: each rank updates its parts and then gathers those of other ranks."""
    group = context.mesh.axes["shard"]

    def gather(sharded_model: ShardedModel) -> Callable[[], None]:
        collective = context.exact_collective(group)
        if isinstance(collective, SharedMemoryCollective):
            return SharedReadAfterUpdate(sharded_model, collective)
        return GatherAfterUpdate(sharded_model, collective, context.bucket_bytes, context.workspace)

    return ModelPartition(
        ShardTransform(group.size, _shard_dims(context, material), frees_gradients=frees_gradients),
        gather=gather,
    )


def shard_gradients(context: SessionContext, material: TaskMaterial) -> ModelPartition:
    """Return the partition of zero=2: as zero=1, and gradients are scattered as soon as they are complete."""
    return shard_optimizer_state(context, material, frees_gradients=True)


def shard_parameters(context: SessionContext, material: TaskMaterial) -> ModelPartition:
    """Return the partition of zero=3: each rank holds only the parts that it updates.

    Whole tensors are in memory that the ranks of a host share, or are gathered by block; a pipeline stage
    gathers them for a whole run.

    Raises:
        StrategyError: the model is compiled.
    """
    refuse_compile(context, "zero=3")
    group = context.mesh.axes["shard"]

    def prepare(sharded_model: ShardedModel) -> ShardedModel:
        staged = context.mesh.axes["pipeline"].size > 1
        # A stage runs forwards of several micro-batches before a backward, which no cycle allows for.
        blocks = [] if staged else recomputed_blocks(material.model, material.task.blocks)
        collective = context.exact_collective(group)
        if isinstance(collective, SharedMemoryCollective):
            return share_sharded_parameters(sharded_model, collective)
        use = ParameterGatherer(
            sharded_model.computes,
            sharded_model.updates,
            sharded_model.parts,
            blocks,
            collective,
            context.net,
        )
        return replace(sharded_model, use=use)

    return ModelPartition(
        ShardTransform(group.size, _shard_dims(context, material), keeps=False, frees_gradients=True),
        prepare=prepare,
    )


def _shard_dims(context: SessionContext, material: TaskMaterial) -> dict[str, int]:
    """Return the dimension along which each tensor is split; with ordered sums the norm is added by rows."""
    return {} if context.recipe.is_ordered else outermost_dims(material.model)
