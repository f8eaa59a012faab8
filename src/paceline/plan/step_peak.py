"""The moments of a step at which a rank can need most memory; pure.

A stage works through its row of the schedule table: a forward adds the activations that it keeps, a backward
frees them while gradients grow. The peak depends on the order of micro-batches, so the row is walked as in a
run, and every position in every layer is a moment.
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
    """The work of a rank in a step.

    Args:
        order: operations in their order.
        footprints: footprint of a micro-batch, or of a part of one (`rechunk`), by chunk.
        gradients: bytes of all gradients of a chunk, by chunk.
        messages: bytes of messages from neighbours beyond the present part, and of messages that the thread
            of a backend frees late.
    """

    order: Sequence[PipelineAction]
    footprints: Sequence[MicroBatchFootprint]
    gradients: Sequence[int]
    messages: int = 0

    @property
    def evaluation(self) -> int:
        """Return the bytes of a forward in an evaluation."""
        return max(footprint.evaluation for footprint in self.footprints)


@dataclass(frozen=True)
class MemoryInstant:
    """A moment while micro-batches run.

    Args:
        memory: bytes at this moment.
        chunk, position: chunk that runs, and position in it (see `activation_memory`).
        in_flight: number of other micro-batches, or parts, whose activations are kept, by chunk.
    """

    memory: MemoryByKind
    chunk: int
    position: int
    in_flight: tuple[int, ...]


class StepWalk:
    """The walk of a rank through the moments of a step.

    Args:
        steady: memory that stays during the step.
        sums: memory of the reduction of its gradients.
        work: operations of the step.
    """

    def __init__(self, steady: MemoryByKind, sums: GradientSumMemory, work: StepWork) -> None:
        late = max(footprint.passed for footprint in work.footprints) + work.messages
        self._steady, self._sums, self._work = replace(steady, wire=steady.wire + late), sums, work
        self._split = {a.place for a in work.order if a.kind == "W"}
        self._last_part = max(a.part for a in work.order)
        self._last = {a.chunk: a for a in work.order if a.kind != "F"}
        self._in_flight, self._ended = [0] * len(work.footprints), [0] * len(work.footprints)
        # Under rechunk, some parts of a micro-batch have already added gradients.
        self._begun = [False] * len(work.footprints)

    def instants(self) -> Iterator[MemoryInstant]:
        """Yield all moments that can be the largest."""
        yield MemoryInstant(self._steady, 0, 0, tuple(self._in_flight))
        for action in self._work.order:
            yield from self._forward(action) if action.kind == "F" else self._backward(action)

    def peak(self) -> MemoryByKind:
        """Return the memory of the largest moment."""
        # By the total of each moment: kinds reach their largest values at different moments.
        return max((instant.memory for instant in self.instants()), key=lambda memory: memory.total)

    def _kept(self) -> int:
        return sum(
            n * footprint.kept for n, footprint in zip(self._in_flight, self._work.footprints, strict=True)
        )

    def _forward(self, action: PipelineAction) -> Iterator[MemoryInstant]:
        number, chunk = action.chunk, self._work.footprints[action.chunk]
        grads = sum(self._gradients(k) for k in range(len(self._ended))) + self._sums.own
        base = self._with_scatters(sum(self._ended), 0)
        for position, alive in chunk.forward.items():
            memory = replace(base, activations=self._kept() + alive, gradients=grads)
            yield MemoryInstant(memory, number, position, tuple(self._in_flight))
        self._in_flight[number] += 1

    def _backward(self, action: PipelineAction) -> Iterator[MemoryInstant]:
        """Yield the moments of a backward, in which gradients of the chunk go from `before` to `after`."""
        number, learns = action.chunk, self._sums.learns and not self._ended[action.chunk]
        chunk, total = self._work.footprints[number], self._work.gradients[number]
        ends = action.ends(self._split)
        completes = ends and action.part == self._last_part
        others = self._sums.own + sum(self._gradients(k) for k in range(len(self._ended)) if k != number)
        # How many sets of gradients of this chunk exist before and after this backward.
        before = self._num_gradients(number)
        after = self._num_sums(self._ended[number] + completes) if completes == ends and not learns else 1
        copies_per_byte = self._sums.moved if action == self._last[number] else 0
        self._in_flight[number] -= 1
        at_end = self._sums.at_end
        for position, done, freed, alive in _backward_samples(
            chunk, adds=before > 0, at_end=learns or at_end
        ):
            grads = before * total + done if at_end else before * (total - freed) + after * freed
            base = self._steady if learns else self._with_scatters(sum(self._ended), done)
            memory = replace(
                base,
                activations=self._kept() + alive,
                gradients=others + grads,
                wire=base.wire
                + copies_per_byte * done
                + (self._sums.learning if learns and done == total else 0),
            )
            yield MemoryInstant(memory, number, position, tuple(self._in_flight))
        self._in_flight[number] += 0 if ends else 1
        self._ended[number] += completes
        self._begun[number] = ends and not completes

    def _with_scatters(self, micro_batch: int, done: int) -> MemoryByKind:
        """Return the steady memory with that of scatters, with `done` bytes of gradients complete."""
        return replace(self._steady, wire=self._steady.wire + self._sums.on_the_way(micro_batch, done))

    def _gradients(self, chunk: int) -> int:
        return self._num_gradients(chunk) * self._work.gradients[chunk]

    def _num_gradients(self, chunk: int) -> int:
        """Return how many sets of gradients of a chunk exist now."""
        return self._num_sums(self._ended[chunk]) or int(self._begun[chunk])

    def _num_sums(self, ended: int) -> int:
        """Return how many sets of gradients of a chunk exist after `ended` of its backwards."""
        waiting = self._sums.waiting
        if ended and waiting:
            return waiting[min(ended, len(waiting)) - 1]
        return int(ended > 0 and not self._sums.leaves)


def _backward_samples(
    chunk: MicroBatchFootprint, *, adds: bool, at_end: bool
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (position, bytes of complete gradients, bytes of freed gradients, bytes alive) of a backward.

    Args:
        adds: gradients are added to existing ones; otherwise they are new.
        at_end: gradients are freed only after the backward.
    """
    yield from ((position, done, done, alive) for (position, done), alive in chunk.backward.items())
    # While a gradient is handed to its reduction, it exists next to the memory that takes it over.
    for (position, done), (alive, size) in ({} if at_end else chunk.completed).items():
        yield position, done, done - size, alive + (0 if adds else size)


