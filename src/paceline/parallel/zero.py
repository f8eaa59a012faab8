"""ZeRO 1 and 2: every rank computes with whole tensors, updates its parts, and is given those of the others.

Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.1 (optimizer state partitioning).

Parameters that come and go together: whole while they are used, parts of them otherwise.

Gathers of blocks in one order on every rank, whatever order each rank uses them in.

A cycle gathers every block once in their order, for forwards, and, unless it is an evaluation, once back, for
backwards. A rank that needs a block takes part in the gathers before it, and drops what it does not need; a
block that the cycle has passed comes in the next one. So ranks may skip blocks, use them in another order or
several times, each as its samples ask for: no gather meets that of another block. Before each cycle the ranks
agree whether anybody needs one; then, and beside each gather for backwards, they tell how many scatters of
gradients each has launched.

ZeRO 3: a rank keeps its parts; whole tensors exist while a block computes with them.

Before a block's forward its parameters are gathered, after it their memory is given back; before its
backward they are gathered again, and given back when the last of their gradients is there and the next block
computes. While a block computes, the next one is on its way. What lies in no block is gathered for a whole
`run`. A gathered parameter has the bits of the whole one.

A parameter that is used outside its block, as by a loss, is gathered with its block at its first use, and
stays until the micro-batch has ended, since nobody knows who needs it in backward.

The parameters of the modules keep their shape; only their memory comes and goes, so that autograd finds in
backward what it saved in forward.
Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.3; Zhao et al. 2023, PyTorch FSDP,
arXiv:2304.11277, section 3.2.
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

_READ_BYTES = 2**24  # ranks meet for each, and its buffer stays


class GatherAfterUpdate:
    """Collective over the shard group; call it after an update.

    Args:
        sharded_model: whose updated parts share memory with what they are parts of.
        collective: over the shard group; exact.
        bucket_bytes: of parameters that go together; see `bucket_bytes_of`.
        memory: of what is under way, two buckets at a time; others may use it between calls.
    Wire: (S-1)/S n bytes, in an all_gather for each bucket. A call allocates nothing, but what the backend
        takes for itself.
    """

    def __init__(
        self, sharded_model: ShardedModel, collective: Collective, bucket_bytes: int, memory: Workspace
    ) -> None:
        self._collective, self._memory = collective, memory
        self._tensors, self._device = sharded_model.computes, sharded_model.device
        self._shapes = _bucket_shapes(sharded_model, bucket_bytes_of(self._tensors.values(), bucket_bytes))
        for number in range(len(self._shapes)):  # none has to grow while a thread of a backend has it
            self._rows(number)

    def __call__(self) -> None:
        """Send this rank's parts, and read everybody's."""
        arriving: deque[tuple[PartBuffer, Handle]] = deque()
        for number, shape in enumerate(self._shapes):
            if len(arriving) == MAX_IN_FLIGHT:
                self._read(*arriving.popleft())
            arriving.append((shape, self._start(number)))
        for one in arriving:
            self._read(*one)

    def _start(self, number: int) -> Handle:
        place, shape, rows = self._collective.group.rank, self._shapes[number], self._rows(number)
        shape.write_row(place, self._tensors, rows[place])
        key = f"parameters.{rows.dtype}.{number % MAX_IN_FLIGHT}"
        return self._collective.all_gather(rows[place], key, rows)

    def _rows(self, number: int) -> Tensor:
        """Memory of a bucket, which the next but one has as well."""
        rows = self._shapes[number].rows
        return self._memory.take(
            transfer_buffer_name(number % MAX_IN_FLIGHT), rows.shape, rows.dtype, self._device
        )

    def _read(self, shape: PartBuffer, arriving: Handle) -> None:
        for row, part in enumerate(arriving.wait()):
            if row != self._collective.group.rank:
                shape.read_row(row, part, self._tensors)


class SharedReadAfterUpdate:
    """The same on one host: each rank reads the others' parts where these have put them, some at a time.

    Args:
        sharded_model: see `GatherAfterUpdate`.
        memory: of the ranks of the shard group.
    Wire: nothing; the ledger counts an all_gather for each 16 MiB, or part of all. A call allocates nothing.
    """

    def __init__(self, sharded_model: ShardedModel, memory: SharedMemoryCollective) -> None:
        self._memory, self._tensors = memory, sharded_model.computes
        self._shapes = _bucket_shapes(sharded_model, bucket_bytes_of(self._tensors.values(), _READ_BYTES))
        widest = _widest_by_dtype(self._shapes)
        self._own = {
            dtype: memory.buffer(*_row_size(shape), _buffer_key(dtype)) for dtype, shape in widest.items()
        }

    def __call__(self) -> None:
        """Put this rank's parts where the others read them, and read theirs."""
        group = self._memory.group
        for shape in self._shapes:
            dtype, width = shape.rows.dtype, shape.rows.shape[1]
            own = self._own[dtype][:width]
            shape.write_row(group.rank, self._tensors, own)
            calls = [("all_gather", group, own.nbytes)]
            self._memory.combine([_buffer_key(dtype)], calls, partial(self._read, shape, width)).wait()

    def _read(self, shape: PartBuffer, width: int, parts: Sequence[Sequence[Tensor]]) -> None:
        for row, part in enumerate(parts[0]):
            if row != self._memory.group.rank:
                shape.read_row(row, part[:width], self._tensors)


