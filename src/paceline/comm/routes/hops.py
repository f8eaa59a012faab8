"""What a route that sends messages is: the hops of each collective on one rank, and what they cost.

The hops block, and work on contiguous tensors. The costs are closed forms, written without the hops, so that
what the ledger counts can be held against them.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from paceline.comm.routes.mail import Mail


class Sent(NamedTuple):
    """What one rank sends in a collective, in values, and how many rounds of messages the slowest rank
    waits for.
    """

    num_values: int
    rounds: int


class Hops(Protocol):
    """The collectives of a route. `n` counts values: of `x`, of a row of `rows`, of what is broadcast."""

    def all_reduce(self, mail: Mail, x: Tensor) -> Tensor:
        """Sum `x` [n] in place."""

    def reduce_scatter(self, mail: Mail, rows: Tensor) -> Tensor:
        """The sum of row `mail.rank` of `rows` [P, n], in its place; the others may be changed."""

    def all_gather(self, mail: Mail, rows: Tensor) -> Tensor:
        """Fill in the rows of the other ranks, [P, n], in place."""

    def broadcast(self, mail: Mail, x: Tensor, source: int) -> Tensor:
        """Copy `x` [n] of `source`, in place."""

    def cost(self, op: str, size: int, rank: int, n: int, source: int = 0) -> Sent:
        """The closed form of a collective by its name."""


def exchange_rows(mail: Mail, rows: Tensor, out: Tensor) -> Tensor:
    """Send row i of `rows` [P, n] to rank i; what each rank sent here, in `out` [P, n]. P - 1 rounds, (P-1) n
    values.
    """
    out[mail.rank] = rows[mail.rank]
    for step in range(1, mail.size):
        to, source = (mail.rank + step) % mail.size, (mail.rank - step) % mail.size
        mail.exchange(to, rows[to], source, out[source])
    return out


def stretch(n: int, size: int, place: int) -> slice:
    """Which of n values are part `place` of `size`; parts differ by one value at most."""
    return slice(n * place // size, n * (place + 1) // size)


def length(n: int, size: int, place: int) -> int:
    """How many that are."""
    part = stretch(n, size, place)
    return int(part.stop) - int(part.start)