def update_memory(
    steady: MemoryByKind, sums: GradientSumMemory, optimizer: int, gathers: int
) -> MemoryByKind:
    """Return the memory while the optimizer updates, and parameters are gathered after it.

    Args:
        optimizer: bytes of temporary tensors of the optimizer.
        gathers: bytes that Gloo allocates for gathers (ZeRO 1 and 2).
    """
    return replace(steady, gradients=sums.stays + sums.own, activations=max(optimizer, gathers))


def first_step_sums(sums: GradientSumMemory) -> GradientSumMemory:
    """Return the reduction in the first step, whose gradients all leave at the end of the backward.

    Only the first backward shows in which order and how often gradients become complete.
    """
    if sums.waiting:
        return sums if sums.moved else replace(sums, waiting=[1] * len(sums.waiting))
    return replace(sums, learns=sums.leaves)


def agreement_memory(
    steady: MemoryByKind, sums: GradientSumMemory, work: StepWork, agreement: int
) -> MemoryByKind:
    """Return the memory between two rounds of replicas that train independently.

    Args:
        work: work of the step before; a backend can still hold its last messages inside a replica.
        agreement: bytes of temporary tensors of the average.
    """
    late = max(footprint.passed for footprint in work.footprints)
    grads = sums.stays + sums.own
    return replace(steady, gathered=0, gradients=grads, activations=agreement, wire=steady.wire + late)
