"""What a replica that gossips keeps: whose turn it is, which halves are to come, what it has of the sum.

No wire. Invariant: halves are taken once; over all replicas and messages the weights add up to their number.
Source: Assran et al. 2019, Stochastic Gradient Push, arXiv:1811.10792, Algorithm 2 (push-sum).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.errors import CommunicationError


def partner(rank: int, clock: int, size: int) -> int | None:
    """Whom a rank swaps with; every other in turn; None: of an odd number one rests. Pure.

    Source: the circle method of round-robin tournaments.
    """
    last = size + size % 2 - 1
    turn = clock % turn_clocks(size)
    if rank == last:
        other = turn * ((last + 1) // 2) % last
    else:
        other = (turn - rank) % last
        other = last if other == rank else other
    return other if other < size else None


def turn_clocks(size: int) -> int:
    """Clocks in which every rank meets every other, once. Pure."""
    return max(1, size + size % 2 - 1)


class Mailbox:
    """Which halves are still to come to a rank; pure.

    Args:
        bound: S, the clocks that one may be late.
    """

    def __init__(self, rank: int, size: int, bound: int) -> None:
        self._rank, self._size, self._bound = rank, size, bound
        self._missing: set[int] = set()  # clocks
        self._reached = 0

    def begin(self, clock: int) -> None:
        """A round begins: nothing is under way."""
        self._missing, self._reached = set(), clock

    def reach(self, clock: int) -> None:
        """This rank is about to begin a clock: what was sent at those before it may come."""
        for one in range(self._reached, clock):
            if partner(self._rank, one, self._size) is not None:
                self._missing.add(one)
        self._reached = clock

    def is_early(self, clock: int) -> bool:
        """Whether a half is of a clock that this rank has not made itself."""
        return clock >= self._reached

    def take(self, clock: int) -> int:
        """The half of a clock is added; returns how many clocks late.

        Raises:
            CommunicationError: it was added before.
        """
        if clock not in self._missing:
            raise CommunicationError(
                f"rank {self._rank} was given its half of clock {clock} twice",
                next_step="this is a mistake of the rule, not of the recipe: please report it",
            )
        self._missing.remove(clock)
        return self._reached - 1 - clock

    def is_due(self, late: int | None = None) -> bool:
        """Whether one has to come before this rank goes on.

        Args:
            late: how late one may be; None: as late as the bound says.
        """
        allowed = self._bound if late is None else late
        return any(clock < self._reached - allowed for clock in self._missing)


class Purse:
    """A sum of parameters and its weight.

    Args:
        params: what this rank computes with; set to sum / weight by `spend`.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = list(params)
        self.sums: list[Tensor] = []
        self.weight = 1.0
        self.fill()

    @torch.no_grad()
    def fill(self) -> None:
        """Begin with the parameters as they are."""
        self.sums, self.weight = [p.detach().clone() for p in self._params], 1.0

    @torch.no_grad()
    def spend(self) -> list[Tensor]:
        """Let the rank compute with the mean; returns it."""
        torch._foreach_copy_(self._params, torch._foreach_div(self.sums, self.weight))
        return [p.detach().clone() for p in self._params]

    @torch.no_grad()
    def move(self, before: Sequence[Tensor]) -> None:
        """Add what the parameters have moved since; where nothing is under way, these are the sum."""
        if self.weight == 1.0:
            torch._foreach_copy_(self.sums, self._params)
            return
        torch._foreach_add_(self.sums, torch._foreach_sub([p.detach() for p in self._params], list(before)))

    @torch.no_grad()
    def halve(self) -> None:
        """Keep a half; the other one is what is left, and has the same values."""
        torch._foreach_mul_(self.sums, 0.5)
        self.weight /= 2

    @torch.no_grad()
    def add(self, sums: Sequence[Tensor], weight: float) -> None:
        """Take somebody's half."""
        torch._foreach_add_(self.sums, [mine.to(x.device) for mine, x in zip(sums, self.sums, strict=True)])
        self.weight += weight
