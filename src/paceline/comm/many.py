"""Collectives of many tensors: those of one type travel together, in few messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.comm.handle import Handle
from paceline.comm.net import Net
from paceline.mesh import Group

_RUN_BYTES = 2**24


def give_all(tensors: Sequence[Tensor], net: Net, group: Group, source: int = 0) -> None:
    """Every rank takes over the values of one rank of the group, in place; collective.

    Wire: one broadcast for each 16 MiB of a type.
    """
    _together(tensors, group, lambda flat: net.broadcast(flat, group, source))


def sum_all(tensors: Sequence[Tensor], net: Net, group: Group) -> None:
    """Every rank has the sums over the group, in place; collective.

    Wire: one all_reduce for each 16 MiB of a type.
    """
    _together(tensors, group, lambda flat: net.all_reduce(flat, group))


@torch.no_grad()
def _together(tensors: Sequence[Tensor], group: Group, launch: Callable[[Tensor], Handle]) -> None:
    for alike in _in_runs(tensors) if group.size > 1 else ():
        flat = launch(torch.cat([t.reshape(-1) for t in alike])).wait()
        for t, piece in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
            t.copy_(piece.view_as(t))


def _in_runs(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors of one type together, as many as make up some megabytes."""
    found: list[list[Tensor]] = []
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        filled = _RUN_BYTES
        for t in (t for t in tensors if t.dtype == dtype):
            if filled >= _RUN_BYTES:
                found.append([])
                filled = 0
            found[-1].append(t)
            filled += t.numel() * t.element_size()
    return found
