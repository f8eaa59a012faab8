"""The moments of a stage of a pipeline that is never flushed. Pure.

It runs with weights that its rule keeps, takes the gradients of a micro-batch all at once, and updates
while others are in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from paceline.parallel.placement import ParameterBytes
from paceline.plan.activation_memory import MicroBatchFootprint
from paceline.plan.memory_plan import MemoryByKind
from paceline.sync.sync_rule import PipelinePass


@dataclass(frozen=True)
class Flow:
    """A stage from one moment at which the pipeline is empty to the next.

    Args:
        still: what stays.
        sizes: of what is trained.
        one: what a micro-batch takes.
        passes: in their order.
        sent: messages that are kept each way.
        taken: by an update for itself.
    """

    still: MemoryByKind
    sizes: ParameterBytes
    one: MicroBatchFootprint
    passes: Sequence[PipelinePass]
    sent: int
    taken: int

    def moments(self) -> dict[str, MemoryByKind]:
        """The most in a forward, in a backward and in an update."""
        found: dict[str, MemoryByKind] = {}
        for name, parts in self._instants():
            found[name] = max(found.get(name, parts), parts, key=lambda one: one.total)
        return found

    def _instants(self) -> Iterator[tuple[str, MemoryByKind]]:
        flying, one = 0, self.one
        ends, whole = one.arriving + one.departing, self.sizes.computes
        late = self.still.wire + self.sent * ends
        for now in self.passes:
            still = replace(self.still, parameters=self.still.parameters + now.copies, wire=late)
            grads = now.sums * whole
            if now.is_forward:
                most = flying * one.kept + max(one.forward.values())
                yield "forward", replace(still, activations=most, gradients=grads)
                flying += 1
                continue
            flying -= 1
            others = flying * one.kept + now.done * ends
            for (_, done), alive in one.backward.items():
                yield "backward", replace(still, activations=others + alive, gradients=grads + done)
            added = grads + whole + now.sums * self.sizes.largest
            yield "backward", replace(still, activations=others + ends, gradients=added)
            if now.ends:
                yield "update", replace(still, activations=others + ends + self.taken, gradients=whole)
