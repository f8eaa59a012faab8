"""ZeRO stage 1: the model is whole on every rank, the optimizer's state is cut among the ranks of a replica.

Each parameter is cut along its first dimension. A rank's optimizer updates its own rows, which share their
memory with the parameter; then the rows are exchanged. Every rank of the shard axis runs units of its own.
The update must be elementwise, as those of SGD and AdamW are: a part is updated without the others.

Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.1 (optimizer state partitioning).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from paceline.comm.rows import Cuts, part_of, rows_of
from paceline.data import split
from paceline.slot import Slot


def cut_rows(slots: Iterable[Slot], num_parts: int) -> Cuts:
    """By parameter and part, the rows of that part; pure. Shares differ by at most one row."""
    return [
        [_slice(split(slot.shape[0] if slot.shape else 1, num_parts, part)) for part in range(num_parts)]
        for slot in slots
    ]


def own_parts(slots: Mapping[Slot, nn.Parameter], cuts: Cuts, rank: int) -> dict[Slot, nn.Parameter]:
    """This rank's rows as parameters that share memory with the whole; without those that have no rows."""
    found = {}
    for (slot, p), cut in zip(slots.items(), cuts, strict=True):
        if rows_of(p.data, cut[rank]).numel():
            part = ((cut[rank].start, cut[rank].stop), *slot.part[1:]) if slot.shape else ()
            own = nn.Parameter(part_of(p.data, cut[rank]))
            found[Slot(slot.name, slot.shape, part, frozenset({"shard"}))] = own
    return found


def adopt(optimizer: torch.optim.Optimizer, own: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Let an optimizer without state update other parameters; those that are not in `own` are left out."""
    for group in optimizer.param_groups:
        group["params"] = [own[p] for p in group["params"] if p in own]


def _slice(rows: range) -> slice:
    return slice(rows.start, rows.stop)
