"""The moments of a step at which a rank may have most in memory. Pure.

A stage works through its row of the schedule: a forward adds what it keeps, a backward takes it away while
gradients come. What is most depends on the place of every micro-batch, so the row is gone through as in a
run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from paceline.pipeline_schedule.schedule_table import PipelineAction
from paceline.plan.activation_memory import MicroBatchFootprint
from paceline.plan.memory_plan import MemoryByKind
from paceline.plan.zero_memory import GradientSumMemory


@dataclass(frozen=True)
class StepWork:
    """What a rank does in a step.

    Args:
        order: its operations.
        footprints: by chunk, of what the stage runs at a time: a micro-batch, or a part of one.
        gradients: bytes of all gradients of a chunk, by chunk.
        messages: bytes of larger parts that neighbours have sent, beside the own part of them, and of what
            the thread of a backend has not let go of.
    """

    order: Sequence[PipelineAction]
    footprints: Sequence[MicroBatchFootprint]
    gradients: Sequence[int]
    messages: int = 0

    @property
    def evaluation(self) -> int:
        """Bytes of a forward in an evaluation."""
        return max(one.evaluation for one in self.footprints)


@dataclass(frozen=True)
class MemoryInstant:
    """A moment while micro-batches run.

    Args:
        parts: bytes.
        chunk, place: which is at work, and where in it; see `paceline.plan.activation_memory`.
        flying: by chunk, other micro-batches, or parts, whose activations are kept.
    """

    parts: MemoryByKind
    chunk: int
    place: int
    flying: tuple[int, ...]


class StepWalk:
    """A stage on its way through a step.

    Args:
        still: what stays during a step.
        sums: how its gradients come to be sums.
        work: what it does.
    """

    def __init__(self, still: MemoryByKind, sums: GradientSumMemory, work: StepWork) -> None:
        late = max(one.passed for one in work.footprints) + work.messages
        self._still, self._sums, self._work = replace(still, wire=still.wire + late), sums, work
        self._split = {a.place for a in work.order if a.kind == "W"}
        self._last_part = max(a.part for a in work.order)
        self._last = {a.chunk: a for a in work.order if a.kind != "F"}
        self._flying, self._ended = [0] * len(work.footprints), [0] * len(work.footprints)
        self._begun = [False] * len(work.footprints)  # some parts of a micro-batch have added gradients

    def instants(self) -> Iterator[MemoryInstant]:
        """All that may be the largest."""
        yield MemoryInstant(self._still, 0, 0, tuple(self._flying))
        for action in self._work.order:
            yield from self._forward(action) if action.kind == "F" else self._backward(action)

    def most(self) -> MemoryByKind:
        """What is the largest."""
        return self.largest().parts

    def largest(self) -> MemoryInstant:
        """The moment of that."""
        return max(self.instants(), key=lambda one: one.parts.total)

    def _kept(self) -> int:
        return sum(n * one.kept for n, one in zip(self._flying, self._work.footprints, strict=True))

    def _forward(self, action: PipelineAction) -> Iterator[MemoryInstant]:
        number, chunk = action.chunk, self._work.footprints[action.chunk]
        grads = sum(self._gradients(k) for k in range(len(self._ended))) + self._sums.own
        still = self._with_scatters(sum(self._ended), 0)
        for place, alive in chunk.forward.items():
            parts = replace(still, activations=self._kept() + alive, gradients=grads)
            yield MemoryInstant(parts, number, place, tuple(self._flying))
        self._flying[number] += 1

    def _backward(self, action: PipelineAction) -> Iterator[MemoryInstant]:
        """While gradients grow, those of this chunk go over from what there was to what there will be."""
        number, learns = action.chunk, self._sums.learns and not self._ended[action.chunk]
        chunk, total = self._work.footprints[number], self._work.gradients[number]
        ends = action.ends(self._split)
        completes = ends and action.part == self._last_part
        others = self._sums.own + sum(self._gradients(k) for k in range(len(self._ended)) if k != number)
        before = self._gradients_stand(number)
        after = self._standing(self._ended[number] + completes) if completes == ends and not learns else 1
        moved = self._sums.moved if action == self._last[number] else 0
        self._flying[number] -= 1
        at_end = self._sums.at_end
        for place, done, gone, alive in _backward_samples(chunk, adds=before > 0, at_end=learns or at_end):
            grads = before * total + done if at_end else before * (total - gone) + after * gone
            still = self._still if learns else self._with_scatters(sum(self._ended), done)
            parts = replace(
                still,
                activations=self._kept() + alive,
                gradients=others + grads,
                wire=still.wire + moved * done + (self._sums.learning if learns and done == total else 0),
            )
            yield MemoryInstant(parts, number, place, tuple(self._flying))
        self._flying[number] += 0 if ends else 1
        self._ended[number] += completes
        self._begun[number] = ends and not completes

    def _with_scatters(self, micro_batch: int, done: int) -> MemoryByKind:
        """What stays, and what scatters take with so many bytes of gradients complete."""
        return replace(self._still, wire=self._still.wire + self._sums.on_the_way(micro_batch, done))

    def _gradients(self, chunk: int) -> int:
        return self._gradients_stand(chunk) * self._work.gradients[chunk]

    def _gradients_stand(self, chunk: int) -> int:
        """How many times they are there now."""
        return self._standing(self._ended[chunk]) or int(self._begun[chunk])

    def _standing(self, ended: int) -> int:
        """How many times the gradients of a chunk are there after so many of its backwards."""
        waiting = self._sums.waiting
        if ended and waiting:
            return waiting[min(ended, len(waiting)) - 1]
        return int(ended > 0 and not self._sums.leaves)


def _backward_samples(
    chunk: MicroBatchFootprint, *, adds: bool, at_end: bool
) -> Iterator[tuple[int, int, int, int]]:
    """Of a backward: place, bytes of gradients that are complete, of those that were let go of, bytes alive.

    Args:
        adds: to gradients that were there; else they are new.
        at_end: nothing is let go of before the end.
    """
    yield from ((place, done, done, alive) for (place, done), alive in chunk.backward.items())
    for (place, done), (alive, size) in ({} if at_end else chunk.handed).items():
        yield place, done, done - size, alive + (0 if adds else size)


def update_memory(still: MemoryByKind, sums: GradientSumMemory, taken: int, arriving: int) -> MemoryByKind:
    """While the optimizer works, and parameters are gathered after it.

    Args:
        taken: what the optimizer takes for itself.
        arriving: what Gloo takes for itself in gathers (ZeRO 1 and 2).
    """
    return replace(still, gradients=sums.stays + sums.own, activations=max(taken, arriving))


def first_step_sums(sums: GradientSumMemory) -> GradientSumMemory:
    """In the first backward nobody knows yet when a gradient is complete: all leave at its end."""
    if sums.waiting:
        return sums if sums.moved else replace(sums, waiting=[1] * len(sums.waiting))
    return replace(sums, learns=sums.leaves)


def agreement_memory(
    still: MemoryByKind, sums: GradientSumMemory, work: StepWork, taken: int
) -> MemoryByKind:
    """Between two rounds of replicas that train alone.

    Args:
        work: whose last messages inside a replica a backend may not have let go of.
        taken: what they take for themselves.
    """
    late = max(one.passed for one in work.footprints)
    grads = sums.stays + sums.own
    return replace(still, gathered=0, gradients=grads, activations=taken, wire=still.wire + late)
