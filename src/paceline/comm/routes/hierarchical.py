"""The hierarchical route: sums inside nodes first, then between nodes, then back.

Every rank of a node carries an equal slice of a buffer over the slow link, plainly or through a codec. Only
the first part is launched by the caller; a `CommThread` launches each next part when the one before has ended, so
all of it goes on beside the backward pass.
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
    """Sums in two levels.

    Args:
        group: on several nodes, with several ranks on each.
        levels: of that group.
        between: sums over one rank of every node; its codec is what this route codes.
        inside: scatters and gathers inside a node, each on a way of its own: parts of different buffers are
            under way at a time.
    Wire: n bytes on N nodes of L ranks, filled up to a multiple of L values. all_reduce: 2 (L-1)/L n inside
        a node (reduce_scatter, all_gather) and 2 (N-1)/N n/L between nodes. reduce_scatter: (L-1)/L n inside
        and (N-1)/N n/L between. all_gather of n bytes of a rank: (N-1) n between, (L-1) N n inside. By rank;
        `paceline.comm.collective_cost.hierarchical_cost`.
    Exactness: that of rounding, sums of nodes are added up, and of `between`; equal bits on every rank.
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
        self._line = CommThread(f"{group.name}-between-nodes", wait_counter(net.ledger, levels.between.name))
        inner = between.feedback
        self.feedback: SliceErrorFeedback | None = (
            None if inner is None else SliceErrorFeedback(inner, levels)
        )

    def buffer(self, num_values: int, like: Tensor, key: str) -> Tensor:
        """See `Collective`."""
        return like.new_zeros(num_values)

    def all_reduce(self, x: Tensor, key: str) -> Handle:
        """See `Collective`."""
        if x.numel() == 0:
            return Handle.ready(x)
        self._note(key, x, by_rows=False)
        scattered = self.scatter(x, key)

        def rest() -> Handle:
            total = self.between(scattered.wait(exposed=False).view(-1), key)
            return self._gather.all_gather(total, key)

        last = self._line.submit("all_reduce", rest)
        return last.then(lambda gathered: _join_slices(gathered.wait(), x))

    def reduce_scatter(self, x: Tensor, key: str, arriving: ReceiveBuffer = None) -> Handle:
        """See `Collective`."""
        self._note(key, x, by_rows=True)
        inside, between = self.levels.scatter, self.levels.between
        homes = torch.tensor(self.levels.order, device=x.device)
        rows = x.index_select(0, homes).view(inside.size, -1)
        scattered = self._scatter.reduce_scatter(rows, key)

        def rest() -> Tensor:
            own = scattered.wait(exposed=False).view(between.size, -1)
            found: Tensor = self._between.reduce_scatter(own, key).wait(exposed=False)
            return found

        return self._line.submit("reduce_scatter", rest).then(lambda row: row.view(-1))

    def all_gather(self, x: Tensor, key: str, out: Tensor | None = None) -> Handle:
        """See `Collective`; between nodes first, so that a value crosses the slow link once a node."""
        homes = torch.tensor(self.levels.order, device=x.device)

        def rest() -> Handle:
            across = self._between.all_gather(x, key).wait(exposed=False)  # [N, n]
            return self._gather.all_gather(across, f"{key}.gathered")

        def place(gathered: Handle) -> Tensor:
            found = gathered.wait().view(self.group.size, *x.shape)  # [L N, n], by `order`
            return (torch.empty_like(found) if out is None else out).index_copy_(0, homes, found)

        return self._line.submit("all_gather", rest).then(place)

    def broadcast(self, x: Tensor, key: str, source: int = 0) -> Handle:
        """See `Collective`; as the backend does it."""
        return self.net.broadcast(x, self.group, source)

    def scatter(self, x: Tensor, key: str) -> Handle:
        """Launch the sum inside the node; the handle returns this rank's slice of it, [ceil(n / L)]."""
        num_slices = self.levels.scatter.size
        even = x.numel() % num_slices == 0
        return self._scatter.reduce_scatter(
            x.view(num_slices, -1) if even else pad_to_rows(x, num_slices), key
        )

    def between(self, own: Tensor, key: str) -> Tensor:
        """Sum a slice over the nodes, in place; blocks the thread of the line."""
        total: Tensor = self._between.all_reduce(own, key).wait(exposed=False)
        return total

    def abort(self) -> None:
        """See `Collective`."""
        self._line.clear_error()
        self._between.abort()

    def close(self) -> None:
        """End the thread; what was launched has been waited for."""
        self._line.close()

    def _note(self, key: str, x: Tensor, *, by_rows: bool) -> None:
        if self.feedback is not None:
            self.feedback.note(key, x.numel(), by_rows=by_rows)


