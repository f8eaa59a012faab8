"""The hierarchical route: sums inside nodes first, then between nodes, then back.

Every rank of a node sends an equal slice of a buffer over the slow link, plain or encoded. The caller
launches only the first stage; a `CommThread` launches each next stage when the one before has ended, so all
of it runs beside the backward pass.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from paceline.comm.codecs.low_rank import MatrixSpan
from paceline.comm.collectives.collective_protocol import (
    Collective,
    ErrorFeedbackStore,
    ReceiveBuffer,
    pad_to_rows,
    wait_counter,
)
from paceline.comm.comm_thread import CommThread
from paceline.comm.handle import Handle
from paceline.comm.net import Net
from paceline.comm.routes.native import NativeCollective, build_native
from paceline.comm.routes.route_context import RouteContext, require_cpu
from paceline.comm.routes.shared_memory import host_memory_or_none
from paceline.job.mesh import NodeLevels, RankGroup, group_ranks_by_node


class HierarchicalCollective:
    """A collective of two levels.

    Args:
        group: on several nodes, with several ranks on each.
        levels: levels of that group.
        between: sums over one rank of every node; its codec is the codec of this route.
        inside: scatters and gathers inside a node, each on a process group of its own: parts of different
            buffers are in flight at a time.
    Wire: n bytes on N nodes of L ranks, padded to a multiple of L values. all_reduce: 2 (L-1)/L n inside a
        node (reduce_scatter, all_gather) and 2 (N-1)/N n/L between nodes. reduce_scatter: (L-1)/L n inside
        and (N-1)/N n/L between. all_gather of n bytes of a rank: (N-1) n between, (L-1) N n inside. By rank;
        `paceline.comm.collective_cost.hierarchical_cost`.
    Exactness: that of rounding, as sums of nodes are added, and of `between`; equal bits on every rank.
    Source: Mikami et al. 2018, Massively Distributed SGD, arXiv:1811.05233 (2D-torus all-reduce).
    """

    def __init__(
        self,
        net: Net,
        group: RankGroup,
        levels: NodeLevels,
        between: Collective,
        inside: tuple[Collective, Collective] | None = None,
    ) -> None:
        self.net, self.group, self.levels, self._between = net, group, levels, between
        natives = NativeCollective(net, levels.scatter), NativeCollective(net, levels.gather)
        self._scatter, self._gather = inside or natives
        self._thread = CommThread(
            f"{group.name}-between-nodes", wait_counter(net.ledger, levels.between.name), net.activity
        )
        inner = between.feedback
        self.feedback: SliceErrorFeedback | None = (
            None if inner is None else SliceErrorFeedback(inner, levels)
        )

    def buffer(self, num_values: int, like: Tensor, key: str) -> Tensor:
        return like.new_zeros(num_values)

    def all_reduce(self, x: Tensor, key: str) -> Handle:
        """Scatter inside the node, sum the slice over the nodes, and gather inside the node."""
        if x.numel() == 0:
            return Handle.ready(x)
        self._note(key, x, by_rows=False)
        scattered = self.scatter(x, key)

        def sum_between_nodes() -> Handle:
            total = self.between(scattered.wait(exposed=False).view(-1), key)
            return self._gather.all_gather(total, key)

        # The last stage is launched on the thread too, and waited for by the caller: it overlaps with
        # backward.
        last = self._thread.submit("all_reduce", sum_between_nodes)
        return last.then(lambda gathered: _join_slices(gathered.wait(), x))

    def reduce_scatter(self, x: Tensor, key: str, arriving: ReceiveBuffer = None) -> Handle:
        """Scatter inside the node, then over the nodes."""
        self._note(key, x, by_rows=True)
        inside, between = self.levels.scatter, self.levels.between
        rank_order = torch.tensor(self.levels.order, device=x.device)
        rows = x.index_select(0, rank_order).view(inside.size, -1)
        scattered = self._scatter.reduce_scatter(rows, key)

        def sum_between_nodes() -> Tensor:
            node_rows = scattered.wait(exposed=False).view(between.size, -1)
            row: Tensor = self._between.reduce_scatter(node_rows, key).wait(exposed=False)
            return row

        return self._thread.submit("reduce_scatter", sum_between_nodes).then(lambda row: row.view(-1))

    def all_gather(self, x: Tensor, key: str, out: Tensor | None = None) -> Handle:
        """Gather over the nodes first, so that a value crosses the slow link once for each node."""
        rank_order = torch.tensor(self.levels.order, device=x.device)

        def gather_between_nodes() -> Handle:
            across = self._between.all_gather(x, key).wait(exposed=False)  # [N, n]
            return self._gather.all_gather(across, f"{key}.gathered")

        def to_rank_order(gathered: Handle) -> Tensor:
            rows = gathered.wait().view(self.group.size, *x.shape)  # [L N, n], by `order`
            return (torch.empty_like(rows) if out is None else out).index_copy_(0, rank_order, rows)

        return self._thread.submit("all_gather", gather_between_nodes).then(to_rank_order)

    def broadcast(self, x: Tensor, key: str, source: int = 0) -> Handle:
        """Copy with the broadcast of the backend."""
        return self.net.broadcast(x, self.group, source)

    def scatter(self, x: Tensor, key: str) -> Handle:
        """Launch the sum inside the node; the handle returns this rank's slice of it, [ceil(n / L)]."""
        num_slices = self.levels.scatter.size
        even = x.numel() % num_slices == 0
        return self._scatter.reduce_scatter(
            x.view(num_slices, -1) if even else pad_to_rows(x, num_slices), key
        )

    def between(self, node_slice: Tensor, key: str) -> Tensor:
        """Sum a slice over the nodes, in place; blocks the communication thread."""
        total: Tensor = self._between.all_reduce(node_slice, key).wait(exposed=False)
        return total

    def abort(self) -> None:
        self._thread.clear_error()
        self._between.abort()

    def close(self) -> None:
        """End the thread; everything that was launched has been waited for."""
        self._thread.close()

    def _note(self, key: str, x: Tensor, *, by_rows: bool) -> None:
        if self.feedback is not None:
            self.feedback.note(key, x.numel(), by_rows=by_rows)


