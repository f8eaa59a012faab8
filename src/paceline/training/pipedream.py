"""Constructor of PipeDream, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from paceline.errors import StrategyError
from paceline.layout.pipeline import Pipeline
from paceline.recipe import Recipe
from paceline.schedule import Table
from paceline.state import TrainState
from paceline.sync import Rule, two_buffers, weight_stash
from paceline.sync.memory import Asked, Pass, RuleMemory
from paceline.sync.pipedream import Flow, PipeDream, memory_of_rounds
from paceline.sync.two_buffers import TwoBuffers
from paceline.sync.weight_stash import WeightStash
from paceline.training.arrange import Setting
from paceline.training.layouts import Layout


def pipedream(setting: Setting, layout: Layout, state: TrainState) -> Rule:
    """Stages update as gradients reach them."""
    recipe, placed = setting.recipe, layout.placed
    alone = "each stage updates alone, and this needs all of them at once"
    unfit = {
        "optimizer.clip_norm": alone if recipe.optimizer.clip_norm is not None else "",
        'precision.compute = "fp16"': alone if recipe.precision.compute == "fp16" else "",
        "weights that two stages share": alone
        if not isinstance(placed, Pipeline) or placed.cut.shared
        else "",
        "memory.recompute": _OTHER_WEIGHTS if recipe.memory.recomputes else "",
    }
    reasons = [f"{name} ({why})" for name, why in unfit.items() if why]
    if reasons or not isinstance(placed, Pipeline):
        raise _no_pipedream(reasons)
    net, phases = setting.net, setting.phases
    flow = _flow_of(recipe).build(placed, net, phases, setting.items_per_sample)
    return PipeDream(placed, flow, setting.mesh.world, net, phases, stop_requested=setting.stop_requested)


_OTHER_WEIGHTS = "it would compute again with the weights of today, not with those of the forward"


def _no_pipedream(reasons: Sequence[str]) -> StrategyError:
    return StrategyError(
        f"pipedream does not go with {'; '.join(reasons)}",
        next_step="leave it out, or choose sync=every-step",
    )


def memory(asked: Asked) -> RuleMemory:
    """What the rule keeps on a stage.

    Raises:
        StrategyError: something is to be computed again.
    """
    recipe = asked.recipe
    if recipe.memory.recomputes:
        raise _no_pipedream([f"memory.recompute ({_OTHER_WEIGHTS})"])
    spec = _flow_of(recipe)
    flow, together = spec.flow(asked)
    return memory_of_rounds(asked, spec.passes(asked, flow), flow, together)


class _FlowSpec(NamedTuple):
    """What may flow through a pipeline that is never flushed."""

    build: Callable[..., Flow]
    flow: Callable[[Asked], tuple[Table, int]]
    passes: Callable[[Asked, Table], Iterator[Pass]]


_FLOWS: Mapping[str, _FlowSpec] = {
    "": _FlowSpec(WeightStash, weight_stash.flow_of, weight_stash.passes),
    "2bw": _FlowSpec(TwoBuffers, two_buffers.flow_of, two_buffers.passes),
}


def _flow_of(recipe: Recipe) -> _FlowSpec:
    return _FLOWS[recipe.strategy.sync.partition(":")[2]]
