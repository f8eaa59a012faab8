"""Lanes: threads of one process that run virtual shards side by side, on copies that share the parameters.

A lane sums its shards to nodes of the tree of additions (`comm.reduction.tree`); all nodes go to the sink.
Invariant: the bits are those of one lane.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import islice

from torch import Tensor

from paceline.comm import GradientSink
from paceline.comm.reduction import TreeReducer, cover
from paceline.data import LoadedBatch, split
from paceline.errors import TaskError
from paceline.layout.holding import Holding, hold_whole
from paceline.layout.placed import Ask
from paceline.layout.precision import Precision
from paceline.layout.replicate import Replicate
from paceline.layout.sums import MetricNames, Sums
from paceline.layout.threads import LedByFirst, NobodyDraws, Threads, around_the_same_parameters
from paceline.observe import Phases
from paceline.slot import Slot
from paceline.task import LossFunction


class Lanes(LedByFirst):
    """One whole model, and further copies of its modules around the same parameters.

    Args:
        holding: of a whole model on the processor.
        loss, metric_names, precision: as for `Replicate`.
        phases: of the first lane; the others run meanwhile.
        num_lanes: threads.
        deadline_seconds: the longest that the other lanes may take once the first has ended.
    Raises:
        TaskError: the model cannot be copied.
    """

    def __init__(
        self,
        holding: Holding,
        loss: LossFunction,
        metric_names: MetricNames,
        *,
        precision: Precision,
        phases: Phases,
        num_lanes: int,
        deadline_seconds: float,
    ) -> None:
        twins = (around_the_same_parameters(holding.model, "lanes") for _ in range(num_lanes - 1))
        holdings = [holding, *map(hold_whole, twins)]
        clocks = [phases, *(Phases() for _ in holdings[1:])]
        self._lanes = [
            Replicate(h, loss, metric_names, precision=precision, phases=clock, overlap=False, seeds=False)
            for h, clock in zip(holdings, clocks, strict=True)
        ]
        self._first = self._lanes[0]
        self._phases, self._threads = phases, Threads(num_lanes, "lane", deadline_seconds)
        self.used: Collection[str] = ()
        self._tried = False

    def run(self, micro_batches: Iterable[LoadedBatch], count: int, sink: GradientSink, scale: float) -> Sums:
        """See `Placed.run`; each lane takes a contiguous share of the micro-batches."""
        self._phases.begin("data")
        came = list(islice(micro_batches, count))
        loaded = sorted(came, key=_shard)  # so that a lane has neighbours, which meet low in the tree
        shares = [_share(loaded, len(self._lanes), k) for k in range(len(self._lanes))]
        before = self.buffers.values()
        for lane in self._lanes[1:]:
            lane.buffers.reset(before)
        with NobodyDraws():
            if loaded and not self._tried:
                self._try_second_lane(loaded[0], scale)
            pairs = zip(self._lanes, shares, strict=True)
            found = self._threads.run([partial(_run_lane, lane, share, scale) for lane, share in pairs])
        sums = Sums(self.metric_names)
        for lane, (_, own) in zip(self._lanes, found, strict=True):
            sums.extend(own)
            if lane is not self._first:
                self.buffers.take_changes(lane.buffers)
        places = [loaded.index(one) for one in came]
        sums.reorder(places)
        self.buffers.reorder(places)
        self.used = {name for lane in self._lanes for name in lane.used}
        self._hand_on([part for parts, _ in found for part in parts], sink)
        return sums

    def _try_second_lane(self, loaded: LoadedBatch, scale: float) -> None:
        """Run one micro-batch on a copy alone, before threads would write the same gradients at a time.

        Raises:
            TaskError: the loss used the original.
        """
        self._tried = True
        originals = self._first.holding.computes
        for p in originals.values():
            p.grad = None
        before = self._lanes[1].buffers.values()
        _run_lane(self._lanes[1], [loaded], scale)
        self._lanes[1].buffers.reset(before)
        touched = [slot.name for slot, p in originals.items() if p.grad is not None]
        if touched:
            raise TaskError(
                f"the loss touches '{touched[0]}' of a model from around it, not of the one that it is given,"
                " and lanes run copies",
                next_step="use the first argument of loss(model, batch) only, or a strategy without lanes",
            )

    def _hand_on(self, parts: Sequence[_Part], sink: GradientSink) -> None:
        for k, (shards, grads) in enumerate(parts):
            sink.micro_batch(shards, k == len(parts) - 1)
            for slot in reversed(grads):
                sink.ready(slot, grads[slot])

    def abort(self) -> None:
        """See `Placed`."""
        for lane in self._lanes:
            lane.abort()

    def answer(self, micro_batches: Iterable[LoadedBatch], ask: Ask) -> None:
        """See `Placed`; on one lane."""
        self._first.answer(micro_batches, ask)

    def evaluate(self, micro_batches: Iterable[LoadedBatch]) -> Sums:
        """See `Placed`; on one lane."""
        return self._first.evaluate(micro_batches)


_Part = tuple[range, dict[Slot, Tensor | None]]
"""A node of the tree of additions, and the sums over it."""


def _run_lane(lane: Replicate, share: list[LoadedBatch], scale: float) -> tuple[list[_Part], Sums]:
    """Forward and backward of one lane's share; its sums by node."""
    first, last = (share[0].micro_batch.shard, share[-1].micro_batch.shard) if share else (0, -1)
    nodes = cover(range(first, last + 1))
    sink = TreeReducer(lane.holding.computes, nodes)
    sums = lane.run(share, len(share), sink, scale)
    by_slot = sink.take()
    return [(node, {s: found.get(k) for s, found in by_slot.items()}) for k, node in enumerate(nodes)], sums


def _shard(loaded: LoadedBatch) -> int:
    return loaded.micro_batch.shard


def _share(loaded: list[LoadedBatch], num_lanes: int, lane: int) -> list[LoadedBatch]:
    part = split(len(loaded), num_lanes, lane)
    return loaded[part.start : part.stop]
