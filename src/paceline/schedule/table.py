"""What a schedule is: for every stage, in which order it runs which operation of which micro-batch.

A rank runs one stage, or several chunks of the model: chunk c of rank r is number c P + r of all v P chunks,
which follow each other in the model. A stage may run a micro-batch in parts, by its samples; its neighbours
may run it in more, or in fewer. Pure values, without torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

Place = tuple[int, int, int]
"""Micro-batch, chunk and part."""


class Action(NamedTuple):
    """One operation on one micro-batch; what it needs is received before it, what it makes is sent after it.

    Args:
        kind: "F" forward; "B" backward; "W" gradients of weights. Where a stage has a W of the same
            micro-batch and chunk, its B makes the gradients of what came in only.
        micro_batch: counted from 0 in a step, on every rank of a replica alike.
        chunk: which of the rank's chunks.
        part: which of the parts in which the stage runs a micro-batch.
    """

    kind: str
    micro_batch: int
    chunk: int = 0
    part: int = 0

    @property
    def place(self) -> Place:
        """Micro-batch, chunk and part: what a forward and its backward have in common."""
        return self.micro_batch, self.chunk, self.part

    def ends(self, split: Collection[Place]) -> bool:
        """Whether it is the last of its micro-batch there, if these backwards are split."""
        return self.kind == "W" or (self.kind == "B" and self.place not in split)


@dataclass(frozen=True)
class Table:
    """A schedule.

    Args:
        orders: by stage, what it does one after another.
        chunks: how many chunks of the model each stage has.
    """

    orders: Sequence[Sequence[Action]]
    chunks: int = 1

    @property
    def num_stages(self) -> int:
        """Ranks of a pipeline."""
        return len(self.orders)

    @property
    def num_micro_batches(self) -> int:
        """In a step."""
        return 1 + max((action.micro_batch for order in self.orders for action in order), default=-1)

    @property
    def parts(self) -> list[int]:
        """By stage, in how many parts it runs each micro-batch."""
        return [1 + max((action.part for action in order), default=0) for order in self.orders]

    @property
    def splits(self) -> bool:
        """Whether a backward is split into the gradients of inputs and those of weights."""
        return any(action.kind == "W" for order in self.orders for action in order)

    def first(self, num_micro_batches: int) -> Table:
        """The same for fewer micro-batches: whatever waits for whom is inside one micro-batch."""
        kept = [[a for a in order if a.micro_batch < num_micro_batches] for order in self.orders]
        return Table(kept, self.chunks)


MakeTable = Callable[..., Table]
"""From numbers of stages and of micro-batches; and what stands behind the colon of its word, if anything."""


def before(stage: int, action: Action, num_stages: int) -> tuple[int, Action] | None:
    """Stage and forward whose result a forward needs; None: it is the first."""
    if stage > 0:
        return stage - 1, action
    return (num_stages - 1, action._replace(chunk=action.chunk - 1)) if action.chunk else None


def after(stage: int, action: Action, num_stages: int, chunks: int) -> tuple[int, Action] | None:
    """Stage and backward whose result a backward needs; None: it is the last chunk's."""
    if stage < num_stages - 1:
        return stage + 1, action
    return (0, action._replace(chunk=action.chunk + 1)) if action.chunk < chunks - 1 else None


def arrivals(table: Table, stage: int) -> Mapping[int, int]:
    """By neighbour, how many messages it sends; nothing where there are parts, which may be empty."""
    if max(table.parts) > 1:
        return {}
    sources = {
        "F": lambda action: before(stage, action, table.num_stages),
        "B": lambda action: after(stage, action, table.num_stages, table.chunks),
    }
    found = [sources[action.kind](action) for action in table.orders[stage] if action.kind in sources]
    return Counter(source[0] for source in found if source is not None)


def on_the_way(table: Table, stage: int, to: int) -> int:
    """The most messages of one stage that another may not have taken yet; the order of both says so.

    Forwards of which no gradient has come back, and gradients of forwards that the other has not followed up.
    """
    own = table.parts[stage]
    return _most_open(table, stage, to, own) + _most_open(table, to, stage, own)


def _most_open(table: Table, stage: int, there: int, parts: int) -> int:
    """The most forwards of a stage that went on to another and whose backward has not been.

    Args:
        parts: in how many of a micro-batch they are counted.
    """
    open_places, most = set[Place](), 0
    for action in table.orders[stage]:
        then = after(stage, action, table.num_stages, table.chunks) if action.kind in ("F", "B") else None
        if then is None or then[0] != there:
            continue
        found = parts_within(action.part, table.parts[stage], parts)
        places = {action._replace(part=part).place for part in found}
        open_places = open_places | places if action.kind == "F" else open_places - places
        most = max(most, len(open_places))
    return most


def parts_within(part: int, own: int, theirs: int) -> range:
    """Which parts of a neighbour, who has so many, have samples of one of the own parts."""
    return range(part * theirs // own, -(-(part + 1) * theirs // own))


def samples_of(num_samples: int, parts: int, part: int) -> range:
    """The samples of a part. With fewer samples than parts the first are empty; the last never is."""
    return range(num_samples * part // parts, num_samples * (part + 1) // parts)


def fit_together(parts: Sequence[int]) -> bool:
    """Whether neighbours can join each other's parts, or divide them, by an integer."""
    return all(max(pair) % min(pair) == 0 for pair in pairwise(parts))
