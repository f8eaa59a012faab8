"""The tally whose sums do not depend on who ran which shard: every shard has a row of its own.

Ranks fill in the rows of their shards, and the other rows are zeros, so that nothing is rounded on the
way; then everyone adds the rows in the order of the shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.comm.handle import Handle
from paceline.comm.net import Net
from paceline.comm.tally import Tally
from paceline.mesh import Group


@dataclass(frozen=True)
class ShardTally:
    """One rank's shards, before the agreement.

    Args:
        head: of this rank; its sums of loss, count, metrics and buffers are not used.
        num_shards: of the step, over all ranks.
        shards: of this rank, one for each row of what follows.
        sums: loss, count and metrics, float64 [micro-batches, 2 + num_metrics]; no row on ranks that see no
            loss.
        changes: of the buffers, by micro-batch, float64 [num_values] each.
    Wire: 8 (micro-batches, stops, one for each parameter, and for each shard 2 + num_metrics + num_values)
    bytes.
    """

    head: Tally
    num_shards: int
    shards: Sequence[int]
    sums: Tensor
    changes: Sequence[Tensor]

    def agree(self, net: Net, group: Group, device: torch.device) -> AgreedShardTally:
        """Launch the sum over the group; `.wait()` returns it."""
        width = 2 + len(self.head.metrics)
        rows = torch.zeros(self.num_shards, width + self.head.buffers.numel(), dtype=torch.float64)
        for shard, sums in zip(self.shards, self.sums, strict=False):
            rows[shard, :width] = sums
        for shard, change in zip(self.shards, self.changes, strict=False):
            rows[shard, width:] = change
        numbers = torch.tensor(
            [self.head.micro_batches, self.head.stops, *self.head.used], dtype=torch.float64
        )
        packed = torch.cat([numbers, rows.view(-1)]).to(device)
        return AgreedShardTally(self, net.all_reduce(packed, group))


@dataclass(frozen=True)
class AgreedShardTally:
    """A tally under way."""

    mine: ShardTally
    handle: Handle

    def wait(self) -> Tally:
        """The sum over all shards."""
        packed: Tensor = self.handle.wait().cpu()
        head, names = self.mine.head, list(self.mine.head.metrics)
        num_numbers = 2 + len(head.used)
        numbers, rows = packed[:num_numbers].tolist(), packed[num_numbers:].view(self.mine.num_shards, -1)
        total = add_rows(rows)
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


def add_rows(rows: Tensor) -> Tensor:
    """The sum of rows [shards, values], float64, in the order of the shards."""
    total = torch.zeros_like(rows[0])
    for row in rows:
        total += row
    return total


def shard_tally_bytes(num_shards: int, num_metrics: int, num_parameters: int, num_buffer_values: int) -> int:
    """Payload of one such tally, in bytes: the closed form that the ledger must show."""
    return 8 * (2 + num_parameters + num_shards * (2 + num_metrics + num_buffer_values))
