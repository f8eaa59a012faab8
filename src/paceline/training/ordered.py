"""Sums in one order: which reducer adds up the shards, for each layout."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from paceline.comm import CanonicalNorm, OrderedReducer, Reducer, SharedMemoryWire, SpreadReducer
from paceline.comm.exchange import ByMessages, Dealt, Exchange, InMemory
from paceline.comm.rows import Cuts
from paceline.comm.tree import cover
from paceline.data import split
from paceline.errors import StrategyError
from paceline.layout.pipeline import OrderedStageReducer, Pipeline, chain_of
from paceline.layout.zero import cut_rows
from paceline.slot import Slot
from paceline.training.arrange import Material, Setting


def ordered_sums(
    setting: Setting, slots: Sequence[Slot], parameters: Sequence[nn.Parameter], cuts: Cuts
) -> Reducer:
    """The reducer of a whole model, of which each rank of the shard group gets the rows of `cuts`."""
    rank = setting.mesh.axes["shard"].rank
    counted = {index: rows[rank] for index, rows in enumerate(cuts)}
    sums = _sums(setting, parameters, cuts)
    return CanonicalNorm(sums, slots, counted, setting.mesh.inside, setting.net)


def ordered_stage(setting: Setting, material: Material, placed: Pipeline) -> Reducer:
    """The reducer of one stage: sums of its own parameters, under their indices in the whole model.

    Raises:
        StrategyError: more than two modules use a weight, on more than one stage.
    """
    slots, cut, stages = list(placed.slots), placed.cut, setting.mesh.axes["pipeline"]
    links = chain_of(material.task, material.model)
    for index in cut.tied:
        users = sum(any(p is placed.parameters[index] for p in link.parameters()) for link in links)
        if users > 2:
            raise StrategyError(
                f"{users} modules on several stages share '{slots[index].name}', and with more than two the"
                " order of their sum would depend on the stages",
                next_step="leave out reproducible, or choose a strategy without pipeline",
            )
    reduced = [placed.parameters[i] for i in cut.reduced]
    inner = _sums(setting, reduced, cut_rows([slots[i] for i in cut.reduced], 1))
    sums = OrderedStageReducer(inner, cut, placed.parameters, stages, setting.net)
    counted = {index: slice(None) for index in cut.reduced}
    return CanonicalNorm(sums, slots, counted, setting.mesh.inside, setting.net)


def _sums(setting: Setting, parameters: Sequence[nn.Parameter], cuts: Cuts) -> Reducer:
    shards, data = setting.recipe.batch.shards, setting.mesh.data
    blocks = [split(shards, data.size, rank) for rank in range(data.size)]
    if data.size == 1:
        return OrderedReducer(parameters, [_whole_tree(shards)])
    dealt = Dealt([cover(block) for block in blocks], data, setting.mesh.replica)
    wire = setting.wire(data)
    exchange: Exchange = ByMessages(dealt, setting.net)
    if isinstance(wire, SharedMemoryWire):
        exchange = InMemory(dealt, wire)
    return SpreadReducer(parameters, cuts, dealt, exchange, setting.bucket_bytes)


def _whole_tree(shards: int) -> range:
    """The root of the tree over so many shards."""
    return range(1 << (shards - 1).bit_length())
