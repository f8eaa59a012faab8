"""From the entries of a plan to what each rank holds; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from paceline.errors import TaskError
from paceline.layout.placement import TensorPlan, even_span
from paceline.layout.tensor.heads import AttentionCut, cut_heads
from paceline.layout.tensor.linear import LinearCut, features_of
from paceline.layout.tensor.plan import PlanEntry
from paceline.layout.tensor.sequence import require_by_position
from paceline.layout.tensor.vocabulary import refuse_odd_embedding
from paceline.models import KeyedDropout
from paceline.spans import Span


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
class EmbeddingCut:
    """An embedding, and the tokens of each rank."""

    name: str
    layer: nn.Embedding
    spans: Sequence[Span]
    is_repeated = False

    @property
    def tensors(self) -> Mapping[str, int]:
        """Its tensors that are cut, and the dimension of each."""
        return {"weight": 0}


@dataclass(frozen=True)
class TensorCuts:
    """What a plan makes of a model."""

    linears: Sequence[LinearCut]
    attentions: Sequence[AttentionCut]
    dropouts: Sequence[DropoutCut]
    embeddings: Sequence[EmbeddingCut]
    blocks: Sequence[PlanEntry]
    degree: int

    @property
    def layers(self) -> list[LinearCut | EmbeddingCut]:
        """All that have tensors of their own."""
        return [*self.linears, *self.embeddings]


def cuts_of(entries: Sequence[PlanEntry], degree: int) -> TensorCuts:
    """How each planned module is cut; pure.

    Raises:
        TaskError: an attention cannot be cut by heads.
    """
    linears: list[LinearCut] = []
    attentions: list[AttentionCut] = []
    dropouts: list[DropoutCut] = []
    embeddings: list[EmbeddingCut] = []
    for entry in (entry for entry in entries if entry.word != "sequence"):
        if entry.word == "heads":
            attentions.append(cut_heads(entry.name, entry.module, degree))
            linears += attentions[-1].linears
        elif isinstance(entry.module, KeyedDropout):
            spans = linears[-1].spans
            dropouts.append(DropoutCut(entry.module, spans, spans[-1][-1]))
        elif isinstance(entry.module, nn.Embedding):
            refuse_odd_embedding(entry.name, entry.module)
            spans = _even_spans(entry.module.num_embeddings, degree)
            embeddings.append(EmbeddingCut(entry.name, entry.module, spans))
        else:
            features = features_of(entry.module, "inputs" if entry.word == "row" else "outputs")
            linears.append(LinearCut(entry.name, entry.module, entry.word, _even_spans(features, degree)))
    blocks = [entry for entry in entries if entry.word == "sequence"]
    for block in blocks:
        _refuse_gathered(block.name, linears)
        require_by_position(block.name, block.module, {id(cut.layer) for cut in linears})
    return TensorCuts(linears, attentions, dropouts, embeddings, blocks, degree)


def _refuse_gathered(block: str, linears: Sequence[LinearCut]) -> None:
    """Raises: TaskError: a layer in a block that is cut by positions would give all features of a part."""
    for cut in linears:
        if cut.word == "gathered" and cut.name.startswith(f"{block}."):
            raise TaskError(
                f"the tensor plan gathers the outputs of '{cut.name}', and cuts '{block}' by positions",
                next_step=f"plan '{cut.name}' as whole, or as column with a row behind it",
            )


def _even_spans(size: int, degree: int) -> list[Span]:
    return [even_span(size, degree, rank) for rank in range(degree)]


def _require_tied(cuts: TensorCuts, model: nn.Module) -> None:
    """Raises: TaskError: a tensor is cut in one module, and not, or otherwise, in another that has it too."""
    known: dict[int, tuple[str, int, Sequence[Span]]] = {}
    planned: dict[tuple[int, str], tuple[int, Sequence[Span]]] = {}
    for cut in cuts.layers:
        for key, dim in cut.tensors.items():
            known[id(getattr(cut.layer, key))] = (cut.name, dim, cut.spans)
            planned[id(cut.layer), key] = (dim, cut.spans)
    for name, module in model.named_modules():
        for key, p in module.named_parameters(recurse=False):
            if id(p) in known and planned.get((id(module), key)) != known[id(p)][1:]:
                raise TaskError(
                    f"'{name}' has its {key} in common with '{known[id(p)][0]}', which the tensor plan cuts",
                    next_step=f"cut '{name}' alike (both as vocabulary), or leave both whole",
                )


def transform_of(cuts: TensorCuts, model: nn.Module) -> TensorPlan:
    """The transform of a placement that a plan is; tied tensors go by their first name."""
    first = {id(p): name for name, p in model.named_parameters()}
    dims: dict[str, int] = {}
    spans: dict[str, Sequence[Span]] = {}
    summed: set[str] = set()
    _require_tied(cuts, model)
    for cut in cuts.layers:
        for key, dim in cut.tensors.items():
            name = first[id(getattr(cut.layer, key))]
            if cut.is_repeated:
                summed.add(name)
            else:
                dims[name], spans[name] = dim, cut.spans
    for block in cuts.blocks:
        summed |= {first[id(p)] for p in block.module.parameters() if p.requires_grad} - dims.keys()
    return TensorPlan(dims, cuts.degree, spans, frozenset(summed))
