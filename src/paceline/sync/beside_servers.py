"""What servers and their workers keep, by the form in which pushes and tickets travel: closed forms. Pure.

How much of it are messages that wait, or come, at a time is a matter of time: these are planned as the most
that may be there. All else is there in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.comm.channel import copied_bytes, kept_bytes
from paceline.comm.reduction import cover
from paceline.comm.reduction.norm import squares_bytes
from paceline.data import split
from paceline.layout.sizes import bytes_of
from paceline.sync.memory import Asked, RuleMemory
from paceline.sync.touched_rows import compared_bytes


class Form(Protocol):
    """One for each kind of `Traffic` and `Pushes`."""

    def of_worker(self, asked: Asked) -> RuleMemory:
        """A worker keeps its ticket until the next has come, and has what it pushes a second time."""

    def of_server(self, asked: Asked, together: int) -> RuleMemory:
        """Of a server.

        Args:
            together: pushes that make an update; of several a sum is made.
        """


def memory_beside_servers(asked: Asked, together: int, form: Form) -> RuleMemory:
    """What a rank keeps; the first ranks serve.

    Args:
        together: see `Form.of_server`.
    """
    if asked.rank >= asked.recipe.strategy.servers:
        return form.of_worker(asked)
    return form.of_server(asked, together)


class AsTheyAre:
    """Parts are one sum each, and rows of large matrices are compared: `TouchedRows`, `AnyOrder`."""

    def of_worker(self, asked: Asked) -> RuleMemory:
        """See `Form`; a ticket comes, or what it pushes waits."""
        whole = asked.sizes.computes
        return RuleMemory(messages=whole, running=whole, agreement=whole, updates=False)

    def of_server(self, asked: Asked, together: int) -> RuleMemory:
        """See `Form`: of each worker a push, or a ticket that it has not taken.

        Gradients lie in the pushes that brought them, but for matrices of which less than half of the rows
        have come.
        """
        sizes, own, compared = asked.sizes, sizes_in(asked), _compared(asked)
        shared = (asked.recipe.strategy.servers - 1) * sizes.updates  # with each of the others, at a pause
        waits = num_workers(asked) * kept_bytes(own) + max(copied_bytes(own), shared)
        waits += sizes.computes - sizes.updates
        return RuleMemory(
            copies=compared,
            messages=waits + compared // 2,
            at_pushes=sizes.updates if together > 1 else 0,
            pushes=waits + together * compared // 2,
            trains=False,
        )


class ByNodes:
    """Parts are sums of nodes of the tree of additions: `TouchedRows`, `InTreeOrder`.

    Args:
        num_shards: of a step.
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards

    def of_worker(self, asked: Asked) -> RuleMemory:
        """See `Form`: nodes are pushed as they are summed, and what waits is a copy of them."""
        whole, nodes = asked.sizes.computes, max(self._nodes(asked))
        more, waits = (nodes - 1) * whole, nodes * whole
        return RuleMemory(
            messages=waits, running=whole, agreement=whole, at_pushes=more, pushes=waits, updates=False
        )

    def of_server(self, asked: Asked, together: int) -> RuleMemory:
        """See `Form`: all parts of a step wait, are added where they lie, and the sum is copied.

        The sums of before are there until it is measured, and the last push until the next was read.
        """
        whole, nodes = sizes_in(asked), self._nodes(asked)
        largest = max(one.updates.numel for one in asked.held.values() if one.updates is not None)
        pushed = [[size for size in whole for _ in range(n)] for n in nodes]
        waits = sum(kept_bytes(one) for one in pushed)
        return RuleMemory(
            copies=_compared(asked),
            messages=waits + max(sum(one) + copied_bytes(one) for one in pushed),
            at_pushes=asked.sizes.updates + squares_bytes(largest),
            pushes=waits,
            trains=False,
        )

    def _nodes(self, asked: Asked) -> list[int]:
        """How many make up each part; one where it is empty, for a ticket that waits."""
        workers = num_workers(asked)
        parts = (split(self._num_shards, workers, part) for part in range(workers))
        return [max(1, len(cover(part))) for part in parts]


def num_workers(asked: Asked) -> int:
    """All ranks that do not serve."""
    return asked.recipe.strategy.replicas or 1


def sizes_in(asked: Asked) -> Sequence[int]:
    """Bytes of each tensor that the rank updates."""
    own = (one.updates for one in asked.held.values())
    return [bytes_of(slot, asked.item_bytes) for slot in own if slot is not None]


def _compared(asked: Asked) -> int:
    own = [one.updates for one in asked.held.values() if one.updates is not None]
    return compared_bytes(own, asked.item_bytes)
