"""The exponential moving average of the weights, by slot: every rank averages what it updates.

Invariant: after n updates the average is the same function of the first n parameters under every layout, to
the bit if the parameters are; the cut of a tensor and its rank do not matter. Buffers are not averaged: an
evaluation of the average uses them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from paceline.comm.group_collectives import broadcast_coalesced
from paceline.job.mesh import RankGroup
from paceline.parallel.model_layout import ModelLayout
from paceline.parallel.session_context import SessionContext
from paceline.parallel.sharded_model import ShardedModel
from paceline.state.slot import ExtraState, SlotIndex, TensorPiece, TensorSlot
from paceline.state.train_state import TrainState
from paceline.sync.server.parameter_transfer import iter_server_parts, own_values, server_values
from paceline.sync.update import PendingUpdate, UpdateStep

AVERAGE_PREFIX = "values/"
_COUNT_NAME = "count"


class WeightAverage(ExtraState):
    """The average of the parameters that this rank updates, as state of checkpoints.

    Args:
        updates: what this rank updates, by slot; only `in_place` and `put` change them.
        decay: share of the average that stays at an update.
        bring: updates what ranks compute with after `updates` have changed; collective over a group.
        keeps: false on a rank that only receives what another one updates (the worker of a server).
    Source: Polyak and Juditsky 1992, Acceleration of Stochastic Approximation by Averaging; the decay rises
        as (1 + n) / (10 + n) in the first updates, as in TensorFlow's ExponentialMovingAverage.
    """

    def __init__(
        self,
        updates: Mapping[TensorSlot, nn.Parameter],
        decay: float,
        bring: Callable[[RankGroup], None],
        *,
        keeps: bool,
    ) -> None:
        self._updates, self._decay, self._bring = updates, decay, bring
        self.values = {slot: _copy_widened(p) for slot, p in updates.items()} if keeps else {}
        self.count = torch.zeros(1, dtype=torch.int64)
        self.settle: Callable[[], None] = lambda: None  # a save in progress can still read the parameters

    def accept(self, record: PendingUpdate) -> None:
        """Average an update that was applied: an observer of the update step."""
        if record.update is not None and record.update.applied:
            self.follow(1)

    @torch.no_grad()
    def follow(self, num_updates: int) -> None:
        """Average the present parameters as if each of `num_updates` updates had led to them."""
        keep = 1.0
        for _ in range(num_updates):
            n = int(self.count)
            keep *= min(self._decay, (1 + n) / (10 + n))
            self.count += 1
        for slot, value in self.values.items():
            # Two operations, because fused kernels round the ends of a part differently from its middle.
            value.add_((self._updates[slot] - value).mul_(1.0 - keep))

    @contextmanager
    def in_place(self, world: RankGroup) -> Iterator[None]:
        """Compute with the average inside the block, and with the parameters after it; collective."""
        copies = [p.detach().clone() for p in self._updates.values()]
        self.put(world)
        try:
            yield
        finally:
            with torch.no_grad():
                for p, value in zip(self._updates.values(), copies, strict=True):
                    p.copy_(value)
            self._bring(world)

    def put(self, world: RankGroup) -> None:
        """Overwrite the parameters with the average; collective."""
        # A save in the background can still read the parameters that are overwritten here.
        self.settle()
        with torch.no_grad():
            for slot, value in self.values.items():
                self._updates[slot].copy_(value)
        self._bring(world)

    def pieces(self) -> Sequence[TensorPiece]:
        if not self.values:
            return []
        count = TensorPiece(TensorSlot.whole(_COUNT_NAME, self.count), self.count)
        named = [
            TensorPiece(replace(slot, name=f"{AVERAGE_PREFIX}{slot.name}"), value)
            for slot, value in self.values.items()
        ]
        return [count, *named]

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, SlotIndex]:
        """Return this rank's parts."""
        parts = {f"{AVERAGE_PREFIX}{slot.name}": slot.index for slot in self.values} | {_COUNT_NAME: ()}
        return {name: index for name, index in parts.items() if name in shapes}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load this rank's parts; without a saved average a new one starts at the parameters."""
        self.count.zero_()
        if _COUNT_NAME in tensors:
            self.count.copy_(tensors[_COUNT_NAME])
        with torch.no_grad():
            for slot, value in self.values.items():
                part = tensors.get(f"{AVERAGE_PREFIX}{slot.name}")
                value.copy_(self._updates[slot] if part is None else part)


def _copy_widened(p: Tensor) -> Tensor:
    """Return a copy in float32 or wider, because small steps need the digits."""
    wide = torch.promote_types(p.dtype, torch.float32)
    return p.detach().to(wide, copy=True, memory_format=torch.preserve_format)


AVERAGE_KEY = "average"


def build_average(
    context: SessionContext, layout: ModelLayout, state: TrainState, update_step: UpdateStep
) -> WeightAverage | None:
    """Build an average that follows every update; None: the recipe asks for none.

    Replicas that train alone differ between two rounds, so their average follows the rounds
    (`Session.rounds`).
    """
    decay, strategy = context.recipe.average.decay, context.recipe.strategy
    if decay is None:
        return None
    sharded_model = layout.runner.sharded_model
    keeps = not strategy.servers or context.mesh.world.rank < strategy.servers

    def bring(world: RankGroup) -> None:
        if strategy.servers:
            # Workers hold no average, so each server sends its parts to all of them.
            for server in range(strategy.servers):
                values = _values_to_send(sharded_model, server, is_own=server == context.mesh.world.rank)
                broadcast_coalesced(values, context.net, world, server)
        elif layout.gather is not None:
            layout.gather()

    average = WeightAverage(sharded_model.updates, decay, bring, keeps=keeps)
    state.extra_states[AVERAGE_KEY] = average
    if not averages_after_rounds(context):
        update_step.observers.append(average.accept)
    return average


def _values_to_send(sharded_model: ShardedModel, server: int, *, is_own: bool) -> list[Tensor]:
    """Return the tensors through which a server sends its parts; on other servers some that are dropped.

    Args:
        is_own: this rank is that server.
    """
    if is_own:
        return [*own_values(sharded_model).values()]
    if sharded_model.is_whole:
        return [*server_values(sharded_model, server).values()]
    pairs = iter_server_parts(sharded_model, server)
    return [torch.empty(part.sizes, dtype=sharded_model.computes[slot].dtype) for slot, part in pairs]


def averages_after_rounds(context: SessionContext) -> bool:
    """Return whether replicas agree only at the end of a round."""
    return context.recipe.strategy.sync_spec.agrees == "replica"
