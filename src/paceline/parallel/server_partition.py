"""Which server holds which rows of which tensor. Pure: no tensor, no group.

A tensor is cut along one dimension into as many pieces as its partitioner says, at most one for each server;
the largest tensors go first, and their pieces to the servers that have least. Invariant: every value is on
exactly one server, and a server has one run of rows of a tensor at most.

Source: TensorFlow 2, `tf.distribute.experimental.partitioners` (fixed, min-size, max-size), for the numbers
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

RowsByServer = tuple[tuple[int, int] | None, ...]
"""By server, the rows that it has of a tensor; None: nothing."""


@dataclass(frozen=True)
class TensorExtent:
    """A tensor as a partitioner sees it.

    Args:
        rows: places along the dimension that is cut; 1: it cannot be cut.
        num_bytes: of all of them.
    """

    rows: int
    num_bytes: int


Partitioner = Callable[[TensorExtent, int], int]
"""How many pieces a tensor is cut into, for so many servers."""


def one_piece_per_server(extent: TensorExtent, num_servers: int) -> int:
    """One piece for each server."""
    return num_servers


def pieces_of_min_bytes(fewest_bytes: int) -> Partitioner:
    """As many pieces as have so many bytes or more each."""
    return lambda extent, num_servers: extent.num_bytes // fewest_bytes


def pieces_of_max_bytes(most_bytes: int) -> Partitioner:
    """As few pieces as have so many bytes or fewer each, where there are servers for that."""
    return lambda extent, num_servers: -(-extent.num_bytes // most_bytes)


def parse_partitioner(word: str) -> Partitioner:
    """What a partitioner is called in a strategy: `one_piece_per_server`, `min-size:BYTES`, `max-size:BYTES`."""
    kind, _, argument = word.partition(":")
    return {
        "fixed": lambda n: one_piece_per_server,
        "min-size": pieces_of_min_bytes,
        "max-size": pieces_of_max_bytes,
    }[kind](int(argument or 0))


def plan_partition(
    extents: Mapping[str, TensorExtent], num_servers: int, pieces: Partitioner
) -> dict[str, RowsByServer]:
    """By tensor, the rows of every server.

    Args:
        extents: by name.
        num_servers: at least 1.
        pieces: the partitioner; what it says is kept between 1 and what can be cut or held.
    """
    load = [0.0] * num_servers
    found: dict[str, RowsByServer] = {}
    for name, extent in sorted(extents.items(), key=lambda one: (-one[1].num_bytes, one[0])):
        count = max(1, min(pieces(extent, num_servers), num_servers, extent.rows))
        spans = sorted(
            (even_span(extent.rows, count, place) for place in range(count)), key=lambda s: s[0] - s[1]
        )
        servers = sorted(range(num_servers), key=lambda server: (load[server], server))
        mine = dict(zip(servers, spans, strict=False))
        found[name] = tuple(mine.get(server) for server in range(num_servers))
        for server, (start, stop) in mine.items():
            load[server] += extent.num_bytes * (stop - start) / max(1, extent.rows)
    return found


def bytes_by_server(extents: Mapping[str, TensorExtent], plan: Mapping[str, RowsByServer]) -> list[int]:
    """How many bytes every server holds."""
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
    """What is updated, spread over servers; they and all workers hold whole what is computed with.

    Args:
        plan: by name, the rows of every server.
        dims: by name, the dimension that is cut; the first where none is named.
    Source: Li et al. 2014, Scaling Distributed Machine Learning with the Parameter Server, OSDI, section 4.2.
    """

    plan: Mapping[str, RowsByServer]
    dims: Mapping[str, int]
    axis = "replica"

    def cut(self, held: TensorPlacement, coordinate: int) -> TensorPlacement | None:
        """A server updates its rows; workers, which come after the servers, update nothing."""
        spans: Sequence[tuple[int, int] | None] = (*self.plan[held.computes.name], None)
        parts = tuple(self._part(held.computes, span) for span in spans)
        return replace(held, parts=parts, place=min(coordinate, len(spans) - 1))

    def _part(self, slot: TensorSlot, span: tuple[int, int] | None) -> TensorSlot | None:
        if span is None:
            return None
        if not slot.shape:
            return slot.on(self.axis)
        return slot.narrow(self.dims.get(slot.name, 0), span, self.axis)


def partition_among_servers(context: SessionContext, material: TaskMaterial) -> ModelPartition:
    """What is updated, by the strategy's partitioner; its bytes on every server are told.

    Raises:
        StrategyError: a server would hold nothing.
    """
    strategy, dims = context.recipe.strategy, outermost_dims(material.model)
    extents = {
        slot.name: TensorExtent(p.shape[dims[slot.name]] if p.dim() else 1, p.numel() * p.element_size())
        for slot, p in trained_parameters(material.model).items()
    }
    plan = plan_partition(extents, strategy.servers, parse_partitioner(strategy.partition))
    held = bytes_by_server(extents, plan)
    if not all(held):
        raise StrategyError(
            f"partition={strategy.partition} leaves nothing to server {held.index(0)} of {strategy.servers}",
            next_step="take fewer servers, or partition=fixed",
        )
    context.note("servers", {"partition": strategy.partition, "bytes": held})
    return ModelPartition(ServerTransform(plan, dims))
