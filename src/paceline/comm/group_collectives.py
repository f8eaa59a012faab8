"""Collectives of many tensors: those of one type travel together, in few messages.

Text that all ranks must agree on, and bytes that all must have.

Every rank sends every other some values, of any number: what a ring and an all-to-all are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.comm.handle import Handle
from paceline.comm.net import Net, collective_error, handle_of_work
from paceline.job.mesh import RankGroup

_COALESCED_BYTES = 2**24


def broadcast_coalesced(tensors: Sequence[Tensor], net: Net, group: RankGroup, source: int = 0) -> None:
    """Every rank takes over the values of one rank of the group, in place; collective.

    Wire: one broadcast for each 16 MiB of a type.
    """
    _launch_coalesced(tensors, group, lambda flat: net.broadcast(flat, group, source))


def all_reduce_coalesced(tensors: Sequence[Tensor], net: Net, group: RankGroup) -> None:
    """Every rank has the sums over the group, in place; collective.

    Wire: one all_reduce for each 16 MiB of a type.
    """
    _launch_coalesced(tensors, group, lambda flat: net.all_reduce(flat, group))


@torch.no_grad()
def _launch_coalesced(
    tensors: Sequence[Tensor], group: RankGroup, launch: Callable[[Tensor], Handle]
) -> None:
    for alike in _coalesce_by_dtype(tensors) if group.size > 1 else ():
        flat = launch(torch.cat([t.reshape(-1) for t in alike])).wait()
        for t, piece in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
            t.copy_(piece.view_as(t))


def _coalesce_by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors of one type together, as many as make up some megabytes."""
    found: list[list[Tensor]] = []
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        filled = _COALESCED_BYTES
        for t in (t for t in tensors if t.dtype == dtype):
            if filled >= _COALESCED_BYTES:
                found.append([])
                filled = 0
            found[-1].append(t)
            filled += t.numel() * t.element_size()
    return found


def broadcast_text(text: str, group: RankGroup, net: Net, device: torch.device, source: int = 0) -> str:
    """The text of the group's rank `source` on every rank. Wire: two small broadcasts."""
    data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    size = net.broadcast(torch.tensor([data.numel()], device=device), group, source).wait()
    buffer = data if group.rank == source else torch.zeros(int(size), dtype=torch.uint8, device=device)
    return bytes(net.broadcast(buffer, group, source).wait().tolist()).decode()


def all_gather_texts(text: str, group: RankGroup, net: Net) -> list[str]:
    """Every rank's text, by rank. Wire: one ragged all_gather."""
    return [part.decode() for part in all_gather_bytes(text.encode(), group, net)]


def all_gather_bytes(data: bytes, group: RankGroup, net: Net) -> list[bytes]:
    """Every rank's bytes, by rank; as many as it likes. Wire: one ragged all_gather."""
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return [part.cpu().numpy().tobytes() for part in net.all_gather(own, group).wait()]


def all_to_all_v(net: Net, parts: Sequence[Tensor], sizes: Sequence[int], group: RankGroup) -> Handle:
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
    entry = net.ledger.count_call("exchange", group.name, sent, group.size)
    try:
        work = group.handle.alltoall_base(out, source, coming, counts)
    except RuntimeError as error:
        raise collective_error("exchange", group, net, error, net.deadline_seconds) from error
    return handle_of_work("exchange", group, net, work, entry, lambda: list(out.split(coming)))