def _bucket_shapes(sharded_model: ShardedModel, together: int) -> list[PartBuffer]:
    """Where parts lie in what goes together."""
    return [
        PartBuffer(slots, sharded_model.computes, sharded_model.parts, _meta_row)
        for slots in plan_buckets(sharded_model.computes, together)
    ]


def _widest_by_dtype(shapes: Iterable[PartBuffer]) -> dict[torch.dtype, PartBuffer]:
    by_width = sorted(shapes, key=lambda shape: shape.rows.shape[1])
    return {shape.rows.dtype: shape for shape in by_width}


def _buffer_key(dtype: torch.dtype) -> str:
    return f"parameters.{dtype}"


def _row_size(shape: PartBuffer) -> tuple[int, Tensor]:
    """Values of a row, and a tensor without any that it is like."""
    return shape.rows.shape[1], torch.empty(0, dtype=shape.rows.dtype)


def _meta_row(num_values: int, like: Tensor) -> Tensor:
    return like.new_empty(num_values, device="meta")


class GatheredBlock:
    """The parameters of one block of a model.

    Args:
        tensors: whole-shaped parameters, in memory or without.
        updates: this rank's parts.
        parts: of every rank of the shard group.
        collective: over the shard group; exact.
        name: of its buffers.
        away: the class of a parameter that has no memory.
        memory: where gathers arrive, of which one is under way at a time; None: each has memory of its own.
    """

    def __init__(
        self,
        tensors: Mapping[TensorSlot, nn.Parameter],
        updates: Mapping[TensorSlot, nn.Parameter],
        parts: PartsBySlot,
        collective: Collective,
        name: str,
        away: type[nn.Parameter],
        memory: Workspace | None = None,
    ) -> None:
        self.tensors, self._updates, self._parts = tensors, updates, parts
        self._collective, self._name, self._memory = collective, name, memory
        self._groups: Sequence[Sequence[TensorSlot]] = plan_buckets(tensors, 2**62)
        self._freed_class, self._kinds = away, {slot: type(p) for slot, p in tensors.items()}
        self.is_gathered, self.stays = True, False
        self._arriving: list[tuple[PartBuffer, Handle]] = []
        self._missing_gradients: set[TensorSlot] | None = None  # None: no backward has begun
        for p in tensors.values():
            if p.untyped_storage().size():
                p.data = torch.empty_like(p).copy_(p.detach())  # memory of its own, that can be given back

    def _rows(self, number: int, num_values: int, like: Tensor) -> Tensor:
        """What arrives, by rank; beyond the parts it may be anything."""
        if self._memory is None:
            return like.new_empty(num_values)
        return self._memory.take(f"gathered.{number}", (num_values,), like.dtype, like.device)

    @property
    def num_bytes(self) -> int:
        """Of its parameters, whole."""
        return sum(p.numel() * p.element_size() for p in self.tensors.values())

    def start(self) -> None:
        """Begin to gather, unless it is on its way; collective."""
        if self._arriving:
            return
        place = self._collective.group.rank
        with torch.no_grad():
            for number, slots in enumerate(self._groups):
                buffer = PartBuffer(slots, self.tensors, self._parts, partial(self._rows, number))
                buffer.write_row(place, self._updates)
                rows = self._collective.all_gather(buffer.rows[place], f"{self._name}.{number}", buffer.rows)
                self._arriving.append((buffer, rows))

    def gather(self) -> None:
        """Bring everything here; collective, unless it is here."""
        if self.is_gathered:
            return
        self.start()
        with torch.no_grad():
            for buffer, rows in self._arriving:
                rows.wait()
                for slot in buffer.slots:
                    p = self.tensors[slot]
                    p.__class__ = self._kinds[slot]
                    p.untyped_storage().resize_(p.numel() * p.element_size())
                    buffer.read(slot, p.data)
        self._arriving, self.is_gathered = [], True

    def join(self) -> None:
        """Take part in a gather whose result nobody needs here; collective."""
        self.start()
        for _, rows in self._arriving:
            rows.wait()
        self._arriving = []

    def release(self) -> None:
        """Give the memory back, also of what is on its way."""
        wait_ignoring_errors(rows for _, rows in self._arriving)
        if self.is_gathered:
            for p in self.tensors.values():
                p.untyped_storage().resize_(0)
                p.__class__ = self._freed_class
        self._arriving, self._missing_gradients = [], None
        self.is_gathered = self.stays = False

    def expect_gradients(self) -> None:
        """A backward begins: once all gradients are there, hardly anybody needs the parameters."""
        self._missing_gradients = set(self.tensors)

    def mark_gradient_ready(self, slot: TensorSlot, _p: Any) -> None:
        """A gradient is complete."""
        if self._missing_gradients is not None:
            self._missing_gradients.discard(slot)

    @property
    def can_be_released(self) -> bool:
        """Whether it may go once another block computes: all its gradients are there."""
        return self.is_gathered and self._missing_gradients == set() and not self.stays


