"""What flows through a pipeline is a step, and the weights of its forward are stashed for its own backward.

All its micro-batches go forward, later all of them backward, then the stage makes one update. Stage s of p is
p-s-1 steps ahead with its forwards, so its gradient is as many updates old, and it keeps p-s versions.
Source: Narayanan et al. 2019, PipeDream, sections 3.2 and 3.3 (1F1B, weight stashing).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.comm import Net
from paceline.data import Feed, LoadedBatch
from paceline.layout import Sums
from paceline.layout.pipeline import Flight, Pipeline
from paceline.observe import Phases
from paceline.schedule import Action, Table, one_f_one_b, prove
from paceline.sync.every_step import gradient_scale
from paceline.sync.memory import Asked, Pass
from paceline.sync.stage_update import (
    GradientSum,
    SentLongAgo,
    Versions,
    Weights,
    is_untouched,
    update_stage,
)
from paceline.sync.update import Update, UpdateStep


def flow_of(asked: Asked) -> tuple[Table, int]:
    """What goes through all stages, and how many micro-batches at each of its operations."""
    return one_f_one_b(asked.recipe.strategy.pipeline, asked.stretch), asked.micro_batches


def passes(asked: Asked, flow: Table) -> Iterator[Pass]:
    """What goes through a stage: a copy of all weights for each step that is between forward and update."""
    weights, count, flying = asked.sizes.computes + asked.frozen, asked.micro_batches, 0
    for action in flow.orders[asked.stage]:
        if action.kind == "F":
            flying += 1
            yield from (Pass(True, flying * weights) for _ in range(count))
            continue
        for done in range(count):
            yield Pass(False, flying * weights, min(done, 1), done, ends=done == count - 1)
        flying -= 1


@dataclass(frozen=True)
class InFlight:
    """A step between its forward and its update.

    Args:
        version: updates in the weights of its forward.
        weights: these weights.
        micro_batches: what their backwards need.
        count: items of the step; known on the last stage, and told with the gradients.
        scale: of the loss.
    """

    version: int
    weights: Weights
    micro_batches: list[Flight]
    count: float
    scale: float


class WeightStash:
    """Steps on their way through one stage.

    Args:
        stage: this rank's.
        items_per_sample: as for `EveryStep`.
    """

    def __init__(self, stage: Pipeline, net: Net, phases: Phases, items_per_sample: int) -> None:
        self._stage, self._net, self._phases = stage, net, phases
        self._items_per_sample = items_per_sample
        self._flying: dict[int, InFlight] = {}
        self.versions: list[Versions] = []

    def run(self, first: int, end: int, feed: Feed, update_step: UpdateStep) -> tuple[Sums, Update]:
        """See `Flow`."""
        cut = self._stage.cut
        schedule = one_f_one_b(cut.num_stages, end - first)
        prove(schedule, end - first)
        sums, update = Sums(self._stage.metric_names), Update(0.0, 0.0, applied=False)
        self.versions, sent = [], SentLongAgo(self._stage)
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
                    sent.end_update()
        self._stage.flush()
        return sums, update

    def drop(self) -> None:
        """See `Flow`."""
        self._flying = {}

    def _forward(self, micro_batches: list[LoadedBatch], sums: Sums, scale: float, version: int) -> InFlight:
        """Run a step forward with the weights as they are now, and keep those."""
        stage, own = self._stage, Sums(self._stage.metric_names)
        weights = {
            n: p.detach().clone().requires_grad_(p.requires_grad)
            for n, p in stage.passing.weights[0].parameters.items()
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
        stage, total, count = self._stage, GradientSum(flown.weights), flown.count
        for flight in reversed(flown.micro_batches):
            grads, told = stage.passing.backward(flight, flown.weights, note=flown.count)
            count = flown.count if stage.cut.is_last else told
            total.add(grads)
        used = flown.version if is_untouched(flown.weights) else -1
        self.versions.append(Versions(step, flown.version, used, update_step.state.updates))
        self._phases.begin("optimizer")
        return update_stage(stage, update_step, total, flown.scale, count)
