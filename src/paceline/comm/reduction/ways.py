"""On which paths gradients go that leave with every micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.comm.collectives import Collective
from paceline.comm.net import Net
from paceline.comm.reduction.pace import Pace
from paceline.comm.workspace import Workspace
from paceline.mesh import Group


@dataclass(frozen=True)
class Ways:
    """On which paths gradients go.

    Args:
        shard: scatters them; exact, on a process group of its own.
        replica: sums parts over the ranks that update the same; exact.
        group: the ranks of `shard`, by another process group, over which they agree.
        pace: what every rank has launched, where ranks wait for each other's parameters in backward; a rank
            waits for no other scatters there. One that has run all its micro-batches gathers before it
            scatters zeros, and one without a gradient here gathers the next parameters before it scatters
            the bucket. None: a rank may wait for any scatter.
        memory: of buckets that stay; see `Blocks`.
    """

    shard: Collective
    replica: Collective
    group: Group
    net: Net
    pace: Pace | None = None
    memory: Workspace = field(default_factory=Workspace)
