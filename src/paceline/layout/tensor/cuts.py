"""From the entries of a plan to what each rank holds, and to modules that run with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from paceline.comm import Collective
from paceline.layout.placement import TensorPlan, even_span
from paceline.layout.tensor.become import remember, take_numbers
from paceline.layout.tensor.exchange import Entrance, enter
from paceline.layout.tensor.heads import AttentionCut, cut_heads
from paceline.layout.tensor.linear import LinearCut, features_of, make_column, make_row
from paceline.layout.tensor.plan import PlanEntry
from paceline.models import KeyedDropout
from paceline.slot import Span


@dataclass(frozen=True)
class DropoutCut:
    """A dropout between a column and a row, which sees a part of the features.

    Args:
        spans: of the features, by rank.
        width: of all features.
    """

    module: KeyedDropout
    spans: Sequence[Span]
    width: int


@dataclass(frozen=True)
class TensorCuts:
    """What a plan makes of a model."""

    linears: Sequence[LinearCut]
    attentions: Sequence[AttentionCut]
    dropouts: Sequence[DropoutCut]
    degree: int


def cuts_of(entries: Sequence[PlanEntry], degree: int) -> TensorCuts:
    """How each planned module is cut; pure.

    Raises:
        TaskError: an attention cannot be cut by heads.
    """
    linears: list[LinearCut] = []
    attentions: list[AttentionCut] = []
    dropouts: list[DropoutCut] = []
    for entry in entries:
        if entry.word == "heads":
            attentions.append(cut_heads(entry.name, entry.module, degree))
            linears += attentions[-1].linears
        elif isinstance(entry.module, KeyedDropout):
            spans = linears[-1].spans
            dropouts.append(DropoutCut(entry.module, spans, spans[-1][-1]))
        else:
            linears.append(_even(entry, degree))
    return TensorCuts(linears, attentions, dropouts, degree)


def _even(entry: PlanEntry, degree: int) -> LinearCut:
    features = features_of(entry.module, "outputs" if entry.word == "column" else "inputs")
    spans = [even_span(features, degree, rank) for rank in range(degree)]
    return LinearCut(entry.name, entry.module, entry.word, spans)


def transform_of(cuts: TensorCuts, model: nn.Module) -> TensorPlan:
    """The transform of a placement that a plan is; tied tensors go by their first name."""
    first = {id(p): name for name, p in model.named_parameters()}
    dims: dict[str, int] = {}
    spans: dict[str, Sequence[Span]] = {}
    summed: set[str] = set()
    for cut in cuts.linears:
        for key, dim in cut.tensors.items():
            name = first[id(getattr(cut.layer, key))]
            if cut.is_repeated:
                summed.add(name)
            else:
                dims[name], spans[name] = dim, cut.spans
    return TensorPlan(dims, cuts.degree, spans, frozenset(summed))


def apply_cuts(cuts: TensorCuts, collective: Collective) -> None:
    """Change the modules in place, after their tensors have been cut."""
    rank, columns = collective.group.rank, [cut for cut in cuts.linears if cut.word == "column"]
    parents = [cut.name.rpartition(".")[0] for cut in columns]
    entrances: dict[str, Entrance] = {}
    for cut, parent in zip(columns, parents, strict=True):
        enters = partial(enter, collective=collective, key=parent or "model")
        entrance = entrances.setdefault(parent, Entrance(enters, parents.count(parent)))
        make_column(cut, entrance, rank)
    for cut in cuts.linears:
        if cut.word == "row":
            make_row(cut, collective, rank)
    for attention in cuts.attentions:
        take_numbers(attention.module, attention.numbers[rank])
    for dropout in cuts.dropouts:
        span = dropout.spans[rank]
        dropout.module.take_part((span[0], span[-1]), dropout.width)
        remember(dropout.module, KeyedDropout.take_all)