class SliceErrorFeedback:
    """What coding between nodes has lost, at the places of the whole buffer: this rank codes its slice.

    Args:
        inner: of the slice.
        levels: say which slice that is.
    """

    def __init__(self, inner: ErrorFeedbackStore, levels: NodeLevels) -> None:
        self._inner, self._levels = inner, levels
        self._by_rows: dict[str, bool] = {}
        self._behind: dict[str, Tensor] = {}  # which places of a slice lie behind the end of its buffer
        self._waiting: dict[str, Mapping[str, Tensor]] = {}

    def note(self, key: str, num_values: int, *, by_rows: bool) -> None:
        """A buffer is about to be summed: its slice is some of its rows, [P, n], or a run of values."""
        if key not in self._by_rows:
            self._by_rows[key] = by_rows
            behind = self._places(key, num_values) >= num_values
            self._behind |= {key: behind} if bool(behind.any()) else {}
        if key in self._waiting:
            self._place(key, self._waiting.pop(key))

    def describe(self, key: str, matrices: Sequence[MatrixSpan]) -> None:
        """See `ErrorFeedbackStore`; a slice cuts through them, so it is taken as values without a shape."""

    def commit(self, keys: Collection[str] | None = None) -> None:
        """See `ErrorFeedbackStore`; of nothing nothing is lost."""
        for key, behind in self._behind.items():
            if keys is None or key in keys:
                self._inner.restore(key, behind)
        self._inner.commit(keys)

    def restore(self, key: str, places: Tensor) -> None:
        """See `ErrorFeedbackStore`."""
        own = self._places(key, places.numel())
        self._inner.restore(key, _zero_padded(places, own)[own])

    def residuals(self, key: str, num_values: int) -> Mapping[str, Tensor]:
        """See `ErrorFeedbackStore`."""
        if key in self._waiting:
            return self._waiting[key]
        places = self._places(key, num_values)
        found = {}
        for side, part in self._inner.residuals(key, len(places)).items():
            whole = part.new_zeros(max(num_values, int(places.max()) + 1))
            found[side] = whole.index_copy_(0, places, part)[:num_values]
        return found

    def set_residuals(self, key: str, flats: Mapping[str, Tensor]) -> None:
        """See `ErrorFeedbackStore`; it waits until it is known how the buffer is summed."""
        if key in self._by_rows:
            self._place(key, flats)
        else:
            self._waiting[key] = flats

    def _place(self, key: str, flats: Mapping[str, Tensor]) -> None:
        own = {}
        for side, flat in flats.items():
            places = self._places(key, flat.numel())
            own[side] = _zero_padded(flat, places)[places]
        self._inner.set_residuals(key, own)

    def rescale(self, factor: float, keys: Collection[str]) -> None:
        """See `ErrorFeedbackStore`."""
        for key in [key for key in keys if key in self._waiting]:
            waiting = self._waiting[key].items()
            self._waiting[key] = {side: flat if side == "factor" else flat * factor for side, flat in waiting}
        self._inner.rescale(factor, keys)

    def clear(self, key: str) -> None:
        """See `ErrorFeedbackStore`."""
        self._waiting.pop(key, None)
        self._inner.clear(key)

    def _places(self, key: str, num_values: int) -> Tensor:
        """Where the values of this rank's slice lie in the buffer; the last ones may be beyond its end."""
        levels, place = self._levels, self._levels.scatter.rank
        if not self._by_rows.get(key, False):
            width = -(-num_values // levels.scatter.size)
            return torch.arange(place * width, (place + 1) * width)
        rows = levels.order[place * levels.between.size : (place + 1) * levels.between.size]
        width = num_values // len(levels.order)
        return torch.cat([torch.arange(row * width, (row + 1) * width) for row in rows])


def _zero_padded(flat: Tensor, places: Tensor) -> Tensor:
    """With zeros behind it, where places are beyond its end."""
    padded = flat.new_zeros(max(flat.numel(), int(places.max()) + 1))
    padded[: flat.numel()] = flat
    return padded


def _join_slices(slices: Tensor, x: Tensor) -> Tensor:
    """Write the slices over `x`; the last ones may be filled up, or hold nothing of it."""
    for piece, part in zip(x.split(slices.shape[1]), slices, strict=False):
        piece.copy_(part[: piece.numel()])
    return x


def build_hierarchical(group: RankGroup, context: RouteContext) -> Collective:
    """Inside nodes first; collective over the world.

    A group on one node, or with one rank on each, has one level: native.
    """
    require_cpu(context, "hierarchical", "NCCL sums inside nodes first by itself")
    parts = group_ranks_by_node(group.ranks, _node_of_ranks(context))
    if len(parts) in (1, group.size):
        where = "lies on one node" if len(parts) == 1 else "has one rank on every node"
        context.warn(
            f"route=hierarchical: the group '{group.name}' {where}, so its sum has one level, as native"
        )
        return build_native(group, context)
    levels = NodeLevels.build(group, parts)
    scatter, gather = (host_memory_or_none(level, context) for level in (levels.scatter, levels.gather))
    inside = None if scatter is None or gather is None else (scatter, gather)
    found = HierarchicalCollective(context.net, group, levels, build_native(levels.between, context), inside)
    context.close_callbacks.append(found.close)
    return found


def _node_of_ranks(context: RouteContext) -> list[int]:
    """The node of every rank of the job, as the launchers numbered them."""
    mine = torch.tensor([context.cluster.node_rank])
    found = context.net.all_gather(mine, context.world, equal=True).wait()
    return [int(node) for node in found]