class GatherCycle:
    """The gathers of one run or evaluation.

    Args:
        blocks: in the order in which most micro-batches use them.
        group: the ranks that gather.
        net: carries the agreement, and what ranks tell.
        pace: of the scatters of the gradients; None: there are no blocks.
    """

    def __init__(
        self, blocks: Sequence[GatheredBlock], group: RankGroup, net: Net, pace: ScatterPacer | None
    ) -> None:
        self._blocks, self._group, self._net, self._pace = blocks, group, net, pace
        self._order: list[int] = []
        self._place = 0
        self._telling: Handle | None = None
        self._trains = self._is_idle = False

    def begin(self, *, both_ways: bool) -> None:
        """Of a run, both ways; of an evaluation, forward only."""
        there = [*range(len(self._blocks))]
        self._order = there + there[::-1] if both_ways else there
        self.stop()
        self._trains, self._is_idle = both_ways, False

    def stop(self) -> None:
        """Nothing more is gathered."""
        wait_ignoring_errors([self._telling])
        self._place, self._telling = len(self._order), None

    def next(self) -> None:
        """A micro-batch begins; collective."""
        self._finish()
        self._open(is_needed=True)

    def end(self) -> None:
        """Nothing more is needed here; take part until that is so on every rank."""
        self._finish()
        self._is_idle = self._trains
        while self._open(is_needed=False):
            self._finish()
        self.stop()

    def bring(self, number: int) -> None:
        """Have a block here; the next one is on its way then."""
        for place, block in enumerate(self._blocks):
            if place != number and block.can_be_released:
                block.release()
        if self._blocks[number].is_gathered:
            return
        if number not in self._order[self._place :]:
            self._finish()
            self._open(is_needed=True)
        while self._order[self._place] != number:
            self._join()
        self._start()
        self._blocks[number].gather()
        self._pass()
        if self._place < len(self._order) and not self._blocks[self._order[self._place]].is_gathered:
            self._start()

    def _join(self) -> None:
        self._start()
        self._blocks[self._order[self._place]].join()
        self._pass()

    def _start(self) -> None:
        """Begin the gather that comes next, unless it is on its way, and tell, unless this rank has."""
        self._blocks[self._order[self._place]].start()
        if self._pace is not None and self._telling is None and self._place >= len(self._blocks):
            self._telling = self._tell(self._pace)

    def _pass(self) -> None:
        """A gather is over; hear what the others have told beside it."""
        telling, self._telling = self._telling, None
        self._place += 1
        if telling is not None and self._pace is not None:
            self._pace.update_counts(telling.wait().tolist(), is_idle=self._is_idle)

    def _tell(self, pace: ScatterPacer) -> Handle:
        told = torch.tensor(pace.launch_counts(), dtype=torch.float64, device=group_device(self._group))
        return self._net.all_reduce(told, self._group, "max")

    def _finish(self) -> None:
        """The rest of a cycle, for those who need it."""
        while self._place < len(self._order):
            self._join()

    def _open(self, *, is_needed: bool) -> bool:
        """Agree on another cycle, if any rank needs it; whether there is one."""
        told = [float(is_needed), *(self._pace.launch_counts() if self._pace is not None else ())]
        said = torch.tensor(told, dtype=torch.float64, device=group_device(self._group))
        is_wanted, *most = self._net.all_reduce(said, self._group, "max").wait().tolist()
        self._place = 0 if is_wanted else len(self._order)
        if self._pace is not None:
            self._pace.update_counts(most, is_idle=self._is_idle)
        return bool(is_wanted)


