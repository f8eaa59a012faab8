"""Text that all ranks must agree on, and bytes that all must have."""

from __future__ import annotations

import torch

from paceline.comm.net import Net
from paceline.mesh import Group


def share_text(text: str, group: Group, net: Net, device: torch.device, source: int = 0) -> str:
    """The text of the group's rank `source` on every rank. Wire: two small broadcasts."""
    data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    size = net.broadcast(torch.tensor([data.numel()], device=device), group, source).wait()
    buffer = data if group.rank == source else torch.zeros(int(size), dtype=torch.uint8, device=device)
    return bytes(net.broadcast(buffer, group, source).wait().tolist()).decode()


def gather_texts(text: str, group: Group, net: Net) -> list[str]:
    """Every rank's text, by rank. Wire: one ragged all_gather."""
    return [part.decode() for part in gather_bytes(text.encode(), group, net)]


def gather_bytes(data: bytes, group: Group, net: Net) -> list[bytes]:
    """Every rank's bytes, by rank; as many as it likes. Wire: one ragged all_gather."""
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return [part.cpu().numpy().tobytes() for part in net.all_gather(own, group).wait()]
