"""Rows of all ranks, summed by whoever owns them, through memory of the caller: nothing is allocated."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.comm.handle import Handle, failure, launched
from paceline.comm.net import Net
from paceline.comm.rows import exchange_others
from paceline.mesh import Group


def scatter_rows(net: Net, x: Tensor, arriving: Tensor, group: Group) -> Handle:
    """Sum `x` [P, n] over the group; the handle returns row `group.rank` of the sum, in `arriving`.

    Args:
        arriving: [P - 1, n], for what the others send.
    Exactness: rows are added in the order of the ranks.
    Wire: (P-1)/P of the bytes of `x`, 1 round.
    """
    entry = net.ledger.launched("reduce_scatter", group.name, x.nbytes, group.size)
    try:
        work = exchange_others(group.handle, group.rank, x, arriving)
    except RuntimeError as error:
        raise failure("reduce_scatter", group, net, error, net.deadline_seconds) from error

    def total() -> Tensor:
        rows = [*arriving[: group.rank], x[group.rank], *arriving[group.rank :]]
        torch.add(rows[0], rows[1], out=arriving[0])
        for row in rows[2:]:
            arriving[0].add_(row)
        return arriving[0]

    return launched("reduce_scatter", group, net, work, entry, total)
