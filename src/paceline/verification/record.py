"""A tail that remembers what went in and what came out, so that a step can be held against the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from paceline.comm import Gradients, Tally
from paceline.state import TrainState
from paceline.sync import Tail, Update

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Record:
    """One step on one rank.

    Args:
        total, count: agreed sums of the loss.
        sums: gradients as they reached the tail, their scale taken out, by parameter name: this rank's parts.
        final: gradients as the optimizer saw them.
        update: what the tail said it did.
    """

    total: float = 0.0
    count: float = 0.0
    sums: Tensors = field(default_factory=dict)
    final: Tensors = field(default_factory=dict)
    update: Update | None = None


class RecordingTail:
    """Wraps a tail; `last` is the record of the latest step."""

    def __init__(self, inner: Tail, parameters: Sequence[nn.Parameter | None]) -> None:
        self.inner = inner
        self.last = Record()
        names = [name for name, p in inner.state.model.named_parameters() if p.requires_grad]
        self._parameters = dict(zip(names, parameters, strict=True))

    @property
    def state(self) -> TrainState:
        """The state that the inner tail updates."""
        return self.inner.state

    def apply(self, grads: Gradients, tally: Tally) -> Update:
        """Copy what comes in, let the inner tail work, copy what the optimizer saw."""
        given = zip(self._parameters, grads.tensors, strict=True)
        sums = {n: g / grads.scale for n, g in given if g is not None}
        update = self.inner.apply(grads, tally)
        final = {
            n: p.grad.clone() for n, p in self._parameters.items() if p is not None and p.grad is not None
        }
        self.last = Record(tally.total, tally.count, sums, final, update)
        return update


def recording(make_tail: Callable[..., Tail]) -> Callable[..., RecordingTail]:
    """A constructor of recording tails from a constructor of tails."""

    def make(
        state: TrainState, parameters: Sequence[nn.Parameter | None], *args: object, **kwargs: object
    ) -> RecordingTail:
        return RecordingTail(make_tail(state, parameters, *args, **kwargs), parameters)

    return make