class ParameterGatherer:
    """Gathers and releases one rank's parameters around their use.

    Ranks may have different numbers of micro-batches, and use blocks in different orders: see `GatherCycle`.

    Args:
        computes: whole-shaped parameters; their memory is given back here.
        updates: this rank's parts.
        parts: of every rank of the shard group.
        blocks: modules that are gathered by themselves, in the order in which most micro-batches use them;
            none: everything is gathered for a whole run.
        collective: over the shard group; exact.
        net: carries the agreement.
    Wire: for every micro-batch two gathers of (S-1)/S n bytes, one in evaluation, and all_reduces of 8 bytes
    and 16 for each reduction, one and, but in evaluation, one for each block. As much again for every time
    that a micro-batch uses blocks in another order.
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
        self._home: dict[int, tuple[str, int]] = {}
        away = freed_parameter_class(self._gather_outside_block)
        left, memory = dict(computes), Workspace()
        for block in blocks:
            inside = set(block.parameters())
            own = {slot: p for slot, p in left.items() if p in inside}
            if own:
                left = {slot: p for slot, p in left.items() if slot not in own}
                name = f"block {len(self._blocks)}"
                self._add(block, GatheredBlock(own, updates, parts, collective, name, away, memory))
        self._rest = GatheredBlock(left, updates, parts, collective, "rest", away) if left else None
        self._home |= {id(p): (slot.name, len(self._blocks)) for slot, p in left.items()}
        self.pace = self._make_pace() if self._blocks else None
        self._cycle = GatherCycle(self._blocks, collective.group, net, self.pace)
        self.drop()

    def _make_pace(self) -> ScatterPacer:
        rest = 0 if self._rest is None else self._rest.num_bytes
        return ScatterPacer(unconfirmed_bytes([block.num_bytes for block in self._blocks], rest))

    def _add(self, module: nn.Module, block: GatheredBlock) -> None:
        """Gather and release as the module computes."""
        number = len(self._blocks)
        self._blocks.append(block)
        module.register_forward_pre_hook(lambda *_: self._bring(number))
        module.register_forward_hook(lambda *_: self._go(number))
        module.register_full_backward_pre_hook(lambda *_: self._on_backward_start(number))
        for slot, p in block.tensors.items():
            self._home[id(p)] = slot.name, number
            p.register_post_accumulate_grad_hook(partial(block.mark_gradient_ready, slot))

    def begin(self) -> None:
        """See `ParameterLifecycle`."""
        if self._rest is not None:
            self._rest.gather()
        self._cycle.begin(both_ways=torch.is_grad_enabled())
        self._is_running = True

    def next(self) -> None:
        """See `ParameterLifecycle`."""
        if self._blocks:
            self._cycle.next()
            for block in self._blocks:
                block.release()

    def end(self) -> None:
        """See `ParameterLifecycle`."""
        if self._blocks:
            self._cycle.end()
        self.drop()

    def drop(self) -> None:
        """See `ParameterLifecycle`."""
        for block in (*self._blocks, *([self._rest] if self._rest is not None else [])):
            block.release()
        self._cycle.stop()
        self._is_running = False

    def _go(self, number: int) -> None:
        """A forward has ended; one that was done again inside a backward is followed by its backward."""
        block = self._blocks[number]
        if not (_is_in_backward() or block.stays):
            block.release()

    def _on_backward_start(self, number: int) -> None:
        """A backward begins."""
        self._bring(number)
        self._blocks[number].expect_gradients()

    def _gather_outside_block(self, p: nn.Parameter) -> None:
        """Somebody computes with a parameter that is not here."""
        name, number = self._home[id(p)]
        self._require_running(name)
        self._bring(number)
        self._blocks[number].stays = True

    def _bring(self, number: int) -> None:
        self._require_running(next(iter(self._blocks[number].tensors)).name)
        self._cycle.bring(number)

    def _require_running(self, name: str) -> None:
        """Where ranks gather.

        Raises:
            TaskError: this is between two runs.
        """
        if not self._is_running:
            raise TaskError(
                f"'{name}' is used between steps, when a rank holds its part of it only (zero=3)",
                next_step="use it in the loss, take whole tensors from session.snapshot() on every rank, or"
                " choose zero=2",
            )


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def shard_optimizer_state(
    context: SessionContext, material: TaskMaterial, *, frees_gradients: bool = False
) -> ModelPartition:
    """What is updated; everybody computes with whole tensors, which are gathered after an update."""
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
    """What is updated, and the gradients, which are scattered as soon as they are there."""
    return shard_optimizer_state(context, material, frees_gradients=True)


def shard_parameters(context: SessionContext, material: TaskMaterial) -> ModelPartition:
    """What is held at all; tensors lie once on a host, or are gathered by block, in a stage for a run."""
    refuse_compile(context, "zero=3")
    group = context.mesh.axes["shard"]

    def prepare(sharded_model: ShardedModel) -> ShardedModel:
        staged = (
            context.mesh.axes["pipeline"].size > 1
        )  # whose ranks run forwards and backwards in other orders
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
    """Along which dimension tensors are cut; where sums have one order, the norm is added by rows."""
    return {} if context.recipe.is_ordered else outermost_dims(material.model)
