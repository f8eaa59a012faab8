"""The tally: everything small that all ranks must agree on in a step, in one float64 all_reduce.

It carries the sum and count of the loss, metrics, which parameters had a gradient anywhere, the change of
the buffers, and whether any rank was asked to stop. Sums of counts are exact in float64 up to 2**53.

Invariant: after `agree`, every rank holds the same tally, so every decision taken from it is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.handle import Handle
from paceline.comm.net import Net
from paceline.mesh import Group
from paceline.slot import Slot


@dataclass(frozen=True)
class Tally:
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

    def used_names(self, slots: Sequence[Slot]) -> set[str]:
        """Names of the parameters that any rank has a gradient of."""
        return {slot.name for slot, ranks in zip(slots, self.used, strict=True) if ranks > 0}

    def agree(self, net: Net, group: Group, device: torch.device) -> AgreedTally:
        """Launch the sum over the group; `.wait()` returns the sum. Alone there is nothing to agree on."""
        if group.size == 1 and device.type == "cpu":
            return AgreedTally(self, None)
        head = [self.micro_batches, self.total, self.count, self.stops, *self.metrics.values(), *self.used]
        packed = torch.tensor(head, dtype=torch.float64)
        if self.buffers.numel():
            packed = torch.cat([packed, self.buffers.cpu()])
        return AgreedTally(self, net.all_reduce(packed.to(device), group))


@dataclass(frozen=True)
class AgreedTally:
    """A tally under way; without a handle it is this rank's own."""

    mine: Tally
    handle: Handle | None

    def wait(self) -> Tally:
        """The sum over all ranks."""
        if self.handle is None:
            return self.mine
        packed: Tensor = self.handle.wait().cpu()
        names = list(self.mine.metrics)
        num_head = 4 + len(names) + len(self.mine.used)
        head = packed[:num_head].tolist()
        return Tally(
            micro_batches=head[0],
            total=head[1],
            count=head[2],
            stops=head[3],
            metrics=dict(zip(names, head[4 : 4 + len(names)], strict=True)),
            used=head[4 + len(names) :],
            buffers=packed[num_head:],
        )


def tally_bytes(num_metrics: int, num_parameters: int, num_buffer_values: int) -> int:
    """Payload of one tally, in bytes: the closed form that the ledger must show."""
    return 8 * (4 + num_metrics + num_parameters + num_buffer_values)
