"""What messages between stages take: by a backend, or in memory of their host. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.comm.routes.message_buffers import whole_pages
from paceline.layout.pipeline.letter import HEAD_BYTES
from paceline.layout.pipeline.placed import AHEAD
from paceline.plan.rehearsal import LATE, Footprint
from paceline.schedule import Action, Table, after, before, on_the_way


def late_bytes(own: Sequence[Footprint]) -> int:
    """Of messages that the thread of a backend has not let go of.

    Args:
        own: the chunks of one rank.
    """
    return LATE * max(one.arriving + one.departing for one in own)


def buffer_bytes(own: Sequence[Footprint], table: Table, stage: int) -> int:
    """Of the most memory in which the messages of a stage may lie for its neighbours on one host.

    Args:
        own: the chunks of the stage.
    """
    sizes: dict[int, list[tuple[int, int]]] = {}
    for chunk, one in enumerate(own):
        action = Action("F", 0, chunk)
        if (goes := after(stage, action, table.num_stages, table.chunks)) is not None:
            sizes.setdefault(goes[0], []).append((one.departing, one.departing_evaluated))
        if (comes := before(stage, action, table.num_stages)) is not None:
            sizes.setdefault(comes[0], []).append((one.arriving, 0))
    return sum(
        _most(on_the_way(table, stage, to), *map(max, zip(*pairs, strict=True)))
        for to, pairs in sizes.items()
    )


def _most(count: int, trained: int, evaluated: int) -> int:
    """Of buffers for so many messages of a step, and for those of an evaluation."""
    few = AHEAD + 1 if evaluated else 0
    return few * _buffer(max(trained, evaluated)) + max(0, count - few) * _buffer(trained)


def _buffer(num_bytes: int) -> int:
    return whole_pages(HEAD_BYTES + num_bytes)