class SliceErrorFeedback:
    """The quantisation errors between nodes, at positions of the whole buffer: this rank encodes its slice.

    Args:
        inner: errors of the slice.
        levels: the levels that define the slice.
    """

    def __init__(self, inner: ErrorFeedbackStore, levels: NodeLevels) -> None:
        self._inner, self._levels = inner, levels
        self._by_rows: dict[str, bool] = {}
        # Which positions of a slice are behind the end of its buffer.
        self._padding: dict[str, Tensor] = {}
        self._waiting: dict[str, Mapping[str, Tensor]] = {}

    def note(self, key: str, num_values: int, *, by_rows: bool) -> None:
        """Set how a buffer is summed: its slice is some of its rows, [P, n], or a run of values."""
        if key not in self._by_rows:
            self._by_rows[key] = by_rows
            padding = self._slice_indices(key, num_values) >= num_values
            self._padding |= {key: padding} if bool(padding.any()) else {}
        if key in self._waiting:
            self._set_slice(key, self._waiting.pop(key))

    def describe(self, key: str, matrices: Sequence[MatrixSpan]) -> None:
        """Ignore matrices: a slice cuts through them, so its values have no shape."""

    def commit(self, keys: Collection[str] | None = None) -> None:
        """Keep the errors of the present step; padding has none."""
        for key, padding in self._padding.items():
            if keys is None or key in keys:
                self._inner.restore(key, padding)
        self._inner.commit(keys)

    def restore(self, key: str, indices: Tensor) -> None:
        indices_of_slice = self._slice_indices(key, indices.numel())
        self._inner.restore(key, _zero_padded(indices, indices_of_slice)[indices_of_slice])

    def residuals(self, key: str, num_values: int) -> Mapping[str, Tensor]:
        """Return the errors of the slice at their positions in the whole buffer."""
        if key in self._waiting:
            return self._waiting[key]
        indices = self._slice_indices(key, num_values)
        by_side = {}
        for side, values in self._inner.residuals(key, len(indices)).items():
            flat = values.new_zeros(max(num_values, int(indices.max()) + 1))
            by_side[side] = flat.index_copy_(0, indices, values)[:num_values]
        return by_side

    def set_residuals(self, key: str, flats: Mapping[str, Tensor]) -> None:
        """Continue from these errors, at once or as soon as it is known how the buffer is summed."""
        if key in self._by_rows:
            self._set_slice(key, flats)
        else:
            self._waiting[key] = flats

    def _set_slice(self, key: str, flats: Mapping[str, Tensor]) -> None:
        slices = {}
        for side, flat in flats.items():
            indices = self._slice_indices(key, flat.numel())
            slices[side] = _zero_padded(flat, indices)[indices]
        self._inner.set_residuals(key, slices)

    def rescale(self, factor: float, keys: Collection[str]) -> None:
        for key in [key for key in keys if key in self._waiting]:
            waiting = self._waiting[key].items()
            self._waiting[key] = {side: flat if side == "factor" else flat * factor for side, flat in waiting}
        self._inner.rescale(factor, keys)

    def clear(self, key: str) -> None:
        self._waiting.pop(key, None)
        self._inner.clear(key)

    def _slice_indices(self, key: str, num_values: int) -> Tensor:
        """Return the indices of this rank's slice in the buffer; the last ones may lie past its end."""
        levels, rank_in_node = self._levels, self._levels.scatter.rank
        if not self._by_rows.get(key, False):
            width = -(-num_values // levels.scatter.size)
            return torch.arange(rank_in_node * width, (rank_in_node + 1) * width)
        rows = levels.order[rank_in_node * levels.between.size : (rank_in_node + 1) * levels.between.size]
        width = num_values // len(levels.order)
        return torch.cat([torch.arange(row * width, (row + 1) * width) for row in rows])


def _zero_padded(flat: Tensor, indices: Tensor) -> Tensor:
    """Return `flat`, padded with zeros up to the largest index."""
    padded = flat.new_zeros(max(flat.numel(), int(indices.max()) + 1))
    padded[: flat.numel()] = flat
    return padded


def _join_slices(slices: Tensor, x: Tensor) -> Tensor:
    """Write the slices over `x`; the last slices may be padded, or hold nothing of `x`."""
    for run, values in zip(x.split(slices.shape[1]), slices, strict=False):
        run.copy_(values[: run.numel()])
    return x


def build_hierarchical(group: RankGroup, context: RouteContext) -> Collective:
    """Build sums inside nodes first; collective over the world.

    A group on one node, or with one rank on each, has one level: native.
    """
    require_cpu(context, "hierarchical", "NCCL sums inside nodes first by itself")
    ranks_by_node = group_ranks_by_node(group.ranks, _node_of_ranks(context))
    if len(ranks_by_node) in (1, group.size):
        why = "lies on one node" if len(ranks_by_node) == 1 else "has one rank on every node"
        context.warn(
            f"route=hierarchical: group '{group.name}' {why}, so its sums have one level, like route=native"
        )
        return build_native(group, context)
    levels = NodeLevels.build(group, ranks_by_node)
    scatter, gather = (host_memory_or_none(level, context) for level in (levels.scatter, levels.gather))
    # Shared memory for both stages or for none: they use the same ranks.
    inside = None if scatter is None or gather is None else (scatter, gather)
    collective = HierarchicalCollective(
        context.net, group, levels, build_native(levels.between, context), inside
    )
    context.close_callbacks.append(collective.close)
    return collective


def _node_of_ranks(context: RouteContext) -> list[int]:
    """Return the node of every rank of the job, as the launchers numbered them."""
    local_node = torch.tensor([context.cluster.node_rank])
    nodes = context.net.all_gather(local_node, context.world, equal=True).wait()
    return [int(node) for node in nodes]
