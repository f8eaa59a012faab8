"""Partition of parameters and optimizer state over several servers, by rows of each tensor.

A server has memory for the rows that it owns and for nothing else of a parameter; it runs no samples. Workers
hold the whole model and no optimizer state. A frozen parameter is whole on one server.

A tensor is split along one dimension into as many pieces as the partitioner returns, at most one for each
server. The largest tensors are placed first, and their pieces on the servers with the smallest load.
Invariant: every value is on exactly one server, and a server has at most one run of rows of a tensor.
Planning is pure: no tensor is read.

Sources: TensorFlow 2, `tf.distribute.experimental.partitioners` (fixed, min-size, max-size), for the numbers
of pieces; Graham 1969, Bounds on Multiprocessing Timing Anomalies, for the order (longest first).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline.comm.reduction.gradients import GradientSink
from paceline.data.work import LoadedBatch
from paceline.errors import StrategyError, TaskError
from paceline.models.initialize import replace_parameters
from paceline.parallel.model_buffers import MicroBatchBuffers
from paceline.parallel.model_runner import LossSums, MetricNames, ModelFunction
from paceline.parallel.placement import TensorPlacement, even_span
from paceline.parallel.sharded_model import ModelPartition, ShardedModel, outermost_dims
from paceline.parallel.unsharded_guard import freed_parameter_class
from paceline.pipeline_schedule.schedule_table import MeasuredSchedule
from paceline.state.slot import TensorSlot, trained_parameters

if TYPE_CHECKING:
    from paceline.parallel.session_context import SessionContext, TaskMaterial
    from paceline.recipe.strategy_text import PieceSize

RowsByServer = tuple[tuple[int, int] | None, ...]
"""Rows [start, stop) of a tensor by server; None if a server has no rows."""


@dataclass(frozen=True)
class TensorExtent:
    """Size of a tensor as a partitioner sees it.

    Args:
        rows: length of the dimension that is split; 1 if the tensor cannot be split.
        num_bytes: of all rows.
    """

    rows: int
    num_bytes: int


Partitioner = Callable[[TensorExtent, int], int]
"""Function from a tensor and the number of servers to the number of pieces."""


def one_piece_per_server(extent: TensorExtent, num_servers: int) -> int:
    """Split every tensor into as many pieces as there are servers."""
    return num_servers


def pieces_of_min_bytes(fewest_bytes: int) -> Partitioner:
    """Return a partitioner into as many pieces as have at least `fewest_bytes` bytes each."""
    return lambda extent, num_servers: extent.num_bytes // fewest_bytes


def pieces_of_max_bytes(most_bytes: int) -> Partitioner:
    """Return a partitioner into as few pieces as have at most `most_bytes` bytes each."""
    return lambda extent, num_servers: -(-extent.num_bytes // most_bytes)


def make_partitioner(size: PieceSize) -> Partitioner:
    """Return the partitioner for the `partition` of a strategy."""
    if size.at_least is not None:
        return pieces_of_min_bytes(size.at_least)
    return one_piece_per_server if size.at_most is None else pieces_of_max_bytes(size.at_most)


def plan_partition(
    extents: Mapping[str, TensorExtent], num_servers: int, pieces: Partitioner
) -> dict[str, RowsByServer]:
    """Return the rows of every server, by the name of the tensor.

    Args:
        extents: by name.
        num_servers: at least 1.
        pieces: the partitioner; its result is limited to at least 1 piece and at most one for each server
            and row.
    """
    load = [0.0] * num_servers
    rows_by_name: dict[str, RowsByServer] = {}
    for name, extent in sorted(extents.items(), key=lambda item: (-item[1].num_bytes, item[0])):
        count = max(1, min(pieces(extent, num_servers), num_servers, extent.rows))
        # Longest first, since the server with the smallest load comes first as well.
        spans = sorted(
            (even_span(extent.rows, count, index) for index in range(count)), key=lambda s: s[0] - s[1]
        )
        # The smallest load first; the index makes ties equal on all ranks.
        servers = sorted(range(num_servers), key=lambda server: (load[server], server))
        # With fewer pieces than servers, those with the largest load get none.
        span_by_server = dict(zip(servers, spans, strict=False))
        rows_by_name[name] = tuple(span_by_server.get(server) for server in range(num_servers))
        for server, (start, stop) in span_by_server.items():
            load[server] += extent.num_bytes * (stop - start) / max(1, extent.rows)
    return rows_by_name


def bytes_by_server(extents: Mapping[str, TensorExtent], plan: Mapping[str, RowsByServer]) -> list[int]:
    """Return the bytes that every server holds."""
    num_servers = len(next(iter(plan.values())))
    return [
        sum(
            extents[name].num_bytes * (span[1] - span[0]) // extents[name].rows
            for name, spans in plan.items()
            if (span := spans[server]) is not None and extents[name].rows
        )
        for server in range(num_servers)
    ]


@dataclass(frozen=True)
class ServerTransform:
    """Rows of each tensor, spread over servers; workers compute with whole tensors and update nothing.

    Args:
        plan: by name, the rows of every server.
        dims: by name, the dimension that is split; the first if not named.
    Source: Li et al. 2014, Scaling Distributed Machine Learning with the Parameter Server, OSDI, section 4.2.
    """

    plan: Mapping[str, RowsByServer]
    dims: Mapping[str, int]
    axis = "replica"

    def cut(self, held: TensorPlacement, coordinate: int) -> TensorPlacement | None:
        """Let a server hold and update its rows; workers, whose coordinates follow, keep the whole."""
        spans: Sequence[tuple[int, int] | None] = (*self.plan[held.computes.name], None)
        slots, num_servers = tuple(self._part(held.computes, span) for span in spans), len(spans) - 1
        return replace(held, parts=slots, place=min(coordinate, num_servers), kept=coordinate >= num_servers)

    def _part(self, slot: TensorSlot, span: tuple[int, int] | None) -> TensorSlot | None:
        if span is None:
            return None
        if not slot.shape:
            return slot.on(self.axis)
        return slot.narrow(self.dims.get(slot.name, 0), span, self.axis)


class ServerRunner:
    """Runner of a server, which holds parts of a model and runs no samples; see `ModelRunner`.

    Args:
        sharded_model: parts of the parameters, and all buffers.
        metric_names: of the loss, learned from the workers.
    """

    used: Collection[str] = ()
    norms: Mapping[TensorSlot, Sequence[Tensor]] = {}
    schedule: MeasuredSchedule | None = None

    def __init__(self, sharded_model: ShardedModel, metric_names: MetricNames) -> None:
        self.sharded_model, self.metric_names = sharded_model, metric_names
        self.buffers = MicroBatchBuffers(sharded_model.model)

    def run(
        self, micro_batches: Iterable[LoadedBatch], num_micro_batches: int, sink: GradientSink, scale: float
    ) -> LossSums:
        """Refuse to train: no rule gives a server micro-batches.

        Raises:
            StrategyError: always.
        """
        raise StrategyError(
            "one of several servers holds parts of the model and cannot run micro-batches",
            next_step="use servers=1, or a rule in which only workers run micro-batches",
        )

    def abort(self) -> None:
        self.buffers.abort_step()

    def forward_only(self, micro_batches: Iterable[LoadedBatch], function: ModelFunction) -> None:
        """Do nothing, and read no samples: workers run them."""

    def evaluate(self, micro_batches: Iterable[LoadedBatch]) -> LossSums:
        """Return empty sums."""
        return LossSums(self.metric_names)


def partition_among_servers(context: SessionContext, material: TaskMaterial) -> ModelPartition:
    """Return the partition of parameters over servers, and note the bytes on each.

    Raises:
        StrategyError: a server would hold nothing.
    """
    strategy, model, rank = context.recipe.strategy, material.model, context.mesh.coordinate("replica")
    dims = outermost_dims(model)
    trained = {
        slot.name: TensorExtent(p.shape[dims[slot.name]] if p.dim() else 1, p.numel() * p.element_size())
        for slot, p in trained_parameters(model).items()
    }
    frozen = {
        name: TensorExtent(1, p.numel() * p.element_size())
        for name, p in model.named_parameters()
        if not p.requires_grad
    }
    extents = trained | frozen
    plan = plan_partition(extents, strategy.servers, make_partitioner(strategy.piece_size))
    trained_bytes = bytes_by_server(trained, {name: plan[name] for name in trained})
    if not all(trained_bytes):
        raise StrategyError(
            f"partition={strategy.partition} leaves server {trained_bytes.index(0)} of {strategy.servers}"
            " without parameters",
            next_step="use fewer servers, or partition=fixed",
        )
    context.note("servers", {"partition": strategy.partition, "bytes": bytes_by_server(extents, plan)})
    if rank >= strategy.servers:
        return ModelPartition(ServerTransform(plan, dims))
    foreign = {name for name in frozen if plan[name][rank] is None}
    return ModelPartition(
        ServerTransform(plan, dims),
        prepare=lambda sharded_model: free_unowned(sharded_model, foreign),
        runner=ServerRunner,
    )


def free_unowned(sharded_model: ShardedModel, frozen: Collection[str]) -> ShardedModel:
    """Free the whole parameters of a server, which keeps its own rows apart; their shapes stay.

    Args:
        frozen: names of the frozen parameters that other servers hold; they move to `meta`.
    Returns:
        The same model; any use of a freed parameter is an error.
    """
    freed_class = freed_parameter_class(_refuse_use)
    for p in sharded_model.computes.values():
        empty = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device=p.device)
        empty.untyped_storage().resize_(0)
        # The object stays: the task may refer to it, and must not keep the memory.
        p.data = empty
        p.__class__ = freed_class
    named = dict(sharded_model.model.named_parameters())
    moved = {id(p): nn.Parameter(p.detach().to("meta"), False) for n, p in named.items() if n in frozen}
    replace_parameters(sharded_model.model, moved)
    return replace(sharded_model, frozen_axes=frozenset({ServerTransform.axis}))


def _refuse_use(p: nn.Parameter) -> None:
    raise TaskError(
        f"a parameter of shape {tuple(p.shape)} is used on a server, which holds only some rows of it",
        next_step="read whole weights from session.complete() or session.snapshot() on every rank, or use"
        " servers=1",
    )
