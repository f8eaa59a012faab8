"""What a route of messages takes for itself: its own hops are gone through, on tensors without memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from paceline.comm import Net
from paceline.comm.routes.hops import Hops
from paceline.comm.routes.mail import Mail
from paceline.comm.workspace import Workspace
from paceline.plan.paths import Buffer, Path
from paceline.recipe import Recipe
from paceline.recipe.specs import imported

_NOWHERE = torch.device("meta")


class _NoMail(Mail):
    """Nobody sends anything."""

    def send(self, to: int, x: Tensor) -> None:
        """See `Mail`."""

    def receive(self, source: int, out: Tensor) -> Tensor:
        """See `Mail`."""
        return out

    def exchange(self, to: int, x: Tensor, source: int, out: Tensor) -> Tensor:
        """See `Mail`."""
        return out


def hop_bytes(recipe: Recipe, path: Path, *, common: bool) -> int:
    """What the thread of a path keeps whose values travel as they are, on the rank that keeps most.

    Which of several hops a path takes is measured; the most that any takes is kept then.

    Args:
        recipe: its strategy has its replicas filled in.
        common: all ranks run on one host.
    """
    route = recipe.strategy.path
    if path.group.size == 1 or recipe.is_ordered or (route.in_memory and common):
        return 0
    routes: list[Hops] = [imported(place)() for place in route.hops]
    return max((kept_bytes(routes, path, rank) for rank in some_ranks(path.group.size)), default=0)


def some_ranks(size: int) -> list[int]:
    """Ranks among which one keeps as much as any: the ends, and the first of each half of a half."""
    return sorted({0, size - 1, *(1 << k for k in range((size - 1).bit_length()))})


def kept_bytes(routes: Iterable[Hops], path: Path, rank: int) -> int:
    """By one thread, which has one memory for all, as large as the largest buffer needs it."""
    largest = {one.dtype: one for one in sorted(path.buffers, key=lambda one: one.num_values)}
    workspace = Workspace()
    mail = _NoMail(Net(), path.group, 0, range(path.group.size), rank, workspace)
    for hops in routes:
        for buffer in largest.values():
            _go(hops, mail, path, buffer)
    return workspace.num_bytes


def _go(hops: Hops, mail: Mail, path: Path, buffer: Buffer) -> None:
    x = torch.empty(buffer.num_values, dtype=buffer.dtype, device=_NOWHERE)
    if path.does == "sum":
        hops.all_reduce(mail, x)
    else:
        (hops.reduce_scatter if path.does == "scatter" else hops.all_gather)(mail, x.view(mail.size, -1))
