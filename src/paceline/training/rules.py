"""Constructors of the rules. A rule says when replicas agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor

from paceline.comm import Reduction
from paceline.comm.reduction import AnyOrderNorm, GradientUnit, LocalClip
from paceline.data import LockstepWork, Work, split
from paceline.layout import Holding
from paceline.mesh import DATA_AXES, Group
from paceline.slot import Slot
from paceline.state import TrainState
from paceline.sync import EveryStep, LocalRounds, Outer, Rule
from paceline.sync.backup import FirstN
from paceline.sync.balance import Balanced
from paceline.sync.bounded import Bounded
from paceline.sync.choice import Measured
from paceline.sync.every_step import power_of_two
from paceline.sync.followed import Followed, by_compute, by_links
from paceline.sync.fragments import Streaming
from paceline.sync.moved import Moved, MovedAtOnce
from paceline.sync.outer import OuterStep
from paceline.sync.policy import ApplyEach
from paceline.sync.recovery import Recovery
from paceline.sync.residuals import Residuals
from paceline.sync.straggler import COMMUNICATION, Watched
from paceline.sync.streamed import StreamedRounds
from paceline.training.alone import build_step, number_of, owing, step_alone, those_who_meet
from paceline.training.arrange import Setting
from paceline.training.codecs import local_clip_norm
from paceline.training.layouts import Layout
from paceline.training.movement_sums import build_movement_sums
from paceline.training.reductions import build_reduction
from paceline.training.serving import num_workers, served


def every_step(setting: Setting, layout: Layout, state: TrainState) -> Rule:
    """All replicas average their gradients in every step."""
    holding, replicas = layout.placed.holding, setting.mesh.data
    step, reducer = _coded_step(setting, holding, state)
    state.keepers["moved"] = MovedAtOnce(holding)
    told: dict[str, Any] = {"group": replicas, "net": setting.net, "note": setting.note}
    rule: Rule = step
    ran: Callable[[int], int] = partial(_micro_batches, setting.shards, replicas)
    if setting.recipe.strategy.balance == "speed" and setting.mesh.replica.size > 1:
        shares = [len(split(setting.shards, replicas.size, rank)) for rank in range(replicas.size)]
        rule = balanced = Balanced(step, _deal, shares, **told)
        ran = balanced.ran
    factor = setting.recipe.health.straggler_factor
    if factor is not None and replicas.size > 1:
        rule = Watched(rule, ran, factor, **told)
    if setting.choices and replicas.size > 1:
        rule = Measured(rule, setting.choices, reducer, holding.computes, warn=setting.warn, **told)
    return rule


def _coded_step(setting: Setting, holding: Holding, state: TrainState) -> tuple[EveryStep, Reduction]:
    """A step of all ranks, and what sums; what their coding loses is kept.

    One rank codes nothing, and applies what others had lost.
    """
    codes, world = setting.recipe.strategy.feeds_back, setting.mesh.world
    if codes and world.size == 1 and not setting.recipe.is_ordered:
        reducer = build_reduction(setting, holding)
        return build_step(setting, reducer, world, owed=owing(setting, holding, state)), reducer
    reducer = build_reduction(setting, holding)
    if not codes:
        return _clipped_step(setting, reducer), reducer
    items, divides = setting.recipe.batch.size * setting.items_per_sample, _divides(setting)
    scale = state.scale.value / power_of_two(items)
    unit = GradientUnit(reducer.rescale, scale, items, divides=divides)
    coders = setting.mesh.over([*DATA_AXES, *holding.summed_over])
    state.keepers["residual"] = Residuals(reducer, holding.computes, coders, unit=unit)
    return _clipped_step(setting, reducer, follows=unit.follow), reducer


def _divides(setting: Setting) -> bool:
    return setting.recipe.batch.reduction == "mean"


def _clipped_step(setting: Setting, reducer: Reduction, **more: Any) -> EveryStep:
    """A step of all ranks, each of which clips its gradient first, if the codec says so."""
    clip_norm, world = local_clip_norm(setting.recipe.strategy), setting.mesh.world
    if clip_norm is None or world.size == 1:
        return build_step(setting, reducer, world, **more)
    clip = LocalClip(reducer, clip_norm, world.size, divides=_divides(setting))
    return build_step(setting, clip, world, ran=lambda sums, scale: clip.ran(sums.read()[1], scale), **more)


def _micro_batches(shards: int, group: Group, step: int) -> int:
    """Of a rank that has an even share of a full batch."""
    return len(split(shards, group.size, group.rank))


def _deal(work: Work, shares: Sequence[int]) -> Work:
    return cast("LockstepWork", work).dealt(shares)


def _alone(setting: Setting, layout: Layout, state: TrainState, outer: Outer, streaming: Streaming) -> Rule:
    """Replicas that train alone; what they have moved travels at once, or in fragments."""
    mesh, holding = setting.mesh, layout.placed.holding
    at_end = OuterStep(outer, AnyOrderNorm(mesh.inside, setting.net), layout.gather)

    def sums(anchors: Mapping[Slot, Tensor], number: int = 0) -> Reduction:
        name = f"fragment-{number}/" if streaming.fragments > 1 else ""
        return build_movement_sums(setting, holding, anchors, name)

    owed = owing(setting, holding, state) if setting.recipe.strategy.feeds_back else None
    step, told = step_alone(setting, holding, state, owed), those_who_meet(setting)
    rule: LocalRounds | StreamedRounds
    if streaming.is_whole:
        rule = LocalRounds(step, streaming.steps, at_end, sums, layout.placed, **told)
    else:
        rule = StreamedRounds(step, streaming, at_end, sums, layout.placed, **told)
    state.keepers["moved"] = MovedAtOnce(holding)
    if owed is not None and mesh.replica.size > 1:
        residuals = Residuals(rule.reducer, holding.updates, mesh.replica)
        state.keepers["moved"] = Moved(residuals, rule.movements)
    state.keepers["outer"] = rule
    return _followed(setting, rule)


def _followed(setting: Setting, rule: Rule) -> Rule:
    """The rule, until a slow replica, or its link, keeps up again; where nobody was slow, for good."""
    awaited, factor, replicas = setting.awaited, setting.recipe.health.straggler_factor, setting.mesh.replica
    if awaited is None or factor is None:
        return rule
    recovery = Recovery(replicas.ranks.index(awaited.rank), replicas.size, factor, awaited.returns)
    look = by_compute(partial(_micro_batches, setting.shards, replicas), replicas, setting.net)
    if awaited.cause == COMMUNICATION:
        look = by_links(replicas, setting.net)
    return Followed(rule, recovery.hear, awaited.rank, look, setting.note)


def local(setting: Setting, layout: Layout, state: TrainState) -> Rule:
    """Replicas train alone, then average."""
    return _alone(setting, layout, state, Outer(), Streaming(int(number_of(setting))))


def diloco(setting: Setting, layout: Layout, state: TrainState) -> Rule:
    """Replicas train alone, then an outer optimizer moves them; in fragments, if the recipe says so."""
    outer = setting.recipe.outer
    streaming = Streaming(int(number_of(setting)), outer.fragments, outer.delay_steps, outer.mixing)
    return _alone(setting, layout, state, Outer(outer.lr, outer.momentum), streaming)


def server(setting: Setting, layout: Layout, state: TrainState) -> Rule:
    """A server makes one update of a batch, once all its parts have come."""
    return served(setting, layout, state, Bounded(num_workers(setting), 0))


def server_async(setting: Setting, layout: Layout, state: TrainState) -> Rule:
    """A server applies every push."""
    return served(setting, layout, state, ApplyEach(num_workers(setting)))


def bounded(setting: Setting, layout: Layout, state: TrainState) -> Rule:
    """A server applies every push, and nobody gets too far ahead."""
    return served(setting, layout, state, Bounded(num_workers(setting), number_of(setting)))


def backup(setting: Setting, layout: Layout, state: TrainState) -> Rule:
    """A server applies the first pushes of a step."""
    return served(setting, layout, state, FirstN(num_workers(setting), int(number_of(setting))))
