"""What a stage of a pipeline on several hosts sends: in memory to stages of its host, by a backend to others.

Invariant: two stages always take the same way, both ways, so messages between them keep their order. Both
wires give an attempt up together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from paceline.layout.pipeline.host_wire import HostWire
from paceline.layout.pipeline.wire import Message, Neighbours, StageWire


class WireByHost:
    """Stages that are ranks of a group, some of them on this host.

    Args:
        near: reaches those of this host.
        far: reaches the others.
    Wire: that of `far`. The ledger counts what both count.
    """

    def __init__(self, near: HostWire, far: StageWire) -> None:
        self._near, self._far = near, far

    @property
    def num_sent(self) -> int:
        """See `Neighbours`."""
        return self._near.num_sent + self._far.num_sent

    def send(self, to: int, tensors: Sequence[Tensor], note: float = 0.0, *, key: int = 0) -> None:
        """See `Neighbours`."""
        self._to(to).send(to, tensors, note, key=key)

    def receive(self, source: int, *, key: int = 0) -> Message:
        """See `Neighbours`; a stage of this host may wait for a word meanwhile."""
        if source not in self._near.stages:
            self._near.say_taken()
        return self._to(source).receive(source, key=key)

    def await_messages(self, counts: Mapping[int, int]) -> None:
        """See `Neighbours`; those of this host come by themselves."""
        self._far.await_messages({stage: n for stage, n in counts.items() if stage not in self._near.stages})

    def flush(self, most: int = 0) -> None:
        """See `Neighbours`; so many may be left of each way, and nobody here waits for a word meanwhile."""
        self._near.say_taken()
        self._near.flush(most)
        self._far.flush(most)

    def abort(self) -> None:
        """See `Neighbours`."""
        self._near.abort()
        self._far.abort()

    def _to(self, stage: int) -> Neighbours:
        return self._near if stage in self._near.stages else self._far
