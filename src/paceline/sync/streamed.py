"""Streaming DiLoCo: replicas train alone, and parts of what they moved travel while they go on.

The parameters are cut into fragments. Every H steps each fragment leaves, at a step of its own: what it has
moved since it left last, weighted by items, is summed over the replicas beside the steps that follow. So many
steps later it arrives: the outer optimizer takes the mean from where all were, and a replica goes on from
mixing x what it has + (1 - mixing) x that.

A round is at least as long as the run may go without a pause, in whole H. At its end all that is under way
arrives, and all fragments meet as in `local`: a round of one fragment, without delay or mixing, is that of
`LocalRounds`, to the bit.

Invariant: fragments leave and arrive at the same steps on every rank, and one is under way at most. After
a round all replicas hold equal parameters and buffers; inner optimizers stay apart.
Source: Douillard et al. 2025, Streaming DiLoCo with overlapping communication, arXiv:2501.18512, Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from paceline.comm import Net, Reduction, Tally
from paceline.comm.reduction import Reducers
from paceline.data import Feed
from paceline.layout import Placed
from paceline.mesh import Group
from paceline.observe import Phases, Stats
from paceline.slot import Keeper, Piece, Slot
from paceline.state import TrainState
from paceline.sync.every_step import EveryStep
from paceline.sync.fragments import Fragment, Streaming, plan_fragments
from paceline.sync.local import Outer, add_tallies, counted
from paceline.sync.rule import step_stats
from paceline.sync.update import Update, UpdateStep


@dataclass
class _Half:
    """A round under way.

    Args:
        first: its first step; negative: none is.
        end: the step before which it ends.
        buffers: what it started from.
        taken: its steps so far.
    """

    first: int = -1
    end: int = -1
    buffers: list[Tensor] = field(default_factory=list)
    taken: list[tuple[Tally, Update]] = field(default_factory=list)


class StreamedRounds(Keeper):
    """The rule.

    Args:
        inner: the step of one replica.
        streaming: when fragments leave and arrive.
        outer: what an arrival does.
        reducer: makes one for a fragment, by its number.
        world: all ranks.
    Attributes:
        reducer: those of all fragments as one.
    Wire: every H steps an all_reduce of the parameters, in parts, and 8 numbers for each; at the end of a
        round one more of what has moved since, and one of the tally.
    """

    def __init__(
        self,
        inner: EveryStep,
        streaming: Streaming,
        outer: Outer,
        reducer: Callable[[Mapping[Slot, Tensor], int], Reduction],
        placed: Placed,
        *,
        world: Group,
        net: Net,
        phases: Phases,
    ) -> None:
        self.inner, self.streaming = inner, streaming
        self._world, self._net, self._phases = world, net, phases
        self.anchors = {s: nn.Parameter(p.detach().clone()) for s, p in placed.holding.computes.items()}
        slots = [*self.anchors]
        self.fragments = []
        for number, part in enumerate(plan_fragments([s.numel for s in slots], streaming.fragments)):
            anchors = {slots[index]: self.anchors[slots[index]] for index in part}
            self.fragments.append(Fragment(anchors, placed, outer, reducer(anchors, number)))
        by_slot = {slot: one.reducer for one in self.fragments for slot in one.anchors}
        self.reducer = Reducers(by_slot, [one.reducer for one in self.fragments])
        self._half = _Half()

    def rounds(self, feed: Feed, placed: Placed, update_step: UpdateStep) -> Iterator[Stats]:
        """See `Rule`: a round ends where the feed wants a pause, or the next time that H steps are over."""
        state = update_step.state
        with feed.from_step(state.step) as stream:
            while state.step < feed.num_steps:
                self._phases.take()
                half = self._begin(feed, placed, state)
                while state.step < half.end:
                    tally, update = counted(*self.inner.step(feed.work, stream, placed, update_step))
                    half.taken.append((tally, update))
                    state.step += 1
                    self._travel(tally.count, placed, is_last=state.step == half.end)
                tally = self._meet(half, placed)
                self._half = _Half()
                steps, update = range(half.first, half.end), half.taken[-1][1]
                stats = step_stats(steps, feed.work, state, tally, update, self._phases, self._net)
                yield replace(stats, metrics={**stats.metrics, _SKIPPED: tally.metrics[_SKIPPED]})

    def abort(self) -> None:
        """See `Rule`; what is under way goes on, as the others count on it."""
        self.inner.abort()

    def _begin(self, feed: Feed, placed: Placed, state: TrainState) -> _Half:
        """A new round; one that an abort has interrupted goes on."""
        if self._half.first < 0:
            wanted = feed.pause_after(state.step) - state.step
            length = -(-wanted // self.streaming.steps) * self.streaming.steps
            end = min(state.step + length, feed.num_steps)
            self._half = _Half(state.step, end, placed.buffers.values())
            for fragment in self.fragments:
                fragment.begin()
        return self._half

    def _travel(self, count: float, placed: Placed, *, is_last: bool) -> None:
        """After a step: who is due arrives, and who is due leaves."""
        step = len(self._half.taken)
        with self._phases.during("communication"):
            for fragment in self.fragments:
                fragment.count += count
                if fragment.is_under_way and step - fragment.left >= self.streaming.delay:
                    fragment.arrive(self.streaming.mixing)
            for number, fragment in enumerate(self.fragments):
                if self.streaming.leaves(number, step) and not is_last:
                    fragment.leave(step, self._net, self._world, placed.holding.device)
                    if not self.streaming.delay:
                        fragment.arrive(self.streaming.mixing)

    def _meet(self, half: _Half, placed: Placed) -> Tally:
        """All that is under way arrives, and all replicas go on from one place."""
        step, device = len(half.taken), placed.holding.device
        mine = add_tallies([tally for tally, _ in half.taken])
        change = placed.buffers.moved_since(half.buffers, mine.micro_batches)
        metrics = {**mine.metrics, _SKIPPED: float(sum(not update.applied for _, update in half.taken))}
        with self._phases.during("communication"):
            for fragment in self.fragments:
                if fragment.is_under_way:
                    fragment.arrive(self.streaming.mixing)
            for fragment in self.fragments:
                fragment.leave(step, self._net, self._world, device)
                fragment.arrive(0.0)
            mine = replace(mine, buffers=change, metrics=metrics)
            tally = mine.agree(self._net, self._world, device).wait()
        placed.buffers.reset(half.buffers)
        placed.buffers.end_step(tally.buffers, tally.micro_batches)
        return tally

    def pieces(self) -> list[Piece]:
        """Momentum of the outer optimizers, by parameter, under the names of `LocalRounds`."""
        found = []
        for fragment in self.fragments:
            states = fragment.outer.state.optimizer.state
            for slot, anchor in fragment.anchors.items():
                buffer = states.get(anchor, {}).get("momentum_buffer")
                if buffer is not None:
                    found.append(Piece(Slot.whole(f"momentum/{slot.name}", buffer), buffer))
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `pieces`; a round that was under way is forgotten."""
        self._half = _Half()
        for fragment in self.fragments:
            fragment.drop()
            states = fragment.outer.state.optimizer.state
            states.clear()
            for slot, anchor in fragment.anchors.items():
                if f"momentum/{slot.name}" in tensors:
                    buffer = torch.empty_like(anchor).copy_(tensors[f"momentum/{slot.name}"])
                    states[anchor] = {"momentum_buffer": buffer.detach()}


_SKIPPED = "skipped"
