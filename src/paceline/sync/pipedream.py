"""PipeDream: a pipeline that is never flushed. Stages update as gradients reach them.

What flows through it, and which weights a stage keeps for it, is a `Flow`: whole steps and a stash
(`weight_stash`), or micro-batches and two buffers (`two_buffers`). Buffers such as running statistics move at
the end of a step's forward, in the order of the steps.

Invariant: the backward of a step uses the version of the weights that its forward used, on every stage.
Between two rounds the pipeline is empty, every stage has made one update for every step, and buffers are
equal on all ranks.
Source: Narayanan et al. 2019, PipeDream, sections 3.2 and 3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from paceline.comm import Net, Tally
from paceline.data import Feed
from paceline.layout import Placed, Sums
from paceline.layout.pipeline import Pipeline
from paceline.mesh import Group
from paceline.observe import Phases, Stats
from paceline.schedule import Table
from paceline.state import TrainState
from paceline.sync.memory import Asked, Pass, RuleMemory
from paceline.sync.rule import step_stats
from paceline.sync.stage_update import Versions, sent_messages
from paceline.sync.update import Update, UpdateStep


class Flow(Protocol):
    """What goes through a stage between two moments at which the pipeline is empty.

    Attributes:
        versions: of the updates of the last run.
    """

    @property
    def versions(self) -> Sequence[Versions]: ...

    def run(self, first: int, end: int, feed: Feed, update_step: UpdateStep) -> tuple[Sums, Update]:
        """Fill the pipeline, keep it full, and run it empty; the stage makes an update for every step."""

    def drop(self) -> None:
        """Forget what is in flight."""


def memory_of_rounds(asked: Asked, passes: Iterable[Pass], flow: Table, together: int) -> RuleMemory:
    """What the rule keeps of a round: how its stage was when the pipeline was empty, to go back to it.

    Args:
        passes: what flows through the stage.
        flow: through all stages; of each operation there are so many micro-batches `together`.
    """
    undo = asked.sizes.updates + asked.frozen + asked.state + 2 * asked.buffers
    sent = sent_messages(asked, asked.recipe.strategy.pipeline)
    return RuleMemory(state=undo, passes=[*passes], sent=sent, flow=flow, together=together)


class PipeDream:
    """The rule of one pipeline.

    Args:
        placed: this rank's stage.
        flow: what goes through it.
        world: all stages.
        stop_requested: see `EveryStep`.
    Wire: activations and their gradients between neighbours; one tally a round.
    """

    def __init__(
        self,
        placed: Pipeline,
        flow: Flow,
        world: Group,
        net: Net,
        phases: Phases,
        *,
        stop_requested: Callable[[], bool],
    ) -> None:
        self._stage, self._world, self._net, self._phases = placed, world, net, phases
        self.flow, self._stop_requested = flow, stop_requested
        self._undo: Callable[[], None] = _nothing

    @property
    def versions(self) -> Sequence[Versions]:
        """Of the updates of the last round."""
        return self.flow.versions

    def rounds(self, feed: Feed, placed: Placed, update_step: UpdateStep) -> Iterator[Stats]:
        """See `Rule`: a round ends where the feed wants a pause; then the pipeline runs empty."""
        state = update_step.state
        while state.step < feed.num_steps:
            self._phases.take()
            first, end = state.step, feed.pause_after(state.step)
            self._undo, buffers = _memory_of(state, self._stage), placed.buffers.values()
            sums, update = self.flow.run(first, end, feed, update_step)
            change = placed.buffers.change_since(buffers)
            own = self._tally(sums, update, placed, change)
            agreement = own.agree(self._net, self._world, placed.holding.device)
            self._phases.begin("communication")
            tally = agreement.wait()
            self._phases.begin("optimizer")
            placed.buffers.reset(buffers)
            placed.buffers.end_step(tally.buffers, 1.0)  # every stage moved its own
            state.step, self._undo = end, _nothing
            stats = step_stats(range(first, end), feed.work, state, tally, update, self._phases, self._net)
            stale = {n: tally.metrics[n] / (end - first) for n in tally.metrics if n.startswith(_STALENESS)}
            metrics = {n: x for n, x in stats.metrics.items() if n != _SQUARES} | stale
            yield replace(stats, metrics=metrics, grad_norm=tally.metrics[_SQUARES] ** 0.5)

    def abort(self) -> None:
        """Go back to where the pipeline was empty: stages have made different numbers of updates since."""
        self._undo()
        self.flow.drop()
        self._undo = _nothing

    def _tally(self, sums: Sums, update: Update, placed: Placed, change: Tensor) -> Tally:
        total, count, metrics = sums.read()
        stale = dict.fromkeys((f"{_STALENESS}{s}" for s in range(self._stage.cut.num_stages)), 0.0)
        ages = sum(v.applied - v.forward for v in self.versions)
        stale[f"{_STALENESS}{self._stage.cut.stage}"] = float(ages)
        return Tally(
            micro_batches=float(sums.micro_batches),
            total=total,
            count=count,
            metrics={**metrics, **stale, _SQUARES: update.grad_norm**2},
            stops=float(self._stop_requested()),
            used=[0.0] * len(placed.holding.slots),
            buffers=change,
        )


_STALENESS = "staleness of stage "
_SQUARES = "squared norm"
"""Of the last gradient; each stage knows that of its own part."""


def _nothing() -> None:
    """There is no half round."""


def _memory_of(state: TrainState, stage: Pipeline) -> Callable[[], None]:
    """Remember what this stage updates; the result puts it back."""
    kept = {name: t.detach().clone() for name, t in state.tensors().items()}
    step, updates, buffers = state.step, state.updates, stage.buffers.values()

    def undo() -> None:
        state.step, state.updates = step, updates
        with torch.no_grad():
            for name, t in state.tensors().items():
                if name in kept:
                    t.copy_(kept[name])
        if not any(name.startswith("optimizer/") for name in kept):
            state.optimizer.state.clear()
        stage.buffers.reset(buffers)

    return undo
