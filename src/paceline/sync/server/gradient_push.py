"""What a worker pushes, as it makes it and as its server reads it.

Pushes whose sum has the order of the tree of additions, whoever ran which part: see `comm.reduction.tree`.

A worker sends the sums of the largest nodes of the tree that make up its part, and what each of its shards
adds to loss, metrics and buffers. The server puts the nodes of all parts together, and adds rows by shard. So
one update of all parts of a batch has the bits of every-step under `reproducible`.

Exactness: bitwise (tests/parity/test_bounded.py).
Wire: up, K n bytes of gradients for a part that is K nodes; even parts of 2**k shards are one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.comm.channel.message_channel import ChannelMessage
from paceline.comm.reduction.bucket_reducer import TreeReducer, clear_negative_zeros
from paceline.comm.reduction.gradients import GradientReduction, LocalReducer
from paceline.comm.reduction.summation_tree import covering_nodes, tree_sum
from paceline.comm.tally import StepTally, sum_shard_rows
from paceline.data.work import split_evenly
from paceline.parallel.model_runner import LossSums, ModelRunner
from paceline.state.slot import TensorSlot
from paceline.sync.local_rounds import sum_tallies
from paceline.sync.server.parameter_transfer import (
    PRIMARY_RANK,
    ParameterTransfer,
    iter_server_parts,
    view_part,
)


@dataclass(frozen=True)
class AssignedPart:
    """A part that a worker was given.

    Args:
        shards: those of its micro-batches, in their order.
        weight: what an update divides its sum by, beside that of a full batch; 1 where it does not divide.
    """

    step: int
    part: int
    shards: Sequence[int]
    weight: float = 1.0


@dataclass(frozen=True)
class PushTotal:
    """The sums over some pushes.

    Args:
        scale: what the gradients were multiplied with before backward.
    """

    tally: StepTally
    grads: Mapping[TensorSlot, Tensor | None]
    scale: float = 1.0


PushMessage = tuple[dict[str, Any], list[Tensor]]
"""Fields and tensors of a message."""


class PushFormat(Protocol):
    """Both ends use one of the same kind."""

    @property
    def lasts(self) -> bool:
        """What is made is not changed afterwards; see `ChannelMessage`."""

    def sink(self, runner: ModelRunner, part: int) -> GradientReduction:
        """What takes the gradients of a part."""

    def made(
        self, sink: GradientReduction, sums: LossSums, runner: ModelRunner, scale: float, given: AssignedPart
    ) -> list[PushMessage]:
        """What a worker sends of a part that it has run, by server."""

    def add(self, messages: Sequence[ChannelMessage], runner: ModelRunner) -> PushTotal:
        """The inverse, on the server, and the sum over some parts, in the order in which they are given."""


class UnorderedPushes:
    """A part is one sum, through a codec or as it is.

    Args:
        traffics: of a worker, by server; a server has its own alone.
    """

    def __init__(self, traffics: Sequence[ParameterTransfer]) -> None:
        self._traffics = traffics
        self.lasts = all(traffic.lasts for traffic in traffics)

    def sink(self, runner: ModelRunner, part: int) -> GradientReduction:
        """See `PushFormat`."""
        return LocalReducer(runner.sharded_model.computes)

    def made(
        self, sink: GradientReduction, sums: LossSums, runner: ModelRunner, scale: float, given: AssignedPart
    ) -> list[PushMessage]:
        """See `PushFormat`: all servers hear all sums; rank 0 has the buffers."""
        total, count, metrics = sums.read()
        grads, place = sink.finish().tensors, (given.step, given.part)
        fields = {
            "micro_batches": sums.micro_batches,
            "total": total,
            "count": count,
            "metrics": dict(metrics),
        }
        moved = runner.buffers.added(runner.buffers.changes_of(given.shards))
        found: list[PushMessage] = []
        for server, traffic in enumerate(self._traffics):
            pairs = [
                (part, slot, grads[slot]) for slot, part in iter_server_parts(runner.sharded_model, server)
            ]
            there = {part: view_part(g, slot, part) / scale for part, slot, g in pairs if g is not None}
            change = moved if server == PRIMARY_RANK else moved.new_empty(0)
            used = [g is not None for _, _, g in pairs]
            found.append(({**fields, "used": used}, [change, *traffic.push(there, place, given.weight)]))
        return found

    def add(self, messages: Sequence[ChannelMessage], runner: ModelRunner) -> PushTotal:
        """See `PushFormat`."""
        found = [self._read(message, runner) for message in messages]
        tally = sum_tallies([tally for tally, _ in found])
        tally = replace(tally, buffers=torch.stack([t.buffers for t, _ in found]).sum(0))
        return PushTotal(
            tally, {slot: _add_present([g[slot] for _, g in found]) for slot in runner.sharded_model.updates}
        )

    def _read(
        self, message: ChannelMessage, runner: ModelRunner
    ) -> tuple[StepTally, dict[TensorSlot, Tensor | None]]:
        """Sums and unscaled gradients of one push."""
        fields = message.fields
        change, *given = (t.to(runner.sharded_model.device) for t in message.tensors)
        used = [*zip(runner.sharded_model.updates.items(), fields["used"], strict=True)]
        step, part = fields["place"]
        likes = {slot: p for (slot, p), there in used if there}
        (traffic,) = self._traffics
        rest = iter(traffic.pushed(given, likes, (step, part)))
        grads = {s: match_strides(p, next(rest)) if there else None for (s, p), there in used}
        tally = StepTally(
            micro_batches=fields["micro_batches"],
            total=fields["total"],
            count=fields["count"],
            metrics=fields["metrics"],
            stops=float(fields["stops"]),
            used=[float(used) for used in fields["used"]],
            buffers=change,
        )
        return tally, grads


def _add_present(parts: list[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    if len(there) < 2:
        return there[0] if there else None
    total = there[0] + there[1]
    for part in there[2:]:
        total += part
    return total


def match_strides(p: Tensor, values: Tensor) -> Tensor:
    """In memory in the order of the parameter, as kernels expect it."""
    return values if values.stride() == p.stride() else torch.empty_like(p).copy_(values).detach()


class TreeOrderedPushes:
    """See `PushFormat`.

    Args:
        num_shards: of a step.
        num_parts: of a step: all workers.
    """

    lasts = False

    def __init__(self, num_shards: int, num_parts: int) -> None:
        self._num_shards, self._num_parts = num_shards, num_parts

    def sink(self, runner: ModelRunner, part: int) -> GradientReduction:
        """See `PushFormat`."""
        return TreeReducer(runner.sharded_model.computes, self._nodes(part))

    def made(
        self, sink: GradientReduction, sums: LossSums, runner: ModelRunner, scale: float, given: AssignedPart
    ) -> list[PushMessage]:
        """See `PushFormat`; there is one server."""
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
        changes = runner.buffers.changes_of(given.shards) or [runner.buffers.added([])]
        nodes = [found[node] for found in by_node for node in sorted(found)]
        return [(fields, [torch.stack(changes), *nodes])]

    def add(self, messages: Sequence[ChannelMessage], runner: ModelRunner) -> PushTotal:
        """See `PushFormat`; all parts of one step."""
        places: list[list[range]] = [[] for _ in runner.sharded_model.updates]
        values: list[list[Tensor]] = [[] for _ in runner.sharded_model.updates]
        for message in sorted(messages, key=lambda message: message.fields["place"][1]):
            nodes = self._nodes(message.fields["place"][1])
            given = iter(message.tensors[1:])
            for number, found in enumerate(message.fields["nodes"]):
                places[number] += [nodes[node] for node in found]
                values[number] += [next(given).to(runner.sharded_model.device) for _ in found]
        sums = [tree_sum(*pair) if pair[0] else None for pair in zip(places, values, strict=True)]
        clear_negative_zeros([x for x in sums if x is not None])
        grads = {
            slot: None if x is None else torch.empty_like(p).copy_(x).detach()
            for (slot, p), x in zip(runner.sharded_model.updates.items(), sums, strict=True)
        }
        return PushTotal(self._tally(messages, grads), grads, float(messages[0].fields["scale"]))

    def _tally(
        self, messages: Sequence[ChannelMessage], grads: Mapping[TensorSlot, Tensor | None]
    ) -> StepTally:
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
        total = sum_shard_rows(rows)
        loss, count, *metrics = total[:width].tolist()
        return StepTally(
            micro_batches=float(sum(len(message.fields["shards"]) for message in messages)),
            total=loss,
            count=count,
            metrics=dict(zip(names, metrics, strict=True)),
            stops=float(max(message.fields["stops"] for message in messages)),
            used=[float(g is not None) for g in grads.values()],
            buffers=total[width:],
        )

    def _nodes(self, part: int) -> list[range]:
        return covering_nodes(split_evenly(self._num_shards, self._num_parts, part))
