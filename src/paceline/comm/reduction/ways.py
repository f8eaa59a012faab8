"""On which paths gradients go that leave with every micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.comm.collectives import Collective
from paceline.comm.net import Net
from paceline.mesh import Group


@dataclass(frozen=True)
class Ways:
    """On which paths gradients go.

    Args:
        shard: scatters them; exact, on a process group of its own.
        replica: sums parts over the ranks that update the same; exact.
        group: the ranks of `shard`, by another process group, over which they agree.
        waits: whether a rank may wait for any scatter during backward. Not if ranks wait for each other's
            parameters there: one that has run all its micro-batches gathers before it scatters zeros, and
            one without a gradient here gathers the next parameters before it scatters the bucket. Then a
            rank waits for scatters of earlier micro-batches only, and if `all_run`: all have ended those.
        all_run: whether every rank of `shard` has begun the present micro-batch.
    """

    shard: Collective
    replica: Collective
    group: Group
    net: Net
    waits: bool = True
    all_run: Callable[[], bool] = lambda: False
