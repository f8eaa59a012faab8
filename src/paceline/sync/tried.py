"""A rank that serves is tried where a round ends: it runs some micro-batches, and nothing comes of them.

A slow rank that serves computes nothing that would show that it keeps up again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from paceline.comm import LocalReducer
from paceline.data import Feed
from paceline.layout import Placed
from paceline.observe import OWN, Phases, Stats
from paceline.state import TrainState
from paceline.sync.rule import Rule
from paceline.sync.update import UpdateStep

MOST = 4  # micro-batches of a trial: its cost, where others wait
Bind = Callable[[Callable[[], float]], None]


class Tried:
    """The rule of a server that is tried.

    Args:
        inner: serves.
        bind: is told, once the data are known, what makes a trial.
        phases: measures it.
    """

    def __init__(self, inner: Rule, bind: Bind, phases: Phases) -> None:
        self.inner, self._bind, self._phases = inner, bind, phases

    def rounds(self, feed: Feed, placed: Placed, update_step: UpdateStep) -> Iterator[Stats]:
        """See `Rule`."""
        self._bind(partial(try_out, feed, placed, update_step.state, self._phases))
        return self.inner.rounds(feed, placed, update_step)

    def abort(self) -> None:
        """See `Rule`."""
        self.inner.abort()


def try_out(feed: Feed, placed: Placed, state: TrainState, phases: Phases) -> float:
    """Seconds that a micro-batch of the next step takes this rank, to read and to compute.

    Parameters and buffers stay as they are; the gradients are dropped, and no sample counts.
    """
    step, buffers = min(state.step, feed.num_steps - 1), placed.buffers.values()
    micro_batches = feed.work.part(0, 1).micro_batches(step, state.updates)[:MOST]
    sink = LocalReducer(placed.holding.computes)
    phases.take()
    with feed.open(micro_batches) as stream:
        placed.run(stream, len(micro_batches), sink, state.scale.value)
    sink.abort()
    placed.buffers.reset(buffers)
    seconds = phases.spent(*OWN) / len(micro_batches)
    phases.take()
    return seconds
