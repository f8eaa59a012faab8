"""PipeDream: a pipeline that is never flushed. Stages update as gradients reach them.

What flows is a step: all its micro-batches forward, later all of them backward, then one update of the stage.
Stage s of p is p-s-1 steps ahead with its forwards, so its gradient is as many updates old. The weights of a
forward are kept (stashed) for its own backward.

Buffers such as running statistics move at the end of a step's forward, in the order of the steps.

Invariant: the backward of a step uses the version of the weights that its forward used, on every stage.
Between two rounds the pipeline is empty, every stage has made one update for every step, and buffers are
equal on all ranks.
Source: Narayanan et al. 2019, PipeDream, sections 3.2 and 3.3 (1F1B, weight stashing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.comm import Gradients, Net, Tally
from paceline.data import Feed, LoadedBatch
from paceline.layout import Placed, Sums
from paceline.layout.pipeline import Flight, Pipeline
from paceline.mesh import Group
from paceline.observe import Phases, Stats
from paceline.schedule import Action, one_f_one_b, prove
from paceline.state import TrainState
from paceline.sync.every_step import gradient_scale
from paceline.sync.rule import step_stats
from paceline.sync.update import Update, UpdateStep


@dataclass(frozen=True)
class InFlight:
    """A step between its forward and its update.

    Args:
        version: updates in the weights of its forward.
        weights: these weights, by their names in the stage.
        micro_batches: what their backwards need.
        count: items of the step; known on the last stage, and told with the gradients.
        scale: of the loss.
    """

    version: int
    weights: Mapping[str, Tensor]
    micro_batches: list[Flight]
    count: float
    scale: float


@dataclass(frozen=True)
class Versions:
    """What one update was made of, on one stage.

    Args:
        forward, backward: updates in the weights that its forward and its backward used.
        applied: updates that had been made when it was applied; less `forward` is its staleness.
    """

    step: int
    forward: int
    backward: int
    applied: int


class PipeDream:
    """The rule of one pipeline.

    Args:
        placed: this rank's stage.
        world: all stages.
        items_per_sample: as for `EveryStep`.
        stop_requested: see `EveryStep`.
    Wire: activations and their gradients between neighbours; one tally a round.
    """

    def __init__(
        self,
        placed: Pipeline,
        world: Group,
        net: Net,
        phases: Phases,
        *,
        items_per_sample: int,
        stop_requested: Callable[[], bool],
    ) -> None:
        self._stage, self._world, self._net, self._phases = placed, world, net, phases
        self._items_per_sample, self._stop_requested = items_per_sample, stop_requested
        self._flying: dict[int, InFlight] = {}
        self._undo: Callable[[], None] = _nothing
        self.versions: list[Versions] = []

    def rounds(self, feed: Feed, placed: Placed, update_step: UpdateStep) -> Iterator[Stats]:
        """See `Rule`: a round ends where the feed wants a pause; then the pipeline runs empty."""
        state = update_step.state
        while state.step < feed.num_steps:
            self._phases.take()
            first, end = state.step, feed.pause_after(state.step)
            self._undo, buffers = _memory_of(state, self._stage), placed.buffers.values()
            sums, update = self._run(first, end, feed, update_step)
            change = placed.buffers.change_since(buffers)
            agreement = self._tally(sums, placed, change).agree(self._net, self._world, placed.holding.device)
            self._phases.begin("communication")
            tally = agreement.wait()
            self._phases.begin("optimizer")
            placed.buffers.reset(buffers)
            placed.buffers.end_step(tally.buffers, 1.0)  # every stage moved its own
            state.step, self._undo = end, _nothing
            stats = step_stats(range(first, end), feed.work, state, tally, update, self._phases, self._net)
            stale = {n: tally.metrics[n] / (end - first) for n in tally.metrics if n.startswith(_STALENESS)}
            yield replace(stats, metrics={**stats.metrics, **stale})

    def abort(self) -> None:
        """Go back to where the pipeline was empty: stages have made different numbers of updates since."""
        self._undo()
        self._flying, self._undo = {}, _nothing

    def _run(self, first: int, end: int, feed: Feed, update_step: UpdateStep) -> tuple[Sums, Update]:
        """Fill the pipeline, keep it full, and run it empty."""
        cut = self._stage.cut
        schedule = one_f_one_b(cut.num_stages, end - first)
        prove(schedule, end - first)
        sums, update = Sums(self._stage.metric_names), Update(0.0, 0.0, applied=False)
        self.versions = []
        with feed.from_step(first) as stream:
            for action in schedule.orders[cut.stage]:
                step = self._net.step = update_step.state.step = first + action.micro_batch
                if action.kind == "F":
                    self._phases.begin("data")
                    micro_batches = [next(stream) for _ in range(feed.work.num_micro_batches(step))]
                    scale = gradient_scale(feed.work, update_step.state, self._items_per_sample)
                    self._flying[step] = self._forward(micro_batches, sums, scale, update_step.state.updates)
                else:
                    update = self._backward(step, self._flying.pop(step), update_step)
        self._stage.flush()
        return sums, update

    def _forward(self, micro_batches: list[LoadedBatch], sums: Sums, scale: float, version: int) -> InFlight:
        """Run a step forward with the weights as they are now, and keep those."""
        stage, own = self._stage, Sums(self._stage.metric_names)
        weights = {
            n: p.detach().clone().requires_grad_(p.requires_grad)
            for n, p in stage.passing.chunks[0].named_parameters()
        }
        stage.begin_step()
        flights = [
            stage.passing.forward(Action("F", number), micro_batch, own, scale, weights)
            for number, micro_batch in enumerate(micro_batches)
        ]
        changes = stage.buffers.changes_of([one.micro_batch.shard for one in micro_batches])
        stage.buffers.end_step(stage.buffers.added(changes), len(flights))
        sums.extend(own)
        return InFlight(version, weights, flights, own.read()[1], scale)

    def _backward(self, step: int, flown: InFlight, update_step: UpdateStep) -> Update:
        """Run a step backward with the weights of its forward, and update the stage."""
        stage, total, count = self._stage, dict[str, Tensor](), flown.count
        names = [name for name, w in flown.weights.items() if w.requires_grad]
        for flight in reversed(flown.micro_batches):
            grads, told = stage.passing.backward(flight, flown.weights, note=flown.count)
            count = flown.count if stage.cut.is_last else told
            for name, g in zip(names, grads, strict=True):
                if g is not None:
                    total[name] = total[name] + g if name in total else g
        state = update_step.state
        self.versions.append(Versions(step, flown.version, _version_of(flown), state.updates))
        self._phases.begin("optimizer")
        return update_step.apply(self._gradients(total, flown.scale), _counted(count, stage))

    def _gradients(self, total: Mapping[str, Tensor], scale: float) -> Gradients:
        """By what this stage updates."""
        own = {
            p: total[name] for name, p in self._stage.passing.chunks[0].named_parameters() if name in total
        }
        grads = {slot: own.get(p) for slot, p in self._stage.holding.updates.items()}
        flats = [g for g in grads.values() if g is not None]
        return Gradients(grads, flats, torch._foreach_norm(flats) if flats else [], scale)

    def _tally(self, sums: Sums, placed: Placed, change: Tensor) -> Tally:
        total, count, metrics = sums.read()
        stale = dict.fromkeys((f"{_STALENESS}{s}" for s in range(self._stage.cut.num_stages)), 0.0)
        ages = sum(v.applied - v.forward for v in self.versions)
        stale[f"{_STALENESS}{self._stage.cut.stage}"] = float(ages)
        return Tally(
            micro_batches=float(sums.micro_batches),
            total=total,
            count=count,
            metrics={**metrics, **stale},
            stops=float(self._stop_requested()),
            used=[0.0] * len(placed.holding.slots),
            buffers=change,
        )


_STALENESS = "staleness of stage "


def _nothing() -> None:
    """There is no half round."""


def _version_of(flown: InFlight) -> int:
    """The version that the backward really used: the stash was not written since its forward."""
    untouched = all(w._version == 0 for w in flown.weights.values())
    return flown.version if untouched else -1


def _counted(count: float, stage: Pipeline) -> Tally:
    """What the update step divides by."""
    none = torch.zeros(0, dtype=torch.float64)
    return Tally(0.0, 0.0, count, {}, 0.0, [0.0] * len(stage.holding.slots), none)


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
