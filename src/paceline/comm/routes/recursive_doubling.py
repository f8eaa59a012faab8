"""Recursive doubling: in round k a rank meets the one whose number differs in bit k.

An all_reduce takes log2 P rounds with the whole buffer, so it is for small ones. What is scattered or
gathered is halved or doubled in every round. Where P is no power of two, each rank above the largest one
hands its part to a partner first, and gets its result last.
Source: Thakur, Rabenseifner, Gropp 2005, Optimization of Collective Communication Operations in MPICH,
sections 4.1, 4.3 and 4.5 (recursive doubling, recursive halving, other numbers of processes).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.collectives.collective_protocol import Collective
from paceline.comm.routes.message_route import MessageCost, RouteMessenger, build_message_route
from paceline.comm.routes.route_context import RouteContext
from paceline.job.mesh import RankGroup


class RecursiveDoublingRoute:
    """log2 P n values in log2 P rounds for an all_reduce; two rounds more where P is no power of two."""

    def all_reduce(self, mail: RouteMessenger, x: Tensor) -> Tensor:
        """See `MessageRoute`."""
        core = power_of_two_below(mail.size)
        if mail.rank >= core:
            mail.send(mail.rank - core, x)
            return mail.receive(mail.rank - core, x)
        arrived = mail.workspace.like("arrived", x)
        extra = mail.rank + core
        if extra < mail.size:
            x += mail.receive(extra, arrived)
        for bit in _powers_of_two(core):
            x += mail.exchange(mail.rank ^ bit, x, mail.rank ^ bit, arrived)
        if extra < mail.size:
            mail.send(extra, x)
        return x

    def reduce_scatter(self, mail: RouteMessenger, rows: Tensor) -> Tensor:
        """See `MessageRoute`: the half that the other one wants leaves in every round."""
        core, extra = power_of_two_below(mail.size), mail.rank + power_of_two_below(mail.size)
        if mail.rank >= core:
            mail.send(mail.rank - core, rows)
            return mail.receive(mail.rank - core, rows[mail.rank])
        if extra < mail.size:
            rows += mail.receive(extra, mail.workspace.like("arrived", rows))
        for bit in reversed(_powers_of_two(core)):
            partner = mail.rank ^ bit
            keep, give = (
                _with_extra_ranks(_block(rank, bit), core, mail.size) for rank in (mail.rank, partner)
            )
            arrived = _row_buffer(mail, "arrived", rows, len(keep))
            mail.exchange(partner, _contiguous_rows(mail, rows, give), partner, arrived)
            for row, other in zip(keep, arrived, strict=True):
                rows[row] += other
        if extra < mail.size:
            mail.send(extra, rows[extra])
        return rows[mail.rank]

    def all_gather(self, mail: RouteMessenger, rows: Tensor) -> Tensor:
        """See `MessageRoute`: what is known doubles in every round."""
        core, extra = power_of_two_below(mail.size), mail.rank + power_of_two_below(mail.size)
        if mail.rank >= core:
            mail.send(mail.rank - core, rows[mail.rank])
            return mail.receive(mail.rank - core, rows)
        if extra < mail.size:
            mail.receive(extra, rows[extra])
        for bit in _powers_of_two(core):
            partner = mail.rank ^ bit
            mine, others = (
                _with_extra_ranks(_block(rank, bit), core, mail.size) for rank in (mail.rank, partner)
            )
            arrived = _row_buffer(mail, "arrived", rows, len(others))
            mail.exchange(partner, _contiguous_rows(mail, rows, mine), partner, arrived)
            for row, other in zip(others, arrived, strict=True):
                rows[row].copy_(other)
        if extra < mail.size:
            mail.send(extra, rows)
        return rows

    def broadcast(self, mail: RouteMessenger, x: Tensor, source: int) -> Tensor:
        """See `MessageRoute`: who has it gives it to one more in every round."""
        place = (mail.rank - source) % mail.size
        for bit in _powers_of_two(1 << (mail.size - 1).bit_length()):
            if place < bit and place + bit < mail.size:
                mail.send((mail.rank + bit) % mail.size, x)
            elif bit <= place < 2 * bit:
                mail.receive((mail.rank - bit) % mail.size, x)
        return x

    def cost(self, op: str, size: int, rank: int, n: int, source: int = 0) -> MessageCost:
        """See `MessageRoute`."""
        core = power_of_two_below(size)
        rounds = core.bit_length() - 1
        outside = 2 if core < size else 0
        has_extra = rank + core < size
        if op == "broadcast":
            place = (rank - source) % size
            bits = _powers_of_two(1 << (size - 1).bit_length())
            return MessageCost(
                n * sum(place < bit and place + bit < size for bit in bits), (size - 1).bit_length()
            )
        if op == "all_reduce":
            sent = 1 if rank >= core else rounds + has_extra
        elif rank >= core:
            sent = size if op == "reduce_scatter" else 1
        elif op == "reduce_scatter":  # all rows but its own, and that of its extra rank
            sent = size - 1 - has_extra + has_extra
        else:
            known = [len(_with_extra_ranks(_block(rank, bit), core, size)) for bit in _powers_of_two(core)]
            sent = sum(known) + (size if has_extra else 0)
        return MessageCost(sent * n, rounds + outside)


def _row_buffer(mail: RouteMessenger, name: str, rows: Tensor, count: int) -> Tensor:
    """Memory for so many rows."""
    return mail.workspace.take(name, (count, *rows.shape[1:]), rows.dtype, rows.device)


def _contiguous_rows(mail: RouteMessenger, rows: Tensor, places: Sequence[int]) -> Tensor:
    """Some rows as one piece of memory: where they lie, if they follow each other."""
    first, count = places[0], len(places)
    if [*places] == [*range(first, first + count)]:
        return rows[first : first + count]
    return torch.stack([rows[place] for place in places], out=_row_buffer(mail, "leaving", rows, count))


def power_of_two_below(size: int) -> int:
    """The largest power of two that is not above the number of ranks."""
    return 1 << (size.bit_length() - 1)


def _powers_of_two(core: int) -> list[int]:
    """1, 2, 4, ... below a power of two."""
    return [1 << k for k in range(core.bit_length() - 1)]


def _block(rank: int, bit: int) -> range:
    """The ranks that differ from this one in bits below `bit`."""
    return range(rank // bit * bit, rank // bit * bit + bit)


def _with_extra_ranks(ranks: Sequence[int], core: int, size: int) -> list[int]:
    """The rows of some ranks and of those outside whom they stand for."""
    return [*ranks, *(rank + core for rank in ranks if rank + core < size)]


def build_recursive_doubling(group: RankGroup, context: RouteContext) -> Collective:
    """Messages between ranks whose numbers differ in one bit."""
    return build_message_route(group, context, "recursive-doubling", RecursiveDoublingRoute())
