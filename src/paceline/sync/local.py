"""Local SGD and DiLoCo: replicas train alone for H steps, then agree on where they went.

A round: every replica takes H steps of its own with its own optimizer. What it moved, weighted by the items
that it trained on, is summed over the replicas, and an outer optimizer takes that mean as its gradient.
Buffers move by the mean of what they moved on the replicas, weighted by micro-batches as in every-step.
With outer SGD of rate 1 the replicas are averaged; for H = 1 and inner SGD without a clip that is exactly
every-step.

Invariant: after a round all replicas hold equal parameters and buffers. The inner optimizers stay apart, and
all of them are state (`inner`).
Source: Stich 2019, Local SGD Converges Fast, arXiv:1805.09767, Algorithm 1; Douillard et al. 2023, DiLoCo,
arXiv:2311.08105, Algorithm 1 (inner AdamW, outer Nesterov).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from paceline.comm import Net, Reduction, Tally
from paceline.data import Feed
from paceline.layout import Placed
from paceline.mesh import Group
from paceline.observe import Phases, Stats
from paceline.slot import Keeper, Piece, Slot
from paceline.state import LossScale, TrainState
from paceline.sync.every_step import EveryStep
from paceline.sync.rule import step_stats
from paceline.sync.update import Update, UpdateStep, update_parts


class ConstantRate:
    """The schedule of an outer optimizer."""

    def apply(self, optimizer: torch.optim.Optimizer, update: int) -> float:
        """Change nothing."""
        return 1.0


@dataclass(frozen=True)
class Outer:
    """What is done with the mean movement of a round.

    Args:
        lr: 1 without momentum is plain averaging.
        momentum: Nesterov's.
    """

    lr: float = 1.0
    momentum: float = 0.0

    def optimizer(self, anchors: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """SGD over the parameters that the replicas started a round from."""
        return torch.optim.SGD(
            anchors, lr=self.lr, momentum=self.momentum, nesterov=self.momentum > 0, foreach=True
        )


@dataclass
class _Half:
    """A round under way.

    Args:
        first: its first step; negative: no round is under way.
        buffers: what the round started from.
        taken: its steps so far.
    """

    first: int = -1
    buffers: list[Tensor] = field(default_factory=list)
    taken: list[tuple[Tally, Update]] = field(default_factory=list)


class LocalRounds(Keeper):
    """H steps alone, then one agreement.

    Args:
        inner: the step of one replica.
        num_local_steps: H; the last round of a run may be shorter.
        outer: what the agreement does.
        reducer: sums movements over the replicas; its coding and residuals are those of any reducer.
        world: all ranks.
        net: this rank's wires.
        phases: where the seconds go.
    Wire: every H steps one all_reduce of the parameters and one of the tally.
    """

    def __init__(
        self,
        inner: EveryStep,
        num_local_steps: int,
        outer: Outer,
        reducer: Callable[[Mapping[Slot, Tensor]], Reduction],
        placed: Placed,
        *,
        world: Group,
        net: Net,
        phases: Phases,
    ) -> None:
        self.inner, self._num_local_steps = inner, num_local_steps
        self._world, self._net, self._phases = world, net, phases
        self.anchors = {s: nn.Parameter(p.detach().clone()) for s, p in placed.holding.computes.items()}
        self.reducer = reducer(self.anchors)
        state = TrainState(placed.holding, outer.optimizer(self.anchors.values()), LossScale())
        self._outer = UpdateStep(state, self.anchors, update_parts(ConstantRate()))
        self._half = _Half()

    def rounds(self, feed: Feed, placed: Placed, update_step: UpdateStep) -> Iterator[Stats]:
        """See `Rule`: a round is H steps."""
        state = update_step.state
        with feed.from_step(state.step) as stream:
            while state.step < feed.num_steps:
                self._phases.take()
                end = min(self._round_start(placed, state) + self._num_local_steps, feed.num_steps)
                while state.step < end:
                    self._half.taken.append(counted(*self.inner.step(feed.work, stream, placed, update_step)))
                    state.step += 1
                half = self._half
                with self._phases.during("communication"):
                    tally = self._agree(half, placed)
                self._half = _Half()
                update = half.taken[-1][1]
                stats = step_stats(
                    range(half.first, end), feed.work, state, tally, update, self._phases, self._net
                )
                yield replace(stats, metrics={**stats.metrics, _SKIPPED: tally.metrics[_SKIPPED]})

    def abort(self) -> None:
        """See `Rule`."""
        self.inner.abort()
        self.reducer.abort()

    def _round_start(self, placed: Placed, state: TrainState) -> int:
        """Remember where a new round starts; one that an abort has interrupted goes on."""
        if self._half.first < 0:
            self._half = _Half(state.step, placed.buffers.values())
            with torch.no_grad():
                torch._foreach_copy_([*self.anchors.values()], [*placed.holding.computes.values()])
        return self._half.first

    def _agree(self, half: _Half, placed: Placed) -> Tally:
        """Sum the movements, step from the anchors, and go on from there."""
        mine = add_tallies([tally for tally, _ in half.taken])
        change = placed.buffers.moved_since(half.buffers, mine.micro_batches)
        metrics = {**mine.metrics, _SKIPPED: float(sum(not update.applied for _, update in half.taken))}
        mine = replace(mine, buffers=change, metrics=metrics)
        self.reducer.begin()
        for slot in reversed(self.anchors):
            with torch.no_grad():
                moved = self.anchors[slot] - placed.holding.computes[slot]
                self.reducer.ready(slot, moved * mine.count)
        self.reducer.close()
        agreement = mine.agree(self._net, self._world, placed.holding.device)
        grads, tally = self.reducer.finish(), agreement.wait()
        self._outer.apply(grads, tally)
        self.reducer.commit()
        with torch.no_grad():
            torch._foreach_copy_([*placed.holding.computes.values()], [*self.anchors.values()])
        placed.buffers.reset(half.buffers)
        placed.buffers.end_step(tally.buffers, tally.micro_batches)
        return tally

    def pieces(self) -> list[Piece]:
        """Momentum of the outer optimizer, by parameter."""
        states = self._outer.state.optimizer.state
        return [
            Piece(Slot.whole(f"momentum/{slot.name}", buffer), buffer)
            for slot, anchor in self.anchors.items()
            if (buffer := states.get(anchor, {}).get("momentum_buffer")) is not None
        ]

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `pieces`; a round that was under way is forgotten."""
        self._half = _Half()
        states = self._outer.state.optimizer.state
        states.clear()
        for slot, anchor in self.anchors.items():
            if f"momentum/{slot.name}" in tensors:
                buffer = torch.empty_like(anchor).copy_(tensors[f"momentum/{slot.name}"])
                states[anchor] = {"momentum_buffer": buffer.detach()}


_SKIPPED = "skipped"


def counted(tally: Tally, update: Update) -> tuple[Tally, Update]:
    """A step that was not applied moved nothing: its items have no weight."""
    if update.applied:
        return tally, update
    return replace(tally, total=0.0, count=0.0, metrics=dict.fromkeys(tally.metrics, 0.0)), update


def add_tallies(tallies: Sequence[Tally]) -> Tally:
    """The sum over steps; the change of the buffers is left to the caller."""
    first = tallies[0]
    return Tally(
        micro_batches=sum(t.micro_batches for t in tallies),
        total=sum(t.total for t in tallies),
        count=sum(t.count for t in tallies),
        metrics={name: sum(t.metrics[name] for t in tallies) for name in first.metrics},
        stops=max(t.stops for t in tallies),
        used=[sum(column) for column in zip(*(t.used for t in tallies), strict=True)],
        buffers=first.buffers,
    )
