"""Every-step: all replicas average their gradients in every step, and make the same update.

This is *the* training step. A step is: run this rank's units, agree on the tally, take the summed
gradients, apply the tail. Invariant: after each step all replicas hold equal parameters and buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from paceline.comm import Net, Reducer, Tally
from paceline.data import LockstepWork, Stream
from paceline.layout import Replicate, Sums
from paceline.mesh import Group
from paceline.observe import Phases, Stats
from paceline.state import TrainState
from paceline.sync.tail import Tail, Update


class EveryStep:
    """The synchronous rule.

    Args:
        group: the replicas.
        net: this rank's wires.
        reducer: sums gradients over `group`.
        phases: where the seconds go.
        items_per_sample: about how many items the loss counts in a sample. The loss is divided by the
            power of two below a step's items before backward, which is exact, so that most of the
            division costs nothing; the tail divides by the rest.
        stop_requested: whether this rank was asked to stop; all ranks learn of it in the same step.
    Wire: one all_reduce a bucket and one for the tally.
    Source: Chen et al. 2016, Revisiting Distributed Synchronous SGD, arXiv:1604.00981, section 2.1.
    """

    def __init__(
        self,
        group: Group,
        net: Net,
        reducer: Reducer,
        *,
        phases: Phases,
        items_per_sample: int = 1,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self.reducer = reducer
        self._group, self._net, self._phases = group, net, phases
        self._items_per_sample = items_per_sample
        self._stop_requested = stop_requested

    def rounds(self, work: LockstepWork, stream: Stream, placed: Replicate, tail: Tail) -> Iterator[Stats]:
        """Steps without end, from the state's own position; between two of them the state is consistent.

        Args:
            work: which units this rank runs in a step.
            stream: loads exactly those units, in order.
            placed: this rank's part of the model.
            tail: applies the update to the state.
        """
        while True:
            self._phases.take()
            step = self._net.step = tail.state.step
            tally, update = self.step(work, stream, placed, tail)
            tail.state.step += 1
            yield self._stats(step, work, tail, tally, update)

    def step(self, work: LockstepWork, stream: Stream, placed: Replicate, tail: Tail) -> tuple[Tally, Update]:
        """One step: units, agreement, update."""
        self.reducer.begin()
        scale = self.gradient_scale(work, tail.state)
        sums = placed.run(stream, work.num_units(tail.state.step), self.reducer, scale)
        agreement = self._tally(sums, placed).agree(self._net, self._group, placed.device)
        with self._phases.during("communication"):
            grads = self.reducer.finish()
            tally = agreement.wait()
        with self._phases.during("optimizer"):
            placed.buffers.end_step(tally.buffers, tally.units)
            update = tail.apply(grads.agreed([u > 0 for u in tally.used], scale), tally)
        return tally, update

    def gradient_scale(self, work: LockstepWork, state: TrainState) -> float:
        """What losses are multiplied with before backward in the state's step."""
        return state.scale.value / power_of_two(work.order.batch_size(state.step) * self._items_per_sample)

    def _tally(self, sums: Sums, placed: Replicate) -> Tally:
        total, count, metrics = sums.read()
        return Tally(
            units=sums.units,
            total=total,
            count=count,
            metrics=metrics,
            stops=float(self._stop_requested()),
            used=[float(p.grad is not None) for p in placed.parameters],
            buffers=placed.buffers.change,
        )

    def _stats(self, step: int, work: LockstepWork, tail: Tail, tally: Tally, update: Update) -> Stats:
        seconds, phases = self._phases.take()
        count = tally.count or 1.0
        return Stats(
            step=step,
            epoch=work.order.epoch_of(step),
            loss=tally.total / count,
            metrics={name: value / count for name, value in tally.metrics.items()},
            num_samples=work.order.batch_size(step),
            num_items=tally.count,
            grad_norm=update.grad_norm,
            lr=update.lr,
            applied=update.applied,
            loss_scale=tail.state.scale.value,
            stops=int(tally.stops),
            seconds=seconds,
            phases=phases,
            sent_bytes=self._net.ledger.total().sent_bytes,
        )


def power_of_two(number: int) -> float:
    """The largest power of two that is not above a number of at least 1."""
    return float(2 ** (number.bit_length() - 1))
