"""Rows that ranks send each other by Gloo, in both directions of a link at once.

Gloo sends to a peer that has said that it receives. Its own all-to-all sends first: where a peer was earlier,
all that it is sent goes before the word that this rank receives. So one direction waits for the other, and
two ranks take twice as long as the link would. Here a rank says first what it receives.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import Tensor

_TAG = (1 << 31) - 1  # no route counts as far; tags of exchanges are those below it


class Rows:
    """What is under way, as the backend's own calls are; its end is seen where somebody waits for it."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works
        self._told: list[Callable[[Any], None]] = []

    def wait(self, timeout: timedelta) -> None:
        """Block until all rows are here and those of this rank are on their way.

        Raises:
            RuntimeError: it took longer, or a peer is gone.
        """
        end = time.monotonic() + timeout.total_seconds()
        try:
            while self._works:
                left = timedelta(seconds=max(0.001, end - time.monotonic()))
                self._works.pop().wait(left)
        finally:
            for tell in self._told:
                tell(self)

    def get_future(self) -> Rows:
        """Itself, as an end that can be waited for."""
        return self

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Tell somebody of the end."""
        self._told.append(callback)

    def is_completed(self) -> bool:
        """Whether somebody has waited; Gloo does not say before."""
        return not self._works


def exchange(process_group: Any, rank: int, x: Tensor, out: Tensor, tag: int = 0) -> Any:
    """Send row i of `x` [P, ...] to rank i, and fill row i of `out` with what that sent here.

    `tag`: of those that peers may launch in different orders; a backend without tags takes them as they come.
    """
    if x.device.type != "cpu":
        return process_group.alltoall_base(out, x, [], [])
    out[rank].copy_(x[rank])
    if out.numel() == 0:
        return Rows([])
    size = len(x)
    others = [(rank + step) % size for step in range(1, size)]
    works = [process_group.recv([out[source]], source, _TAG - tag) for source in reversed(others)]
    return Rows([*works, *(process_group.send([x[to]], to, _TAG - tag) for to in others)])


def exchange_others(process_group: Any, rank: int, x: Tensor, out: Tensor) -> Rows:
    """As `exchange` on the processor, without the own row: `out` has those of the others, in their order."""
    size = len(x)
    others = [(rank + step) % size for step in range(1, size)]
    places = [out[other - (other > rank)] for other in others]
    pairs = reversed([*zip(others, places, strict=True)])
    works = [process_group.recv([place], source, _TAG) for source, place in pairs]
    return Rows([*works, *(process_group.send([x[to]], to, _TAG) for to in others)])


def gather(process_group: Any, rank: int, x: Tensor, out: Tensor) -> Any:
    """Fill row i of `out` [P, ...] with what rank i has in `x`.

    Three ranks and more hand rows on around Gloo's ring: each receives from one and sends to another there,
    and a slow link between racks is crossed by every row once.
    """
    if len(out) != 2 or x.device.type != "cpu":
        return process_group._allgather_base(out.view(-1), x.view(-1))
    return exchange(process_group, rank, x.unsqueeze(0).expand(out.shape), out)
