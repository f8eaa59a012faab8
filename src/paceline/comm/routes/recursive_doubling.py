"""The recursive doubling route: in round k a rank exchanges with the one whose number differs in bit k.

An all_reduce takes log2 P rounds with the whole buffer, so it is for small ones. Rows that are scattered or
gathered are halved or doubled in every round. If P is no power of two, each rank above the largest one sends
its values to a partner first, and gets its result last.
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
    """Recursive doubling: log2 P n values in log2 P rounds for an all_reduce; two rounds more if P is no
    power of two.
    """

    def all_reduce(self, messenger: RouteMessenger, x: Tensor) -> Tensor:
        """Exchange and add the whole buffer with one partner in every round."""
        core = power_of_two_below(messenger.size)
        if messenger.rank >= core:
            messenger.send(messenger.rank - core, x)
            return messenger.receive(messenger.rank - core, x)
        arrived = messenger.workspace.like("arrived", x)
        # The rank outside the core whose values this one adds, if there is one.
        extra = messenger.rank + core
        if extra < messenger.size:
            x += messenger.receive(extra, arrived)
        for bit in _powers_of_two(core):
            x += messenger.exchange(messenger.rank ^ bit, x, messenger.rank ^ bit, arrived)
        if extra < messenger.size:
            messenger.send(extra, x)
        return x

    def reduce_scatter(self, messenger: RouteMessenger, rows: Tensor) -> Tensor:
        """Send the half that the partner needs in every round (recursive halving)."""
        core, extra = power_of_two_below(messenger.size), messenger.rank + power_of_two_below(messenger.size)
        if messenger.rank >= core:
            messenger.send(messenger.rank - core, rows)
            return messenger.receive(messenger.rank - core, rows[messenger.rank])
        if extra < messenger.size:
            rows += messenger.receive(extra, messenger.workspace.like("arrived", rows))
        # From the highest bit down, so that the rows to keep are halved in every round.
        for bit in reversed(_powers_of_two(core)):
            partner = messenger.rank ^ bit
            keep, leaving = (
                _with_extra_ranks(_block(rank, bit), core, messenger.size)
                for rank in (messenger.rank, partner)
            )
            arrived = _row_buffer(messenger, "arrived", rows, len(keep))
            messenger.exchange(partner, _contiguous_rows(messenger, rows, leaving), partner, arrived)
            for row, other in zip(keep, arrived, strict=True):
                rows[row] += other
        if extra < messenger.size:
            messenger.send(extra, rows[extra])
        return rows[messenger.rank]

    def all_gather(self, messenger: RouteMessenger, rows: Tensor) -> Tensor:
        """Exchange all known rows with the partner; they double in every round."""
        core, extra = power_of_two_below(messenger.size), messenger.rank + power_of_two_below(messenger.size)
        if messenger.rank >= core:
            messenger.send(messenger.rank - core, rows[messenger.rank])
            return messenger.receive(messenger.rank - core, rows)
        if extra < messenger.size:
            messenger.receive(extra, rows[extra])
        for bit in _powers_of_two(core):
            partner = messenger.rank ^ bit
            known_rows, new_rows = (
                _with_extra_ranks(_block(rank, bit), core, messenger.size)
                for rank in (messenger.rank, partner)
            )
            arrived = _row_buffer(messenger, "arrived", rows, len(new_rows))
            messenger.exchange(partner, _contiguous_rows(messenger, rows, known_rows), partner, arrived)
            for row, other in zip(new_rows, arrived, strict=True):
                rows[row].copy_(other)
        if extra < messenger.size:
            messenger.send(extra, rows)
        return rows

    def broadcast(self, messenger: RouteMessenger, x: Tensor, source: int) -> Tensor:
        """Send to one more rank in every round."""
        index = (messenger.rank - source) % messenger.size
        for bit in _powers_of_two(1 << (messenger.size - 1).bit_length()):
            if index < bit and index + bit < messenger.size:
                messenger.send((messenger.rank + bit) % messenger.size, x)
            elif bit <= index < 2 * bit:
                messenger.receive((messenger.rank - bit) % messenger.size, x)
        return x

    def cost(self, op: str, size: int, rank: int, n: int, source: int = 0) -> MessageCost:
        """Return the closed form, for ranks of the core, ranks outside it, and ranks that have one as a
        partner.
        """
        core = power_of_two_below(size)
        rounds = core.bit_length() - 1
        outside = 2 if core < size else 0
        has_extra = rank + core < size
        if op == "broadcast":
            index = (rank - source) % size
            bits = _powers_of_two(1 << (size - 1).bit_length())
            return MessageCost(
                n * sum(index < bit and index + bit < size for bit in bits), (size - 1).bit_length()
            )
        if op == "all_reduce":
            sent = 1 if rank >= core else rounds + has_extra
        elif rank >= core:
            sent = size if op == "reduce_scatter" else 1
        # All rows but its own; the row of its extra rank is sent in the last round instead.
        elif op == "reduce_scatter":
            sent = size - 1 - has_extra + has_extra
        else:
            known = [len(_with_extra_ranks(_block(rank, bit), core, size)) for bit in _powers_of_two(core)]
            sent = sum(known) + (size if has_extra else 0)
        return MessageCost(sent * n, rounds + outside)


def _row_buffer(messenger: RouteMessenger, name: str, rows: Tensor, count: int) -> Tensor:
    """Return memory for `count` rows."""
    return messenger.workspace.take(name, (count, *rows.shape[1:]), rows.dtype, rows.device)


def _contiguous_rows(messenger: RouteMessenger, rows: Tensor, indices: Sequence[int]) -> Tensor:
    """Return some rows as one piece of memory: a view if they follow each other."""
    first, count = indices[0], len(indices)
    if [*indices] == [*range(first, first + count)]:
        return rows[first : first + count]
    return torch.stack([rows[index] for index in indices], out=_row_buffer(messenger, "leaving", rows, count))


def power_of_two_below(size: int) -> int:
    """Return the largest power of two that is not above the number of ranks."""
    return 1 << (size.bit_length() - 1)


def _powers_of_two(core: int) -> list[int]:
    """Return 1, 2, 4, ... below a power of two."""
    return [1 << k for k in range(core.bit_length() - 1)]


def _block(rank: int, bit: int) -> range:
    """Return the ranks that differ from this one only in bits below `bit`."""
    return range(rank // bit * bit, rank // bit * bit + bit)


def _with_extra_ranks(ranks: Sequence[int], core: int, size: int) -> list[int]:
    """Return the rows of some ranks, and of the ranks outside the core that have one of them as a partner."""
    return [*ranks, *(rank + core for rank in ranks if rank + core < size)]


def build_recursive_doubling(group: RankGroup, context: RouteContext) -> Collective:
    """Build the collective that exchanges messages between ranks whose numbers differ in one bit."""
    return build_message_route(group, context, "recursive-doubling", RecursiveDoublingRoute())
