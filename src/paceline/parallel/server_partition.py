"""Partition of parameters and optimizer state over servers, by rows of each tensor.

A tensor is split along one dimension into as many pieces as the partitioner returns, at most one for each
server. The largest tensors are placed first, and their pieces on the servers with the smallest load.
Invariant: every value is on exactly one server, and a server has at most one run of rows of a tensor.
Planning is pure: no tensor is read.

Sources: TensorFlow 2, `tf.distribute.experimental.partitioners` (fixed, min-size, max-size), for the numbers
of pieces; Graham 1969, Bounds on Multiprocessing Timing Anomalies, for the order (longest first).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.errors import StrategyError
from paceline.parallel.placement import TensorPlacement, even_span
from paceline.parallel.sharded_model import ModelPartition, outermost_dims
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
    """Rows of each tensor to update, spread over servers; every rank computes with whole tensors.

    Args:
        plan: by name, the rows of every server.
        dims: by name, the dimension that is split; the first if not named.
    Source: Li et al. 2014, Scaling Distributed Machine Learning with the Parameter Server, OSDI, section 4.2.
    """

    plan: Mapping[str, RowsByServer]
    dims: Mapping[str, int]
    axis = "replica"

    def cut(self, held: TensorPlacement, coordinate: int) -> TensorPlacement | None:
        """Let a server update its rows; workers, whose coordinates follow, update nothing."""
        spans: Sequence[tuple[int, int] | None] = (*self.plan[held.computes.name], None)
        slots = tuple(self._part(held.computes, span) for span in spans)
        return replace(held, parts=slots, place=min(coordinate, len(spans) - 1))

    def _part(self, slot: TensorSlot, span: tuple[int, int] | None) -> TensorSlot | None:
        if span is None:
            return None
        if not slot.shape:
            return slot.on(self.axis)
        return slot.narrow(self.dims.get(slot.name, 0), span, self.axis)


def partition_among_servers(context: SessionContext, material: TaskMaterial) -> ModelPartition:
    """Return the partition of what is updated over servers, and note the bytes on each.

    Raises:
        StrategyError: a server would hold nothing.
    """
    strategy, dims = context.recipe.strategy, outermost_dims(material.model)
    extents = {
        slot.name: TensorExtent(p.shape[dims[slot.name]] if p.dim() else 1, p.numel() * p.element_size())
        for slot, p in trained_parameters(material.model).items()
    }
    plan = plan_partition(extents, strategy.servers, make_partitioner(strategy.piece_size))
    num_bytes = bytes_by_server(extents, plan)
    if not all(num_bytes):
        raise StrategyError(
            f"partition={strategy.partition} leaves server {num_bytes.index(0)} of {strategy.servers} without"
            " parameters",
            next_step="use fewer servers, or partition=fixed",
        )
    context.note("servers", {"partition": strategy.partition, "bytes": num_bytes})
    return ModelPartition(ServerTransform(plan, dims))
