"""Collectives that are made of those of the net: texts, lists of tensors, and parts of different sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.comm.handle import Handle
from paceline.comm.net import Net, collective_error, handle_of_work
from paceline.job.mesh import RankGroup

_COALESCED_BYTES = 2**24


def broadcast_coalesced(tensors: Sequence[Tensor], net: Net, group: RankGroup, source: int = 0) -> None:
    """Copy the values of the group's rank `source` into the tensors of every rank, in place; collective.

    Wire: one broadcast for each 16 MiB of a dtype.
    """
    _launch_coalesced(tensors, group, lambda flat: net.broadcast(flat, group, source))


def all_reduce_coalesced(tensors: Sequence[Tensor], net: Net, group: RankGroup) -> None:
    """Replace the tensors of every rank by their sums over the group, in place; collective.

    Wire: one all_reduce for each 16 MiB of a dtype.
    """
    _launch_coalesced(tensors, group, lambda flat: net.all_reduce(flat, group))


@torch.no_grad()
def _launch_coalesced(
    tensors: Sequence[Tensor], group: RankGroup, launch: Callable[[Tensor], Handle]
) -> None:
    for run in _coalesce_by_dtype(tensors) if group.size > 1 else ():
        # One buffer for the whole run: latency is paid once, not for each tensor.
        flat = launch(torch.cat([t.reshape(-1) for t in run])).wait()
        for t, values in zip(run, flat.split([t.numel() for t in run]), strict=True):
            t.copy_(values.view_as(t))


def _coalesce_by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors of one dtype into runs of about `_COALESCED_BYTES`."""
    runs: list[list[Tensor]] = []
    # A set of dtypes has no order of its own, and every rank has to launch the same runs.
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        filled = _COALESCED_BYTES
        for t in (t for t in tensors if t.dtype == dtype):
            if filled >= _COALESCED_BYTES:
                runs.append([])
                filled = 0
            runs[-1].append(t)
            filled += t.numel() * t.element_size()
    return runs


def broadcast_text(text: str, group: RankGroup, net: Net, device: torch.device, source: int = 0) -> str:
    """Return the text of the group's rank `source` on every rank. Wire: two small broadcasts."""
    data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    # The size goes first: the other ranks need a buffer of that length.
    size = net.broadcast(torch.tensor([data.numel()], device=device), group, source).wait()
    buffer = data if group.rank == source else torch.zeros(int(size), dtype=torch.uint8, device=device)
    return bytes(net.broadcast(buffer, group, source).wait().tolist()).decode()


def all_gather_texts(text: str, group: RankGroup, net: Net) -> list[str]:
    """Return every rank's text, by rank. Wire: one ragged all_gather."""
    return [encoded.decode() for encoded in all_gather_bytes(text.encode(), group, net)]


def all_gather_bytes(data: bytes, group: RankGroup, net: Net) -> list[bytes]:
    """Return every rank's bytes, by rank; lengths may differ. Wire: one ragged all_gather."""
    local_x = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    )
    return [x.cpu().numpy().tobytes() for x in net.all_gather(local_x, group).wait()]


def all_to_all_v(net: Net, parts: Sequence[Tensor], sizes: Sequence[int], group: RankGroup) -> Handle:
    """Send the flat `parts[i]` to rank i; the handle returns what each rank sent here, `sizes[i]` values.

    Parts may differ in size and be empty, and have one dtype. A ring sends to the next rank and receives from
    the one before in one such call, so there is no order of sends and receives that could deadlock.

    Wire: the bytes of all parts but this rank's own, 1 round.
    """
    if group.handle is None:
        return Handle.ready([x.clone() for x in parts])
    source = torch.cat([x.reshape(-1) for x in parts])
    out, counts, output_sizes = source.new_empty(sum(sizes)), [x.numel() for x in parts], list(sizes)
    sent = (source.numel() - counts[group.rank]) * source.element_size()
    entry = net.ledger.count_call("exchange", group.name, sent, group.size)
    try:
        work = group.handle.alltoall_base(out, source, output_sizes, counts)
    except RuntimeError as error:
        raise collective_error("exchange", group, net, error, net.deadline_seconds) from error
    return handle_of_work("exchange", group, net, work, entry, lambda: list(out.split(output_sizes)))
