"""The moments of a step at which a rank may have most in memory. Pure.

A stage works through its row of the schedule: a forward adds what it keeps, a backward takes it away while
gradients come. What is most depends on the place of every micro-batch, so the row is gone through as in a
run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from paceline.plan.forms import GATHERED_TOGETHER, Sizes, Sums, carried_in_a_gather
from paceline.plan.parts import Parts
from paceline.plan.rehearsal import Footprint
from paceline.schedule import Action


@dataclass(frozen=True)
class Work:
    """What a rank does in a step.

    Args:
        order: its operations.
        footprints: by chunk.
        gradients: bytes of all gradients of a chunk, by chunk.
    """

    order: Sequence[Action]
    footprints: Sequence[Footprint]
    gradients: Sequence[int]

    @property
    def evaluation(self) -> int:
        """Bytes of a forward in an evaluation."""
        return max(one.evaluation for one in self.footprints)


def in_backward(still: Parts, sums: Sums, work: Work) -> Parts:
    """The most while micro-batches run.

    Args:
        still: what stays during a step.
    """
    return max(_Walk(still, sums, work).moments(), key=lambda parts: parts.total)


class _Walk:
    """A stage on its way through a step.

    Args:
        still, sums, work: see `in_backward`.
    """

    def __init__(self, still: Parts, sums: Sums, work: Work) -> None:
        late = max(one.passed for one in work.footprints)
        self._still, self._sums, self._work = replace(still, wire=still.wire + late), sums, work
        self._split = {(a.micro_batch, a.chunk) for a in work.order if a.kind == "W"}
        self._last = {a.chunk: a for a in work.order if a.kind != "F"}
        self._flying, self._ended = 0, [0] * len(work.footprints)

    def moments(self) -> Iterator[Parts]:
        """All that may be the largest."""
        yield self._still
        for action in self._work.order:
            if action.kind == "F":
                yield self._forward(action)
            else:
                yield from self._backward(action)

    def _forward(self, action: Action) -> Parts:
        chunk = self._work.footprints[action.chunk]
        alive, self._flying = self._flying + chunk.forward, self._flying + chunk.kept
        grads = sum(self._gradients(k) for k in range(len(self._ended)))
        return replace(self._still, activations=alive, gradients=grads + self._sums.own)

    def _backward(self, action: Action) -> Iterator[Parts]:
        """While gradients grow, those of this chunk go over from what there was to what there will be."""
        number, still = action.chunk, self._still
        chunk, total = self._work.footprints[number], self._work.gradients[number]
        ends = action.kind == "W" or (action.micro_batch, number) not in self._split
        others = self._sums.own + sum(self._gradients(k) for k in range(len(self._ended)) if k != number)
        before, after = (self._standing(self._ended[number] + more) for more in (0, int(ends)))
        moved = self._sums.moved if action == self._last[number] else 0
        for done, alive in chunk.backward.items():
            yield replace(
                still,
                activations=self._flying - chunk.kept + alive,
                gradients=others + before * (total - done) + after * done,
                wire=still.wire + moved * done,
            )
        self._flying -= chunk.kept if ends else 0
        self._ended[number] += ends

    def _gradients(self, chunk: int) -> int:
        return self._standing(self._ended[chunk]) * self._work.gradients[chunk]

    def _standing(self, ended: int) -> int:
        """How many times the gradients of a chunk are there after so many of its backwards."""
        waiting = self._sums.waiting
        if ended and waiting:
            return waiting[min(ended, len(waiting)) - 1]
        return int(ended > 0 and not self._sums.leaves)


def in_update(still: Parts, sums: Sums, sizes: Sizes, taken: int, *, sharers: int, common: bool) -> Parts:
    """While the optimizer works, and parameters are gathered after it.

    Args:
        taken: what the optimizer takes for itself.
        sharers: whose parameters come then (ZeRO 1 and 2).
        common: in memory of their host: there are a buffer for all, the own row there, and what came. Else
            Gloo carries them, which has not let go of what moved gradients.
    """
    together = min(sizes.computes, GATHERED_TOGETHER + sizes.largest)
    carried = 1 + 1 / sharers if common else carried_in_a_gather(sharers)
    arriving = int((1 + carried) * together) if sharers > 1 else 0
    late = sums.moved * sizes.computes if sharers > 1 and not common else 0
    grads = sums.stays + sums.own
    return replace(still, gradients=grads, activations=max(taken, arriving), wire=still.wire + late)


def first_step(sums: Sums) -> Sums:
    """In the first step nobody knows yet when a gradient is complete: all leave at the end of a backward."""
    return replace(sums, leaves=False)
