"""What a schedule is: for every stage, in which order it runs which operation of which micro-batch.

A rank runs one stage, or several chunks of the model: chunk c of rank r is number c P + r of all v P chunks,
which follow each other in the model. Pure values, without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Action(NamedTuple):
    """One operation on one micro-batch; what it needs is received before it, what it makes is sent after it.

    Args:
        kind: "F" forward; "B" backward; "W" gradients of weights. Where a stage has a W of the same
            micro-batch and chunk, its B makes the gradients of what came in only.
        micro_batch: counted from 0 in a step, on every rank of a replica alike.
        chunk: which of the rank's chunks.
    """

    kind: str
    micro_batch: int
    chunk: int = 0


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
