"""The tally: everything small that all ranks must agree on in a step, in one float64 all_reduce.

It carries the sum and count of the loss, metrics, which parameters had a gradient anywhere, the change of the
buffers, and whether any rank was asked to stop. Sums of counts are exact in float64 up to 2**53. `ShardTally`
has a row for each shard and adds the rows in the order of the shards, so its sums do not depend on which rank
ran which shard.

Invariant: after `agree`, every rank holds the same tally, so every decision taken from it is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.comm.handle import Handle
from paceline.comm.net import Net
from paceline.job.mesh import RankGroup
from paceline.state.slot import TensorSlot


@dataclass(frozen=True)
class StepTally:
    """Sums over micro-batches, of one rank before the agreement and of all ranks after it.

    Args:
        micro_batches: number of shards that were run.
        total: sum of the loss.
        count: number of items in that sum.
        metrics: further sums, by name; every rank has the same names.
        stops: number of ranks that were asked to stop.
        used: by trained parameter of the whole model, number of ranks that have a gradient.
        buffers: change of the model's buffers, summed over micro-batches, float64 [num_buffer_values].
    """

    micro_batches: float
    total: float
    count: float
    metrics: Mapping[str, float]
    stops: float
    used: Sequence[float]
    buffers: Tensor

    def used_names(self, slots: Sequence[TensorSlot]) -> set[str]:
        """Return the names of the parameters for which any rank has a gradient."""
        return {slot.name for slot, ranks in zip(slots, self.used, strict=True) if ranks > 0}

    def agree(self, net: Net, group: RankGroup, device: torch.device) -> PendingTally:
        """Launch the sum over the group; `.wait()` returns it. One process on the CPU has nothing to sum."""
        # A group of one on a GPU takes the general path, whose `wait` copies the sums to the CPU.
        if group.size == 1 and device.type == "cpu":
            return PendingTally(self, None)
        head = [self.micro_batches, self.total, self.count, self.stops, *self.metrics.values(), *self.used]
        # Everything is in one tensor: agreeing on a step costs one latency.
        packed = torch.tensor(head, dtype=torch.float64)
        if self.buffers.numel():
            packed = torch.cat([packed, self.buffers.cpu()])
        return PendingTally(self, net.all_reduce(packed.to(device), group))


@dataclass(frozen=True)
class PendingTally:
    """A tally in flight; without a handle it is this rank's own."""

    local: StepTally
    handle: Handle | None

    def wait(self) -> StepTally:
        """Return the sum over all ranks."""
        if self.handle is None:
            return self.local
        packed: Tensor = self.handle.wait().cpu()
        names = list(self.local.metrics)
        num_head = 4 + len(names) + len(self.local.used)
        head = packed[:num_head].tolist()
        return StepTally(
            micro_batches=head[0],
            total=head[1],
            count=head[2],
            stops=head[3],
            metrics=dict(zip(names, head[4 : 4 + len(names)], strict=True)),
            used=head[4 + len(names) :],
            buffers=packed[num_head:],
        )


def tally_bytes(num_metrics: int, num_parameters: int, num_buffer_values: int) -> int:
    """Return the payload of one tally, in bytes: the closed form that the ledger must show."""
    return 8 * (4 + num_metrics + num_parameters + num_buffer_values)


@dataclass(frozen=True)
class ShardTally:
    """The sums of one rank's shards, before the agreement.

    Args:
        head: tally of this rank; its sums of loss, count, metrics and buffers are not used.
        num_shards: number of shards of the step, over all ranks.
        shards: shards of this rank, one for each row of the fields below.
        sums: loss, count and metrics, float64 [micro-batches, 2 + num_metrics]; no row on ranks that see no
            loss.
        changes: changes of the buffers, by micro-batch, float64 [num_values] each.
    Wire: 8 (micro-batches, stops, one for each parameter, and for each shard 2 + num_metrics + num_values)
        bytes.
    """

    head: StepTally
    num_shards: int
    shards: Sequence[int]
    sums: Tensor
    changes: Sequence[Tensor]

    def agree(self, net: Net, group: RankGroup, device: torch.device) -> PendingShardTally:
        """Launch the sum over the group; `.wait()` returns it."""
        width = 2 + len(self.head.metrics)
        # Rows of other ranks' shards stay zero: the all_reduce adds zeros to each row, which rounds nothing.
        rows = torch.zeros(self.num_shards, width + self.head.buffers.numel(), dtype=torch.float64)
        for shard, sums in zip(self.shards, self.sums, strict=False):
            rows[shard, :width] = sums
        for shard, change in zip(self.shards, self.changes, strict=False):
            rows[shard, width:] = change
        numbers = torch.tensor(
            [self.head.micro_batches, self.head.stops, *self.head.used], dtype=torch.float64
        )
        packed = torch.cat([numbers, rows.view(-1)]).to(device)
        return PendingShardTally(self, net.all_reduce(packed, group))


@dataclass(frozen=True)
class PendingShardTally:
    """A tally of shards in flight."""

    local: ShardTally
    handle: Handle

    def wait(self) -> StepTally:
        """Return the sum over all shards."""
        packed: Tensor = self.handle.wait().cpu()
        head, names = self.local.head, list(self.local.head.metrics)
        num_numbers = 2 + len(head.used)
        numbers, rows = packed[:num_numbers].tolist(), packed[num_numbers:].view(self.local.num_shards, -1)
        total = sum_shard_rows(rows)
        sums = total[: 2 + len(names)].tolist()
        return replace(
            head,
            micro_batches=numbers[0],
            stops=numbers[1],
            used=numbers[2:],
            total=sums[0],
            count=sums[1],
            metrics=dict(zip(names, sums[2:], strict=True)),
            buffers=total[2 + len(names) :],
        )


def sum_shard_rows(rows: Tensor) -> Tensor:
    """Return the sum of rows [shards, values], float64, in the order of the shards."""
    # One addition after the other: `rows.sum(0)` may add in an order that depends on the number of threads.
    total = torch.zeros_like(rows[0])
    for row in rows:
        total += row
    return total


def shard_tally_bytes(num_shards: int, num_metrics: int, num_parameters: int, num_buffer_values: int) -> int:
    """Return the payload of one tally of shards, in bytes: the closed form that the ledger must show."""
    return 8 * (2 + num_parameters + num_shards * (2 + num_metrics + num_buffer_values))


def sum_tallies(tallies: Sequence[StepTally]) -> StepTally:
    """Return the sum of the tallies of several steps or pushes, with the buffers of the first."""
    first = tallies[0]
    return StepTally(
        micro_batches=sum(t.micro_batches for t in tallies),
        total=sum(t.total for t in tallies),
        count=sum(t.count for t in tallies),
        metrics={name: sum(t.metrics[name] for t in tallies) for name in first.metrics},
        stops=max(t.stops for t in tallies),
        used=[sum(column) for column in zip(*(t.used for t in tallies), strict=True)],
        buffers=first.buffers,
    )
