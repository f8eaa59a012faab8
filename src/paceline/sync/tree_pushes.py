"""Pushes whose sum has the order of the tree of additions, whoever ran which part: see `comm.reduction.tree`.

A worker sends the sums of the largest nodes of the tree that make up its part, and what each of its shards
adds to loss, metrics and buffers. The server puts the nodes of all parts together, and adds rows by shard. So
one update of all parts of a batch has the bits of every-step under `reproducible`.

Exactness: bitwise (tests/parity/test_bounded.py).
Wire: up, K n bytes of gradients for a part that is K nodes; even parts of 2**k shards are one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.comm import Reduction, Tally
from paceline.comm.channel import Message
from paceline.comm.reduction import TreeReducer, cover
from paceline.comm.reduction.local import without_negative_zeros
from paceline.comm.reduction.tree import tree_sum
from paceline.comm.shard_tally import add_rows
from paceline.data import split
from paceline.layout import Placed, Sums
from paceline.slot import Slot
from paceline.sync.pushes import Added, Given, Pushed


class InTreeOrder:
    """See `Pushes`.

    Args:
        num_shards: of a step.
        num_parts: of a step: all workers.
    """

    lasts = False

    def __init__(self, num_shards: int, num_parts: int) -> None:
        self._num_shards, self._num_parts = num_shards, num_parts

    def sink(self, placed: Placed, part: int) -> Reduction:
        """See `Pushes`."""
        return TreeReducer(placed.holding.computes, self._nodes(part))

    def made(self, sink: Reduction, sums: Sums, placed: Placed, scale: float, given: Given) -> list[Pushed]:
        """See `Pushes`; there is one server."""
        assert isinstance(sink, TreeReducer)
        _, _, metrics = sums.read()
        by_node = [*sink.take().values()]
        fields = {
            "shards": [*given.shards],
            "rows": sums.per_micro_batch().tolist(),
            "metrics": [*metrics],
            "scale": scale,
            "nodes": [sorted(found) for found in by_node],
        }
        changes = placed.buffers.changes_of(given.shards) or [placed.buffers.added([])]
        nodes = [found[node] for found in by_node for node in sorted(found)]
        return [(fields, [torch.stack(changes), *nodes])]

    def add(self, messages: Sequence[Message], placed: Placed) -> Added:
        """See `Pushes`; all parts of one step."""
        places: list[list[range]] = [[] for _ in placed.holding.updates]
        values: list[list[Tensor]] = [[] for _ in placed.holding.updates]
        for message in sorted(messages, key=lambda message: message.fields["place"][1]):
            nodes = self._nodes(message.fields["place"][1])
            given = iter(message.tensors[1:])
            for number, found in enumerate(message.fields["nodes"]):
                places[number] += [nodes[node] for node in found]
                values[number] += [next(given).to(placed.holding.device) for _ in found]
        sums = [tree_sum(*pair) if pair[0] else None for pair in zip(places, values, strict=True)]
        without_negative_zeros([x for x in sums if x is not None])
        grads = {
            slot: None if x is None else torch.empty_like(p).copy_(x).detach()
            for (slot, p), x in zip(placed.holding.updates.items(), sums, strict=True)
        }
        return Added(self._tally(messages, grads), grads, float(messages[0].fields["scale"]))

    def _tally(self, messages: Sequence[Message], grads: Mapping[Slot, Tensor | None]) -> Tally:
        """All shards have a row of their own, and rows are added in their order."""
        fields = messages[0].fields
        names, width = fields["metrics"], 2 + len(fields["metrics"])
        num_values = max(message.tensors[0].shape[1] for message in messages)  # 0: a part without samples
        rows = torch.zeros(self._num_shards, width + num_values, dtype=torch.float64)
        for message in messages:
            changes = message.tensors[0]
            told = zip(message.fields["shards"], message.fields["rows"], strict=True)
            for number, (shard, row) in enumerate(told):
                rows[shard, :width] = torch.tensor(row, dtype=torch.float64)
                rows[shard, width:] = changes[number] if num_values else 0.0
        total = add_rows(rows)
        loss, count, *metrics = total[:width].tolist()
        return Tally(
            micro_batches=float(sum(len(message.fields["shards"]) for message in messages)),
            total=loss,
            count=count,
            metrics=dict(zip(names, metrics, strict=True)),
            stops=float(max(message.fields["stops"] for message in messages)),
            used=[float(g is not None) for g in grads.values()],
            buffers=total[width:],
        )

    def _nodes(self, part: int) -> list[range]:
        return cover(split(self._num_shards, self._num_parts, part))
