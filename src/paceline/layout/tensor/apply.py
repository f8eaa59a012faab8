"""Changing the modules of a model in place, once its tensors have been cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from paceline.comm import Collective
from paceline.layout.tensor.become import remember, take_numbers
from paceline.layout.tensor.cuts import TensorCuts
from paceline.layout.tensor.exchange import Entrance, enter, leave
from paceline.layout.tensor.linear import LinearCut, make_column, make_gathered, make_head, make_row
from paceline.layout.tensor.plan import PlanEntry
from paceline.layout.tensor.sequence import Positions, gather, make_attention, make_block, scatter
from paceline.layout.tensor.vocabulary import Vocabulary, make_embedding
from paceline.models import KeyedDropout


def apply_cuts(cuts: TensorCuts, collective: Collective, *, apart: bool = False) -> None:
    """Let every module that is cut run with its part.

    Args:
        apart: a block that is cut by positions gives all of them, as stages send them on.
    """
    rank, positions = collective.group.rank, Positions(collective)
    _columns(cuts, collective, positions)
    for cut in cuts.linears:
        if cut.word == "row":
            make_row(cut, _leaves(cuts, cut.name, collective, positions), rank)
    for embedding in cuts.embeddings:
        make_embedding(embedding.layer, Vocabulary(embedding.spans, collective, embedding.name))
    for attention in cuts.attentions:
        take_numbers(attention.module, attention.numbers[rank])
        if _by_position(cuts, attention.name):
            make_attention(attention.module, positions, attention.name)
    for dropout in cuts.dropouts:
        span = dropout.spans[rank]
        dropout.module.take_part((span[0], span[-1]), dropout.width)
        remember(dropout.module, KeyedDropout.take_all)
    for stretch in [[block] for block in cuts.blocks] if apart else _stretches(cuts.blocks):
        _apply_stretch(cuts, stretch, positions)


def _columns(cuts: TensorCuts, collective: Collective, positions: Positions) -> None:
    """Columns with the same parent take in the same tensor."""
    for cut in (cut for cut in cuts.linears if cut.word == "gathered"):
        make_gathered(cut, Entrance(partial(enter, collective=collective, key=cut.name), 1), collective)
    columns = [cut for cut in cuts.linears if cut.word not in ("row", "gathered")]
    parents = [cut.name.rpartition(".")[0] for cut in columns]
    entrances: dict[str, Entrance] = {}
    for cut, parent in zip(columns, parents, strict=True):
        enters = _enters(cuts, parent, collective, positions)
        entrance = entrances.setdefault(parent, Entrance(enters, parents.count(parent)))
        _make_column(cut, entrance, collective)


def _make_column(cut: LinearCut, entrance: Entrance, collective: Collective) -> None:
    if cut.word == "column":
        make_column(cut, entrance, collective.group.rank)
    else:
        make_head(cut, entrance, Vocabulary(cut.spans, collective, cut.name))


def _enters(
    cuts: TensorCuts, parent: str, collective: Collective, positions: Positions
) -> Callable[[Tensor], Tensor]:
    """How what a column takes in becomes whole on all ranks."""
    if not _by_position(cuts, parent):
        return partial(enter, collective=collective, key=parent or "model")
    if any(attention.name == parent for attention in cuts.attentions):
        return lambda x: x  # the attention as a whole gathers
    return partial(gather, positions=positions, key=parent)


def _leaves(
    cuts: TensorCuts, name: str, collective: Collective, positions: Positions
) -> Callable[[Tensor], Tensor]:
    """How what a row gives is summed."""
    if _by_position(cuts, name):
        return partial(scatter, positions=positions, key=name)
    return partial(leave, collective=collective, key=name)


def _by_position(cuts: TensorCuts, name: str) -> bool:
    """Whether a module is inside of a block that is cut by positions."""
    return any(f"{name}.".startswith(f"{block.name}.") for block in cuts.blocks)


def _stretches(blocks: Sequence[PlanEntry]) -> list[list[PlanEntry]]:
    """Blocks that follow each other: between them nothing needs all positions."""
    found: list[list[PlanEntry]] = []
    for block in blocks:
        before = found[-1][-1] if found else None
        if before is not None and _next_name(before.name) == block.name:
            found[-1].append(block)
        else:
            found.append([block])
    return found


def _next_name(name: str) -> str:
    parent, dot, last = name.rpartition(".")
    return f"{parent}{dot}{int(last) + 1}" if last.isdecimal() else ""


def _apply_stretch(cuts: TensorCuts, stretch: Sequence[PlanEntry], positions: Positions) -> None:
    between = {id(dropout.module) for dropout in cuts.dropouts}
    for block in stretch:
        first, last = block is stretch[0], block is stretch[-1]
        make_block(block.module, positions, block.name, first=first, last=last)
        for module in block.module.modules():
            if isinstance(module, KeyedDropout) and id(module) not in between:
                _take_positions(module, positions)


def _take_positions(module: KeyedDropout, positions: Positions) -> None:
    module.take_positions(positions)
    remember(module, KeyedDropout.take_all)
