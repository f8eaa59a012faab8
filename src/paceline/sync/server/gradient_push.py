"""Pushes: the gradients and sums of one ticket as a message, and their sum on the server.

`UnorderedPushes` sends a part as one sum, through a codec or as it is. `TreeOrderedPushes` is for
`reproducible` and `sync=server`: a worker sends the sums of the largest nodes of the summation tree
(`comm.reduction`) that make up its part, and the loss, metrics and buffer changes of each of its shards. The
server combines the nodes of all parts and adds the rows by shard, so an update of all parts of a batch has
the bits of every-step, whichever worker ran which part.

Exactness: tree order bitwise (tests/parity/test_bounded_staleness.py).
Wire: up, K n bytes of gradients for a part of K nodes; an even part of 2**k shards is one node.
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
from paceline.comm.tally import StepTally, sum_shard_rows, sum_tallies
from paceline.data.work import split_evenly
from paceline.parallel.model_runner import LossSums, ModelRunner
from paceline.state.slot import TensorSlot
from paceline.sync.server.parameter_transfer import (
    PRIMARY_RANK,
    ParameterTransfer,
    iter_server_parts,
    view_part,
)


@dataclass(frozen=True)
class AssignedPart:
    """The part of a batch that a worker runs.

    Args:
        step, part: of its ticket.
        shards: the shards of its micro-batches, in their order.
        weight: the divisor of its sum in an update, relative to a full batch; 1 if updates do not divide.
    """

    step: int
    part: int
    shards: Sequence[int]
    weight: float = 1.0


@dataclass(frozen=True)
class PushTotal:
    """The sums of some pushes.

    Args:
        tally: loss, metrics and buffers.
        grads: the summed gradients, by slot.
        scale: the factor of the gradients.
    """

    tally: StepTally
    grads: Mapping[TensorSlot, Tensor | None]
    scale: float = 1.0


PushMessage = tuple[dict[str, Any], list[Tensor]]
"""Fields and tensors of a message."""


class PushFormat(Protocol):
    """The protocol of an encoding of pushes; workers and servers use the same one."""

    @property
    def lasts(self) -> bool:
        """Return whether encoded tensors stay unchanged; see `ChannelMessage`."""

    def new_accumulator(self, runner: ModelRunner, part: int) -> GradientReduction:
        """Return the reduction that collects the gradients of a part."""

    def encode(
        self,
        accumulator: GradientReduction,
        sums: LossSums,
        runner: ModelRunner,
        scale: float,
        assigned: AssignedPart,
    ) -> list[PushMessage]:
        """Return the messages with the gradients of one part, one per server."""

    def add(self, messages: Sequence[ChannelMessage], runner: ModelRunner) -> PushTotal:
        """Decode some pushes and return their sum; they are added in the given order."""


class UnorderedPushes:
    """Pushes that are one sum each, encoded by a `ParameterTransfer`.

    Args:
        transfers: of a worker one per server, by server; of a server its own.
    """

    def __init__(self, transfers: Sequence[ParameterTransfer]) -> None:
        self._transfers = transfers
        self.lasts = all(transfer.lasts for transfer in transfers)

    def new_accumulator(self, runner: ModelRunner, part: int) -> GradientReduction:
        return LocalReducer(runner.sharded_model.computes)

    def encode(
        self,
        accumulator: GradientReduction,
        sums: LossSums,
        runner: ModelRunner,
        scale: float,
        assigned: AssignedPart,
    ) -> list[PushMessage]:
        """Return the messages of a part: all servers receive the loss sums, server 0 the buffers."""
        total, count, metrics = sums.read()
        grads, ticket_place = accumulator.finish().tensors, (assigned.step, assigned.part)
        fields = {
            "micro_batches": sums.micro_batches,
            "total": total,
            "count": count,
            "metrics": dict(metrics),
        }
        buffer_change = runner.buffers.sum_changes(runner.buffers.changes_of(assigned.shards))
        messages: list[PushMessage] = []
        for server, transfer in enumerate(self._transfers):
            pairs = [
                (part, slot, grads[slot]) for slot, part in iter_server_parts(runner.sharded_model, server)
            ]
            # Unscaled, because pushes of one update can come from tickets with different loss scales.
            unscaled_grads = {
                part: view_part(g, slot, part) / scale for part, slot, g in pairs if g is not None
            }
            # Buffers belong to no server, so one of them collects their changes.
            change = buffer_change if server == PRIMARY_RANK else buffer_change.new_empty(0)
            used = [g is not None for _, _, g in pairs]
            messages.append(
                (
                    {**fields, "used": used},
                    [change, *transfer.encode_push(unscaled_grads, ticket_place, assigned.weight)],
                )
            )
        return messages

    def add(self, messages: Sequence[ChannelMessage], runner: ModelRunner) -> PushTotal:
        tallies_and_grads = [self._read(message, runner) for message in messages]
        tally = sum_tallies([tally for tally, _ in tallies_and_grads])
        tally = replace(tally, buffers=torch.stack([t.buffers for t, _ in tallies_and_grads]).sum(0))
        return PushTotal(
            tally,
            {
                slot: _add_present([g[slot] for _, g in tallies_and_grads])
                for slot in runner.sharded_model.updates
            },
        )

    def _read(
        self, message: ChannelMessage, runner: ModelRunner
    ) -> tuple[StepTally, dict[TensorSlot, Tensor | None]]:
        """Return the sums and unscaled gradients of one push."""
        fields = message.fields
        change, *payloads = (t.to(runner.sharded_model.device) for t in message.tensors)
        used = [*zip(runner.sharded_model.updates.items(), fields["used"], strict=True)]
        step, part = fields["place"]
        likes = {slot: p for (slot, p), is_used in used if is_used}
        (transfer,) = self._transfers
        decoded = iter(transfer.decode_push(payloads, likes, (step, part)))
        grads = {s: match_strides(p, next(decoded)) if is_used else None for (s, p), is_used in used}
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
    """Return the sum of the gradients that are there; None: there is none."""
    present = [part for part in parts if part is not None]
    if len(present) < 2:
        return present[0] if present else None
    # A new tensor: adding in place would change memory that a message still holds.
    total = present[0] + present[1]
    for part in present[2:]:
        total += part
    return total


def match_strides(p: Tensor, values: Tensor) -> Tensor:
    """Return the values in the memory order of the parameter, which fused kernels require."""
    return values if values.stride() == p.stride() else torch.empty_like(p).copy_(values).detach()


class TreeOrderedPushes:
    """Pushes of tree nodes, for sums in one order.

    Args:
        num_shards: shards of a step.
        num_parts: parts of a step, one per worker.
    """

    lasts = False

    def __init__(self, num_shards: int, num_parts: int) -> None:
        self._num_shards, self._num_parts = num_shards, num_parts

    def new_accumulator(self, runner: ModelRunner, part: int) -> GradientReduction:
        return TreeReducer(runner.sharded_model.computes, self._nodes(part))

    def encode(
        self,
        accumulator: GradientReduction,
        sums: LossSums,
        runner: ModelRunner,
        scale: float,
        assigned: AssignedPart,
    ) -> list[PushMessage]:
        """Return the message of a part; there is one server."""
        assert isinstance(accumulator, TreeReducer)
        _, _, metrics = sums.read()
        by_node = [*accumulator.take().values()]
        fields = {
            "shards": [*assigned.shards],
            "rows": sums.per_micro_batch().tolist(),
            "metrics": [*metrics],
            "scale": scale,
            "nodes": [sorted(node_sums) for node_sums in by_node],
        }
        changes = runner.buffers.changes_of(assigned.shards) or [runner.buffers.sum_changes([])]
        nodes = [node_sums[node] for node_sums in by_node for node in sorted(node_sums)]
        return [(fields, [torch.stack(changes), *nodes])]

    def add(self, messages: Sequence[ChannelMessage], runner: ModelRunner) -> PushTotal:
        """Combine the nodes of all parts of one step."""
        places: list[list[range]] = [[] for _ in runner.sharded_model.updates]
        values: list[list[Tensor]] = [[] for _ in runner.sharded_model.updates]
        # Sorted by part: the order of arrival must not change a sum.
        for message in sorted(messages, key=lambda message: message.fields["place"][1]):
            nodes = self._nodes(message.fields["place"][1])
            tensors = iter(message.tensors[1:])
            for number, node_numbers in enumerate(message.fields["nodes"]):
                places[number] += [nodes[node] for node in node_numbers]
                values[number] += [next(tensors).to(runner.sharded_model.device) for _ in node_numbers]
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
        """Add one row per shard, in the order of the shards."""
        fields = messages[0].fields
        names, width = fields["metrics"], 2 + len(fields["metrics"])
        num_values = max(message.tensors[0].shape[1] for message in messages)  # 0: a part without samples
        rows = torch.zeros(self._num_shards, width + num_values, dtype=torch.float64)
        for message in messages:
            changes = message.tensors[0]
            shard_rows = zip(message.fields["shards"], message.fields["rows"], strict=True)
            for number, (shard, row) in enumerate(shard_rows):
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
