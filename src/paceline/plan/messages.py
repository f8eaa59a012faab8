"""What messages between stages take: by a backend, or in memory of their host. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod

from paceline.comm.routes.message_buffers import whole_pages
from paceline.layout.pipeline.letter import HEAD_BYTES
from paceline.layout.pipeline.placed import AHEAD
from paceline.mesh import AXES
from paceline.plan.rehearsal import LATE, Footprint
from paceline.schedule import Action, Table, after, before, on_the_way


def near_stages(degrees: Mapping[str, int], rank: int, ranks_per_host: int) -> set[int]:
    """Stages of a rank's pipeline that are on its host, its own too; ranks of a host follow each other.

    Args:
        degrees: size of each axis.
        ranks_per_host: 0: hosts do not count.
    """
    apart = prod(degrees[axis] for axis in AXES[AXES.index("pipeline") + 1 :])
    first_stage = rank - rank // apart % degrees["pipeline"] * apart
    first = rank - rank % max(1, ranks_per_host)
    here = range(first, first + ranks_per_host)
    return {stage for stage in range(degrees["pipeline"]) if first_stage + stage * apart in here}


def late_bytes(own: Sequence[Footprint], table: Table, stage: int, near: Collection[int]) -> int:
    """Of messages that the thread of a backend has not let go of, if it carries any.

    Args:
        own: the chunks of one rank.
        near: stages whose messages it does not carry.
    """
    is_used = not _sizes(own, table, stage).keys() <= {*near}
    return LATE * max(one.arriving + one.departing for one in own) if is_used else 0


def buffer_bytes(
    own: Sequence[Footprint], table: Table, stage: int, near: Collection[int], *, together: int = 1
) -> int:
    """Of the most memory in which the messages of a stage may lie for its neighbours on one host.

    Args:
        own: the chunks of the stage.
        near: the stages of its host.
        together: messages for each that the table names.
    """
    return sum(
        _most(together * on_the_way(table, stage, to), *map(max, zip(*pairs, strict=True)))
        for to, pairs in _sizes(own, table, stage).items()
        if to in near
    )


def _sizes(own: Sequence[Footprint], table: Table, stage: int) -> dict[int, list[tuple[int, int]]]:
    """By neighbour, bytes of a message in training and in an evaluation, by chunk."""
    sizes: dict[int, list[tuple[int, int]]] = {}
    for chunk, one in enumerate(own):
        action = Action("F", 0, chunk)
        if (goes := after(stage, action, table.num_stages, table.chunks)) is not None:
            sizes.setdefault(goes[0], []).append((one.departing, one.departing_evaluated))
        if (comes := before(stage, action, table.num_stages)) is not None:
            sizes.setdefault(comes[0], []).append((one.arriving, 0))
    return sizes


def _most(count: int, trained: int, evaluated: int) -> int:
    """Of buffers for so many messages of a step, and for those of an evaluation."""
    few = AHEAD + 1 if evaluated else 0
    return few * _buffer(max(trained, evaluated)) + max(0, count - few) * _buffer(trained)


def _buffer(num_bytes: int) -> int:
    return whole_pages(HEAD_BYTES + num_bytes)
