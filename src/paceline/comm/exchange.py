"""Every rank sends every other some values, of any number: what a ring and an all-to-all are made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.handle import Handle, failure, launched
from paceline.comm.net import Net
from paceline.mesh import Group


def exchange(net: Net, parts: Sequence[Tensor], sizes: Sequence[int], group: Group) -> Handle:
    """Send the flat `parts[i]` to rank i; the handle returns what each sent here, `sizes[i]` values.

    Parts may differ in size, and be empty: a ring sends to the next rank and receives from the one before in
    one call, so no order of sends and receives has to be right. Parts are of one type.

    Wire: the bytes of all parts but the own, 1 round.
    """
    if group.handle is None:
        return Handle.ready([part.clone() for part in parts])
    source = torch.cat([part.reshape(-1) for part in parts])
    out, counts, coming = source.new_empty(sum(sizes)), [part.numel() for part in parts], list(sizes)
    sent = (source.numel() - counts[group.rank]) * source.element_size()
    entry = net.ledger.launched("exchange", group.name, sent, group.size)
    try:
        work = group.handle.alltoall_base(out, source, coming, counts)
    except RuntimeError as error:
        raise failure("exchange", group, net, error, net.deadline_seconds) from error
    return launched("exchange", group, net, work, entry, lambda: list(out.split(coming)))
